"""Runs of steps on a backend: eager, compiled, or replayed from captured variants, with the same bits each way."""

from __future__ import annotations

import logging
import math
from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from compiled_sampler.batch import EditedOutputs, ProbabilityOutputs, SampleOutputs, VerifyOutputs, tensors_of
from compiled_sampler.edits.names import GIVEN, LEAVES, MASK
from compiled_sampler.engine.boundary.arguments import check_modes, check_not_capturing
from compiled_sampler.engine.boundary.tensors import Results, check_bound_out, empty_outputs, has_form
from compiled_sampler.engine.drafts import DraftCache
from compiled_sampler.engine.plan import Plan
from compiled_sampler.engine.requests.edit_slots import EditSlots
from compiled_sampler.engine.requests.slots import SlotState
from compiled_sampler.engine.requests.uploads import LogprobTables
from compiled_sampler.engine.step import Step
from compiled_sampler.engine.step_executor import StepExecutor
from compiled_sampler.logprobs import LogprobOutputs, Logprobs
from compiled_sampler.lowering.comparison import hard_rows
from compiled_sampler.lowering.compiled_stages import CompiledStages, LoweringStatus, NotOnDisk, Progress
from compiled_sampler.lowering.layouts import TensorSpec
from compiled_sampler.modes import Mode, Verification, probabilities_mode, verifying
from compiled_sampler.pipeline.logprobs import top_mode
from compiled_sampler.pipeline.schedule import warmup_batches
from compiled_sampler.shard import VocabularyShard
from graph_cache import BufferSpec, CacheStatistics, GraphCache, LateCaptures, copy_tensors


@dataclass(frozen=True)
class SamplerStatistics(CacheStatistics):
    """A snapshot of a sampler: the counts of its graph cache, and how its compiled stages run.

    Attributes:
        lowering: the torch that compiles the stages, whether it is known, and the stages that run in eager torch
            instead; None on the eager backend.
        draft_cache_bytes: bytes of the draft cache, ``(S + 1) * K * V`` logits; 0 without one.
        edit_bytes: bytes of the edits and the history by slot, 0 before a request or a capture needs them; and of the
            state of the user's edits, which is there from the start.
        inexact_edits: names of the sampler's edits that do not promise equal bits (``LogitEdit.bit_exact``).
    """

    lowering: LoweringStatus | None
    draft_cache_bytes: int
    edit_bytes: int
    inexact_edits: tuple[str, ...] = ()


OUTPUTS: dict[str, Any] = {
    "sample": SampleOutputs,
    "best": SampleOutputs,
    "verify": VerifyOutputs,
    "probabilities": ProbabilityOutputs,
    "edited_logits": EditedOutputs,
}
"""What each kind of step returns."""
_MOST_CHOSEN = 256  # kinds of calls whose step is known; those with logprobs of given ids are as many as their ids
_logger = logging.getLogger("compiled_sampler")
Launch = Callable[..., Any]
"""``launch(plan, tensors, out)``: the results of a step on the way that ``StepRunner.resolve`` chose."""


