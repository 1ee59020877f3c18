"""Stages compiled by Inductor, each found again by its static arguments and the layout of its tensors.

Each stage of a step is compiled apart, for a single row, for a few and for many rows, with options under which
Inductor's results equal eager torch bit for bit. Stages of one step share nothing but tensors, so a CUDA graph can
record them in their order, or two chains of them side by side.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compiled_sampler.core.stage import Run
from compiled_sampler.lowering.comparison import fault
from compiled_sampler.lowering.compiling.compile_queue import HANGS, QUEUE, WantedStage
from compiled_sampler.lowering.compiling.stage_code import EXACT_OPTIONS, StageCode, fault_of
from compiled_sampler.lowering.inductor.compilation import (
    Compiled,
    Options,
    import_compilers,
    set_up_triton,
    zeros_like_results,
)
from compiled_sampler.lowering.inductor.versions import LOCK, is_known
from compiled_sampler.lowering.stages.stage_call import StageCall, leaves, shape
from compiled_sampler.lowering.stages.tuning import Stage, tuning_of

Progress = Callable[[int, int, str], object]

VARIABLE = "COMPILED_SAMPLER_KNOWN_ANSWERS"
"""The environment variable that is 1 where stages are compared with eager torch, also on a torch that is known."""

_MOST_CALLS = 4096  # shapes of calls that are remembered
_RUN_OF_EVERY_CHAIN = 2


@dataclass(frozen=True)
class LoweringStatus:
    """How a sampler's stages run: compiled, but for those named here.

    Attributes:
        torch_version: of the torch that compiles them.
        torch_is_known: whether Inductor's private parts were checked on it; on an unknown torch they are not touched,
            which costs speed alone.
        eager_stages: by name of a stage that runs in eager torch, why: its compiled form fails or differs, or
            ``warmup`` alone compiles it.
        queued_stages: by name of a stage that runs in eager torch until it is compiled, how many forms of it are.
        compile_processes: of this process, for all of its samplers, that compile or wait for a stage at the moment.
    """

    torch_version: str
    torch_is_known: bool
    eager_stages: Mapping[str, str]
    queued_stages: Mapping[str, int] = field(default_factory=dict)
    compile_processes: int = 0


class StageWarning(UserWarning):
    """A compiled stage differs from eager torch, or does not compile, and runs in eager torch instead."""


class CompiledStages:
    """Runs stages through Inductor; a ``run`` for the pipeline. Those that are not compiled yet run in eager torch."""

    fuses = True
    compiles_at_calls = False
    """Whether the first call of a stage compiles it; tests and tools set it for every sampler."""

    def __init__(self, options: Options | None = None) -> None:
        self._options = EXACT_OPTIONS if options is None else options  # others for tools alone
        self._wanted: dict[Hashable, WantedStage] = {}  # hand-written kernels too, which a process launches
        self._called: dict[Hashable, Callable[..., Any]] = {}
        self._steps: dict[Hashable, UncompiledStep] = {}
        self._eager: dict[Stage, str] = {}
        self._warned: set[str] = set()
        self._asked: set[Hashable] | None = None  # in a warm-up, what it asked for
        self._loads = self._launches_elsewhere = self._takes_every_chain = self._is_set_up = False
        QUEUE.users.add(self)

    def __call__(self, stage: Any, /, *tensors: Any, **static: Any) -> Any:
        """Run a stage compiled for its static arguments, its class of row counts, and the layout of its tensors."""
        # The class is that of the tensor with the most rows; tensors of a single row are compiled as such.
        if self.runs_as_is(stage):
            if not self._is_set_up:
                self._set_up(next(leaf for leaf in leaves(tensors) if leaf is not None).device)
            return stage(*tensors, **static)
        shapes = _shapes_of(stage, tensors, static)
        found = self._called.get(shapes)
        if found is None:
            found = self._first_call(shapes, StageCode.of(stage, tensors, static))
        return found(*tensors)

    @property
    def compares(self) -> bool:
        """Whether each compiled stage is compared with eager torch before it is used."""
        return not is_known() or os.environ.get(VARIABLE) == "1"

    @property
    def are_settled(self) -> bool:
        """Whether no stage that was called or asked for waits for its compiled form."""
        return not any(wanted.state == "queued" for wanted in [*self._wanted.values()])

    def overlap(self, device: torch.device, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
        """What two chains return, the first from a second stream; a CUDA graph that records both lets them overlap."""
        if device.type != "cuda":
            return first(), second()
        here = torch.cuda.current_stream(device)  # runs the second, then waits for the first
        aside = _second_stream(device, here.cuda_stream)
        aside.wait_stream(here)
        try:
            with torch.cuda.stream(aside):
                made = first()
            results = made, second()
        finally:
            here.wait_stream(aside)
        if not torch.cuda.is_current_stream_capturing():  # a graph's memory is its own
            tree_map_only(Tensor, lambda each: each.record_stream(here), made)
        return results

    def of_step(self, kind: Hashable, device: torch.device) -> Run:
        """What runs a step of a kind: these stages, or until all that it needs are compiled an ``UncompiledStep``."""
        # kind: a step and whatever its stages are compiled for. No capture takes an uncompiled step.
        if self.compiles_at_calls or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return self
        return self if self.has_compiled(kind) else self.uncompiled(kind)

    def uncompiled(self, kind: Hashable) -> UncompiledStep:
        """What runs a step and asks for its stages."""
        if kind not in self._steps and len(self._steps) >= _MOST_CALLS:
            self._steps.clear()
        return self._steps.setdefault(kind, UncompiledStep(self)).begun(takes_every_chain=self._asked is not None)

    def has_compiled(self, kind: Hashable) -> bool:
        """Whether all stages of a step are compiled."""
        return self.compiles_at_calls or (kind in self._steps and self._steps[kind].is_compiled)

    def prepare(
        self, ask: Callable[[], object], device: torch.device, progress: Progress | None, further: int, *, waits: bool
    ) -> int:
        """The number of stages to compile: those that ``ask`` calls in uncompiled steps, and those of calls before."""
        # progress: called as (done, stages + further, label), without waits by threads, for stages alone.
        asked, done, lock = list[WantedStage](), 0, threading.Lock()

        def settled(wanted: WantedStage) -> None:
            nonlocal done
            with lock:
                done += 1
            if progress is not None:
                progress(done, len(asked) + further * waits, f"compiled stage {wanted.name}")

        if waits or device.type == "cuda":
            self._set_up_compilers(device)
        if self.compares:  # at the calls of ``compiling_at_calls``
            return 0
        self._asked, self._loads, self._launches_elsewhere = set(), waits, not waits and device.type == "cuda"
        try:
            ask()
        finally:
            self._asked, self._loads, self._launches_elsewhere = None, False, False
        asked += [wanted for wanted in [*self._wanted.values()] if wanted.compiled is None and not wanted.is_opaque]
        for wanted in reversed(asked) if waits else ():  # processes begin with the first
            if not QUEUE.withdraw(wanted):
                QUEUE.wait_for(wanted)
            if wanted.compiled is None:
                self._compile(StageCode.of_call(wanted.call))
            settled(wanted)
        for wanted in () if waits else asked:
            QUEUE.tell(wanted, settled)
        return len(asked)

    @contextmanager
    def compiling_at_calls(self) -> Iterator[None]:
        """Within, the first call of a stage compiles it."""
        self.compiles_at_calls, self._takes_every_chain = True, self.compares
        try:
            yield
        finally:
            del self.compiles_at_calls
            self._takes_every_chain = False

    def any_row(self, flags: Tensor) -> bool:
        """``stage.any_row``; where stages are compared every chain runs, so that each is."""
        return self._takes_every_chain or bool(flags.any())

    def run_eagerly(self, stage: Stage, reason: str) -> None:
        """Run a stage in eager torch from now on, and warn of it."""
        self._eager[stage] = reason
        self._warn(stage, reason)

    def forget(self) -> None:
        """Know no stage any more: in a forked child, where some may be compiled by a thread that is not there."""
        self._wanted.clear()
        self._called.clear()
        self._steps.clear()

    def status(self) -> LoweringStatus:
        """Which torch compiles the stages, and which of them run in eager torch instead."""
        wanted = [*self._wanted.values()]
        # of a hand-written kernel: why no process could compile it, so that its first launch does
        reasons = {each.name: each.reason for each in wanted if each.state == "eager" and each.reason}
        reasons |= {stage.__name__: reason for stage, reason in self._eager.items()}
        queued = Counter(each.name for each in wanted if each.state == "queued")
        return LoweringStatus(str(torch.__version__), is_known(), reasons, queued, len(QUEUE.processes))

    def _warn(self, stage: Stage, reason: str) -> None:
        """Warn of a stage that stays in eager torch; of several that fail in one way, of the first."""
        kind = reason if "differs" in reason else reason.split(":")[0].split(",")[0]
        if kind in self._warned:
            return
        self._warned.add(kind)
        warnings.warn(
            f"stage {stage.__name__} runs in eager torch {torch.__version__}: compiled, {reason}. Tokens stay the "
            "same, steps take longer. To compile stages takes a C++ compiler (CXX) and a cache directory that can be "
            "written and executed from (TORCHINDUCTOR_CACHE_DIR); Sampler.statistics().lowering names all that are "
            "eager",
            StageWarning,
            stacklevel=2,
        )

    def runs_as_is(self, stage: Stage) -> bool:
        """Whether a stage is not compiled: it has kernels of its own, or its compiled code is not to be used."""
        return stage in self._eager or tuning_of(stage).opaque

    def stays_eager(self, stage: Stage) -> bool:
        """Whether the compiled code of a stage is not to be used."""
        return stage in self._eager

    def launched_elsewhere(self, stage: Stage, tensors: tuple[Any, ...], static: dict[str, Any]) -> Any:
        """Zeros in the shapes of what hand-written kernels return, which a process launches; None if this one may."""
        if not self._launches_elsewhere or stage in self._eager:
            return None
        shapes = _shapes_of(stage, tensors, static)
        if shapes not in self._wanted:
            self._wanted[shapes] = wanted = WantedStage(StageCall.of(stage, tensors, static).portable())
            QUEUE.put(wanted, next(leaf for leaf in leaves(tensors) if leaf is not None).device)
        return zeros_like_results(stage, tensors, static)

    def compiled(self, code: StageCode, *, runs: bool = False) -> Compiled | None:
        """The compiled code of a stage, if it is there and serves such tensors; ``runs`` outside of a capture."""
        wanted = self._wanted.get(code.key)
        if wanted is None or wanted.compiled is None or not wanted.compiled.guard_check(*code.tensors):
            return None
        wanted.has_run |= runs
        return wanted.compiled

    def is_ready(self, key: Hashable) -> bool:
        """Whether the code with a key is there."""
        return key in self._wanted and self._wanted[key].state == "ready"

    def want(self, code: StageCode) -> None:
        """Ask for a stage whose code is not there, once; a warm-up that waits looks on disk first."""
        wanted = self._wanted.get(code.key)
        is_asked_anew = self._asked is not None and code.key not in self._asked
        if QUEUE.hangs:
            self._eager[code.stage] = HANGS
        elif wanted is None or (is_asked_anew and wanted.state == "eager"):
            wanted = self._wanted[code.key] = WantedStage(code.call)
            if self._asked is not None:
                self._asked.add(code.key)
            if self.compares or self._options is not EXACT_OPTIONS:
                wanted.reason = "warmup() alone compiles it, and compares it with eager torch"
            elif self._loads and (found := code.found(code.path(self._options))) is not None:
                wanted.state, wanted.compiled = "ready", found
            else:
                QUEUE.put(wanted, code.device)
        elif wanted.has_failed:
            wanted.has_failed = False  # warned of once
            self._warn(code.stage, wanted.reason)

    def _set_up(self, device: torch.device) -> None:
        set_up_triton(device)
        self._is_set_up = True

    def _set_up_compilers(self, device: torch.device) -> None:
        with LOCK:  # two threads that import them at once find modules that are half imported
            import_compilers()
            self._set_up(device)

    def _first_call(self, shapes: Hashable, code: StageCode) -> Callable[..., Any]:
        """What runs a stage for tensors of such shapes: compiled code, or eager torch for now."""
        found = self.compiled(code)
        if found is None:
            code.check_not_capturing()
            compiles = self.compiles_at_calls and not QUEUE.hangs
            (self._compile if compiles else self.want)(code)
            found = self.compiled(code) if compiles else None
        if found is None:
            return functools.partial(code.stage, **code.static)
        if not self._wanted[code.key].has_run:
            code.check_not_capturing()  # Inductor may time kernels at their first run
            self._wanted[code.key].has_run = True
        found.disable_guard_check()  # a matter of shapes alone, and looked at above
        if len(self._called) >= _MOST_CALLS:
            self._called.clear()
        self._called[shapes] = found
        return found

    def _compile(self, code: StageCode) -> None:
        """Have the code of a stage from disk, or compile it in this thread; it stays eager if it fails or differs."""
        code.check_not_capturing()
        self._set_up_compilers(code.device)
        known = self._wanted.get(code.key)
        is_unfit = known is not None and known.compiled is not None  # and so is what is on disk

        @functools.cache
        def made() -> Compiled:
            return code.compiled(self._options) if is_unfit else code.found_or_compiled(self._options)

        try:
            reason = ""
            if self.compares:
                reason = fault(code.stage, lambda *tensors: made()(*tensors), code.tensors, code.static)
            if not reason:
                made()
        except Exception as error:
            reason = fault_of(error)
        self._wanted.pop(code.key, None)
        if reason:
            self.run_eagerly(code.stage, reason)
        else:
            self._wanted[code.key] = WantedStage(code.call, state="ready", compiled=made())


class UncompiledStep:
    """Runs one kind of step until all of its stages are compiled: those that are there compiled, others in eager torch.

    Rows go in the chunks of eager torch, so that its scratch stays bounded. A step with a stage that cannot be compiled
    stays one for good.
    """

    fuses = cuts = True

    def __init__(self, stages: CompiledStages) -> None:
        self._stages, self._keys, self._rows = stages, set[Hashable](), 0
        self._num_runs, self._takes_every_chain, self._knows_all, self._stays = 0, False, False, False

    def begun(self, *, takes_every_chain: bool = False) -> UncompiledStep:
        """For the next run, which takes every chain if it is the second: the first token shall not wait for them."""
        self._num_runs += 1
        self._takes_every_chain = takes_every_chain or self._num_runs == _RUN_OF_EVERY_CHAIN
        self._knows_all |= self._takes_every_chain
        return self

    @property
    def is_compiled(self) -> bool:
        """Whether all stages that the step may call are compiled."""
        if self._knows_all and not self._stays and all(map(self._stages.is_ready, self._keys)):
            self._keys.clear()  # looked at once
        return self._knows_all and not self._stays and not self._keys

    def __call__(self, stage: Any, /, *tensors: Any, **static: Any) -> Any:
        """A stage's results, after it is asked for."""
        if self._stages.runs_as_is(stage):
            self._stays |= self._stages.stays_eager(stage)
            results = self._stages.launched_elsewhere(stage, tensors, static)
            return self._stages(stage, *tensors, **static) if results is None else results
        code = StageCode.of(stage, tensors, static, self._rows)
        compiled = self._stages.compiled(code, runs=True)
        if compiled is None:
            self._keys.add(code.key)
            self._stages.want(code)
            return stage(*tensors, **static)
        return compiled(*tensors)

    def any_row(self, flags: Tensor) -> bool:
        """``stage.any_row``; in one run every chain is taken, so that all stages are asked for."""
        return self._takes_every_chain or bool(flags.any())

    def overlap(self, device: torch.device, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
        """The results of two chains, one after the other."""
        return first(), second()

    @contextmanager
    def for_rows(self, count: int) -> Iterator[None]:
        """Within, stages of a chunk are asked for as code for so many rows."""
        before, self._rows = self._rows, max(self._rows, count)
        try:
            yield
        finally:
            self._rows = before


def _shapes_of(stage: Stage, tensors: tuple[Any, ...], static: dict[str, Any]) -> tuple[Any, ...]:
    """What distinguishes calls of stages: everything but the numbers in their tensors."""
    return stage, *static.items(), *map(shape, leaves(tensors))


@functools.cache
def _second_stream(device: torch.device, stream: int) -> torch.cuda.Stream:
    """Another for each stream, so that no call meets the memory of one that is not ordered with it."""
    second: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return second