class StepRunner:
    """Runs steps on one backend."""

    def __init__(
        self,
        backend: str,
        modes: tuple[Mode, ...],
        requests: SlotState,
        logits_dtype: torch.dtype,
        buckets: Iterable[int],
        most: int,  # rows that warmup compiles for; above the largest bucket they run uncaptured
        drafts: DraftCache | None,
        edits: EditSlots,
        logprobs: LogprobTables,
        shard: VocabularyShard | None,
    ) -> None:
        self.backend, self._modes, self._dtype, self._shard = backend, modes, logits_dtype, shard
        self._vocab_size, self._drafts, self._device = modes[0].vocab_size, drafts, requests.staged.mirror.there.device
        self._columns = self._vocab_size if shard is None else shard.width(self._vocab_size)  # of logits
        self._edits, self._logprobs, self.custom = edits, logprobs, edits.custom
        self._stages = None if backend in ("eager", "reference") else CompiledStages()
        self._cache = GraphCache(self._device, buckets, mirror=requests.staged.mirror)
        self.largest_bucket = self._cache.ladder.largest  # rows of the largest batch that is captured
        self._sizes = sorted({*self._cache.ladder.sizes, most})
        self._registered: dict[str, Step] = {}
        self._late: LateCaptures | None = None  # since a warm-up that did not wait
        self._chosen: dict[Any, Step] = {}  # of 75 registered steps a choice takes 50 us, of a verification 320
        self._staged = requests.staged
        self._executor = StepExecutor(
            backend == "reference", requests, self._stages, drafts, edits, logprobs, self._vocab_size, shard
        )
        for mode in modes:
            self._register(Step("sample", mode))

    def launch(self, step: Step, plan: Plan, tensors: dict[str, Tensor], out: Any = None) -> Any:
        """The results of a step, in ``out`` if given."""
        return self.resolve(step, plan, tensors, out)(plan, tensors, out)

    def resolve(self, step: Step, plan: Plan, tensors: dict[str, Tensor], out: Any) -> Launch:
        """What launches a step."""
        # It serves other plans of the same shape, and tensors of the same layouts and addresses, until ``generation``
        # changes, and only inside or only outside of a capture.
        if not plan.slots:
            return partial(_empty_results, step, self._device, self._columns)
        is_exact = not plan.has_planned_slots  # another step might serve other requests
        step = step if is_exact else self._registered_for(step)
        if self.backend != "graph" or step.name not in self._registered:
            return partial(self._launch_uncaptured, step)
        buffers = {name: step.buffer(name) for name in tensors}
        is_renamed = any(buffer != name for name, buffer in buffers.items())

        def inputs(plan: Plan, tensors: dict[str, Tensor], on_host: bool) -> dict[str, Any]:
            of_call = {buffer: tensors[name] for name, buffer in buffers.items()} if is_renamed else tensors
            return {**plan.inputs(step.reads_counts, on_host), **of_call}

        into, given = out if out is None or step.logprobs is None else flat(out), inputs(plan, tensors, True)
        late = self._late
        may_come = late is not None and late.capture(step.name, given, len(plan.slots), into) is None
        route, rows = self._cache.route(step.name, given, out=into, is_exact=is_exact)
        on_host, replay = route.key is not None, route.run
        self._staged.steps_are_replays = on_host
        launch: Launch
        if step.logprobs is not None:
            launch = lambda plan, tensors, out: _replay_flat(replay, inputs(plan, tensors, on_host), rows, out)  # noqa: E731
        elif on_host and not is_renamed and not plan.replaced and step.reads_counts == (plan.num_drafts is not None):
            # ``inputs`` without its frames
            launch = lambda plan, tensors, out: replay({**plan.planned.host, **tensors}, rows, out)  # noqa: E731
        else:
            launch = lambda plan, tensors, out: replay(inputs(plan, tensors, on_host), rows, out)  # noqa: E731
        return partial(self._launch_until_settled, launch) if may_come and not on_host else launch

    generation: Any = property(
        attrgetter("_cache.generation"),  # asked for in every step: no frame of Python
        doc="Changes when variants come or go, so that what ``resolve`` returned before must not be called.",
    )

    def _remembered(self, call: Any, step: Step) -> Step:
        if len(self._chosen) >= _MOST_CHOSEN:
            self._chosen.clear()
        self._chosen[call] = step
        return step

    def _registered_for(self, step: Step) -> Step:
        """The registered step with the fewest edits that can replace a step, else the step itself."""
        if not step.edits or step.name in self._registered:
            return step
        if step in self._chosen:
            return self._chosen[step]
        fits = (known for known in self._registered.values() if known.can_replace(step, self.custom.of_call))
        return self._remembered(step, min(fits, key=lambda known: len(known.edits), default=step))

    def _launch_until_settled(self, launch: Launch, plan: Plan, tensors: dict[str, Tensor], out: Any) -> Any:
        """A launch without a graph, after which the next call captures its variant, if its stages are compiled."""
        results = launch(plan, tensors, out)
        if self._stages is not None and self._stages.are_settled:
            self._cache.forget_routes()
        return results

    def _launch_uncaptured(self, step: Step, plan: Plan, tensors: dict[str, Tensor], out: Any) -> Any:
        self._staged.mirror.upload()
        result = self._executor(step, **{**plan.inputs(step.reads_counts, on_host=False), **tensors})
        return result if out is None else copied(result, out)

    def register(
        self,
        verifications: Sequence[Verification],
        probabilities: bool,
        edits: Sequence[tuple[str, ...]],
        logprobs: Sequence[Logprobs],
    ) -> None:
        """Register further steps, which ``warmup`` then compiles and captures."""
        width = max((verification.width for verification in verifications), default=0)
        self._logprobs.keep(logprobs, self._sizes[-1] * (1 + width))
        for names in ((), *edits):
            for step in _steps_of(self._modes, verifications, probabilities, names, self.custom.of_call):
                self._register(step)
                for wanted in logprobs if step.takes_logprobs else ():
                    self._register(step.with_logprobs(wanted))

    def verification(self, wanted: Step, rule: str, forms: tuple[str, ...], is_exact: bool) -> Step:
        """The registered step of the least sufficient width that verifies such drafts, or a new one of this width."""
        # ``wanted`` is as wide as the most drafts of a request; ``forms`` of ``Mode.drafts`` describe the call
        key = wanted, rule, forms, is_exact
        if key in self._chosen:
            return self._chosen[key]
        steps = [replace(wanted, mode=verifying(wanted.mode, rule, form)) for form in forms]
        wide = [known for known in self._registered.values() if known.kind == "verify" and known.width >= wanted.width]
        pairs = ((known, replace(step, width=known.width)) for known in wide for step in steps)
        allowed = (pair for pair in pairs if not is_exact or pair[0].edits == pair[1].edits)
        fits = (known for known, step in allowed if known.can_replace(step, self.custom.of_call))
        return self._remembered(key, min(fits, key=lambda known: (known.width, len(known.edits)), default=steps[0]))

    def warmup(self, progress: Progress | None, modes: Collection[str] | None, *, waits: bool) -> None:
        """Compile the registered steps for every class of row counts, and capture their variants; or ask for it."""
        check_modes(modes, [mode.name for mode in self._modes])
        if self._drafts is not None:
            self._drafts.forget()  # a step that is compiled or captured runs, and may write there
        check_not_capturing(
            self._device, "warmup() must not be called inside a capture, which forbids others; call it before"
        )
        steps = [step for step in self._registered.values() if modes is None or step.is_of(modes)]
        stages = self._stages
        if stages is not None:
            self._compile(stages, steps, progress, waits=waits)
            if stages.lacks_kernels:
                return  # the warning of their stages said so
        if self.backend != "graph":
            return
        # A capture forgets what handles of drafts name, and runs collectives: each rank would capture in its time.
        may_come_late = not waits and self._drafts is None and self._shard is None
        if stages is not None and (may_come_late or self._late is not None):
            self._late = LateCaptures(self._cache, lambda: stages.are_settled, _logger)
        if waits:
            self._cache.warmup([step.name for step in steps], progress=progress)
        else:
            self._cache.forget_routes()  # of calls that ran without a graph so far

    def _compile(
        self, stages: CompiledStages, steps: Sequence[Step], progress: Progress | None, *, waits: bool
    ) -> None:
        """Compile the stages of steps in parallel, then run each step, for every class of row counts."""
        samples = [(step, sample) for step in steps for sample in dict.fromkeys(self._samples(step))]
        listed, before, bound, further = [*samples], 0, self._bound, len(samples) if waits else 0

        def compiled(done: int, total: int, label: str) -> None:
            nonlocal before
            before = total
            if progress is not None:
                progress(done, total + further, label)

        def execute_all() -> None:
            for done, (step, sample) in enumerate(samples, start=before + 1):
                tensors = self._padding(step, sample, bound)
                self._executor(step, **(_with_hard_rows(step, tensors) if stages.compares else tensors))
                if progress is not None:
                    progress(done, before + len(samples), f"ran {step.name} for batches like {sample[0]}")

        # Ranks must not stop at different stages: those behind would meet other collectives.
        if waits and not stages.compares and self._shard is None:
            with suppress(NotOnDisk), stages.compiling_at_calls(only_loads=True):
                execute_all()
                listed, further = [], 0
        unread = None if bound is None else TensorSpec.of(bound).empty()  # what listed edits write is wrong
        with stages.precompiling(self._device, compiled, waits=waits):
            for step, sample in listed if not stages.compares else ():
                self._executor(step, **self._padding(step, sample, unread))
        if waits and listed:
            with stages.compiling_at_calls():
                execute_all()

    def bind(self, inputs: Mapping[str, Tensor], out: Any) -> None:
        """Let variants read inputs in place, logits of the target among them, and write results, unless out is None."""
        steps = [step for step in self._registered.values() if not step.mode.from_probabilities]
        read: dict[str, Tensor] = {}
        for name, tensor in inputs.items():
            shape = tensor.shape[1:] if name == "draft_token_ids" else ()
            names = {step.buffer(name) for step in steps if not shape or (step.width,) == shape}
            if not names:
                raise ValueError(f"{name} must have the form of a prepared step; Sampler(verifications=...)")
            read |= dict.fromkeys(names, tensor)
        written = {
            step.name: out
            for step in steps
            if out is not None and has_form(out, _empty_results(step, self._device, self._columns))
        }
        outs = {id(each): each for each in ({**self._cache.bound_outs, **written}).values()}
        for each in (outs if out is None else {**outs, id(out): out}).values():
            check_bound_out(each, self._device, (*{**self._cache.bound_inputs, **read}.values(),))
        if out is not None and not written:
            raise ValueError("out must have the form of a prepared step; Sampler(verifications=, captured_edits=)")
        for name, tensor in read.items():
            self._cache.bind(name, tensor)
        for name in written:
            self._cache.bind_out(name, out)
        self._cache.evict(unbound=True)

    def unbind(self) -> None:
        """Drop everything that was bound."""
        self._cache.unbind()
        self._cache.evict(unbound=True)

    @property
    def _bound(self) -> Tensor | None:
        """The logits of the target that are bound."""
        return self._cache.bound_inputs.get("logits")

    def statistics(self) -> SamplerStatistics:
        """The counts of the graph cache, the memory that it holds, and how compiled stages run."""
        lowering = None if self._stages is None else self._stages.status()
        return SamplerStatistics(
            **vars(self._cache.statistics()),
            lowering=lowering,
            draft_cache_bytes=0 if self._drafts is None else self._drafts.num_bytes,
            edit_bytes=self._edits.num_bytes,
            inexact_edits=self.custom.inexact,
        )

    def _register(self, step: Step) -> None:
        if step.name in self._registered:
            return
        inputs = self._inputs(step)
        buffers = {name: step.buffer(name) for name in inputs}
        peers = [known for known in self._registered.values() if (known.kind, known.width) == (step.kind, step.width)]
        covers = [peer.name for peer in peers if step.covers(peer)]
        self._executor.table_of(step)  # made before any capture
        most_copied = step.most_copied if self._shard is None else math.inf  # every rank takes the same route
        called = partial(_call_buffers, self._executor, step, buffers)
        specs = {buffers[name]: spec for name, spec in inputs.items()}
        self._cache.register(step.name, called, specs, covers=covers, most_copied=most_copied)
        self._registered[step.name] = step

    def _inputs(self, step: Step) -> dict[str, BufferSpec]:
        """The inputs of a step by name, those of the user's edits too."""
        of_edits = () if step.mode.from_probabilities else step.edits
        return {**step.inputs(self._dtype, self._columns), **self.custom.buffers(of_edits, step.width + 1)}

    def _samples(self, step: Step) -> Iterator[tuple[int, int, bool]]:
        """Entries, rows, and whether logits are the bound ones, of the batches that between them use every kernel."""
        sizes, times = self._sizes, step.width + 1
        several = [max(size, 2) for size in sizes] if step.width else sizes
        also = top_mode(self._vocab_size) if step.logprobs is not None and step.logprobs.top else None
        batches = warmup_batches(step.mode, several, times, self._device, also=also, is_edited=bool(step.edits))
        # between ranks the number of rows alone decides what travels, and so which stages run
        further = sizes[:1] if self._shard is None else sizes
        for size, rows in (*batches, *((size, size * times) for size in further)):
            yield size, rows, False
            if self._bound is not None and not step.mode.from_probabilities:
                rows = min(rows, self._bound.shape[0])
                yield min(size, rows), rows, True

    def _padding(self, step: Step, sample: tuple[int, int, bool], bound: Tensor | None) -> dict[str, Tensor]:
        """Inputs of a sample of padding, whose logits are the first rows of ``bound`` if the sample says so."""
        size, rows, is_bound = sample
        padding = {}
        for name, spec in self._inputs(step).items():
            count = rows if name in ("logits", MASK) or name.startswith(GIVEN) else size * spec.times
            padding[name] = torch.full((count, *spec.shape), spec.fill, dtype=spec.dtype, device=self._device)
        return {**padding, "logits": bound[:rows]} if is_bound and bound is not None else padding


# No method: the cache holds it, and graphs of a sampler that is dropped must not wait for the cyclic collector.
def _call_buffers(executor: StepExecutor, step: Step, buffers: Mapping[str, str], **tensors: Tensor) -> Any:
    """The results of a step on its buffers, which are by input; flat, as the cache takes them."""
    results = executor(step, **{name: tensors[buffer] for name, buffer in buffers.items()})
    return results if step.logprobs is None else flat(results)


def _empty_results(
    step: Step, device: torch.device, columns: int, plan: Any = None, tensors: Any = None, out: Any = None
) -> Any:
    """The results of a batch without requests."""
    if out is not None:
        return out
    kind, columns = OUTPUTS[step.kind], step.width + 1 if step.kind == "verify" else columns
    has_edits = step.has_tokens and bool(step.edits)
    return empty_outputs(kind, columns, device, has_edits=has_edits, logprobs=step.logprobs, of_trees=step.of_trees)


def copied(results: Results, out: Results) -> Results:
    """``out``, after a copy of all fields of the results into it, which converts what is of another dtype."""
    copy_tensors(tensors_of(out), tensors_of(results))
    return out


def _steps_of(
    modes: Sequence[Mode],
    verifications: Sequence[Verification],
    probabilities: bool,
    edits: tuple[str, ...],
    with_call: Sequence[str],
) -> Iterator[Step]:
    """The steps for batches with the same edits."""
    writes = bool({*LEAVES} & {*edits})  # into the logits of the target, and no others
    for mode in modes:
        yield Step("sample", mode, edits=edits)
    for mode in modes if any(way.rule != "match" for way in verifications) and not writes else ():
        yield Step("sample", mode, edits=edits, has_own_noise=True)
    for way in verifications:
        for mode in modes if way.siblings and not writes else ():
            own = way.rule != "match"
            yield Step("best", mode, edits=edits, num_best=way.siblings, has_own_noise=own)
        if "watermark" in edits and way.rule != "match":
            continue
        for mode in modes:
            yield Step("verify", verifying(mode, way.rule, way.drafts), way.width, edits, of_trees=way.trees)
        of_logits = writes or {MASK, "watermark", *with_call} & {*edits}
        if way.drafts in ("one_hot", "probabilities") and not of_logits and not way.trees:
            mode = verifying(probabilities_mode(modes[0].vocab_size), way.rule, way.drafts)
            yield Step("verify", mode, way.width, edits)
    for mode in modes if probabilities and not writes else ():
        yield Step("probabilities", mode, edits=edits)


def _with_hard_rows(step: Step, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs of a step whose logits and proposals are such as compiled code may treat otherwise than eager torch."""
    of_logits, of_drafts = step.mode.from_probabilities, step.mode.drafts == "probabilities"
    hard = {**tensors, "logits": hard_rows(tensors["logits"], are_probabilities=of_logits)}
    if "proposals" in tensors:
        hard["proposals"] = hard_rows(tensors["proposals"], are_probabilities=of_drafts)
    return hard


_FLAT: dict[type, Any] = {
    kind: namedtuple(
        f"Flat{kind.__name__}", [*kind._fields[:-1], *(f"logprobs_{name}" for name in LogprobOutputs._fields)]
    )
    for kind in (SampleOutputs, VerifyOutputs)
}
_NESTED: dict[type, Any] = {flat: kind for kind, flat in _FLAT.items()}


def flat(results: SampleOutputs | VerifyOutputs) -> Any:
    """Results with logprobs, whose last field is a tuple, as a flat named tuple; fields that are None stay None."""
    *fields, logprobs = results
    return _FLAT[type(results)](*fields, *(logprobs or ()))


def _replay_flat(replay: Callable[..., Any], tensors: dict[str, Any], rows: int, out: Any) -> Any:
    """The results of a batch of a step with logprobs by a ``replay`` of flat ones, ``replay(tensors, rows, out)``."""
    if out is not None:
        replay(tensors, rows, flat(out))
        return out
    results = replay(tensors, rows, None)
    kind = _NESTED[type(results)]
    count = len(kind._fields) - 1
    return kind(*results[:count], LogprobOutputs(*results[count:]))
