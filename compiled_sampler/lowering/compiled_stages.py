"""Stages compiled by Inductor, each found again by its static arguments and the layout of its tensors.

Each stage of a step is compiled apart, for a single row, for a few and for many rows, with options under which
Inductor's results equal eager torch bit for bit. Stages of one step share nothing but tensors, so a CUDA graph can
record them in their order, or two chains of them side by side.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compiled_sampler.core.stage import Run
from compiled_sampler.lowering.comparison import fault
from compiled_sampler.lowering.compile_queue import HANGS, QUEUE, Settled, WantedStage
from compiled_sampler.lowering.inductor.compilation import Compiled, Options, fake_results, set_up_compilers
from compiled_sampler.lowering.inductor.versions import is_known
from compiled_sampler.lowering.layouts import leaves, shape
from compiled_sampler.lowering.stage_code import EXACT_OPTIONS, StageCode, fault_of
from compiled_sampler.lowering.tuning import Stage, is_hand_written, tuning_of
from compiled_sampler.pipeline.chunks import without_kernels

Progress = Callable[[int, int, str], object]

COMPARISON_VARIABLE = "COMPILED_SAMPLER_KNOWN_ANSWERS"
"""The environment variable that is 1 where stages are compared with eager torch, also on a torch that is known."""

_MOST_CALLS = 4096  # shapes of calls that are remembered


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


class NotOnDisk(Exception):
    """A stage is to be loaded that is not there."""


@dataclass(frozen=True)
class Listing:
    """Calls of stages that are listed instead of made."""

    results: dict[Hashable, Any] = field(default_factory=dict)
    """What calls return, as tensors with neither numbers nor memory, by what distinguishes the calls."""
    codes: dict[Any, tuple[StageCode, float]] = field(default_factory=dict)
    """What is to be compiled, by key, with the seconds that it took to find the shapes of its results."""

    def longest_first(self) -> list[StageCode]:
        """What is to be compiled: first kernels of our own, then what has many operations, whose shapes took long."""
        # A long stage that is begun last would be waited for alone.
        ranked = sorted(self.codes.values(), key=lambda timed: (not is_hand_written(timed[0].stage), -timed[1]))
        return [code for code, _ in ranked]


class CompiledStages(Run):
    """Runs stages through Inductor.

    A stage runs in eager torch until its compiled form is there; a call waits for that within ``compiling_at_calls``.
    """

    num_uncompiled_calls = 0
    """Calls of stages in eager torch that a capture would refuse, as their compiled forms were not there."""
    compiles_at_calls = False
    """Whether the first call of a stage compiles it; tests and tools set it for every sampler."""

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(fuses=True)
        self._options = EXACT_OPTIONS if options is None else options  # others for tools alone
        self._wanted: dict[Any, WantedStage] = {}
        self._called: dict[Any, Callable[..., Any]] = {}
        self._eager: dict[Stage, str] = {}
        self._warned: set[str] = set()
        self._listing: Listing | None = None
        self._at_calls = ""  # or "compiles" or "loads": what the first call of a stage does
        QUEUE.users.add(self)

    def __call__(self, stage: Any, /, *tensors: Any, **static: Any) -> Any:
        """Run a stage compiled for its static arguments, its class of row counts, and the layout of its tensors."""
        # The class is that of the tensor with the most rows; tensors of a single row are compiled as such. The first
        # call of a class decides how Inductor tunes its kernels: make it with row_class rows.
        listing = self._listing
        if listing is not None:
            return self._list(listing, stage, tensors, static)
        if self._runs_as_is(stage):
            if is_hand_written(stage):
                return in_torch(StageCode.of(stage, tensors, static))(*tensors)
            return without_kernels(stage, *tensors, **static)
        shapes = _shapes_of(stage, tensors, static)
        found = self._called.get(shapes)
        if found is None:
            found = self._first_call(shapes, StageCode.of(stage, tensors, static))
        return found(*tensors)

    @property
    def lists(self) -> bool:
        """Whether stages are listed now, within ``precompiling``."""
        return self._listing is not None

    @property
    def compares(self) -> bool:
        """Whether each compiled stage is compared with eager torch before it is used."""
        return not is_known() or os.environ.get(COMPARISON_VARIABLE) == "1"

    @property
    def are_settled(self) -> bool:
        """Whether no stage that was called or asked for waits for its compiled form."""
        return not any(each.state == "queued" for each in [*self._wanted.values()])

    @property
    def lacks_kernels(self) -> bool:
        """Whether torch stands in for hand-written kernels that do not compile, so that nothing can be captured."""
        refused = (each.code.stage for each in [*self._wanted.values()] if each.state == "refused")
        return any(map(is_hand_written, (*self._eager, *refused)))

    def steady_rows(self, rows: Tensor) -> Tensor:
        """As ``Run``: stages are compiled for each row stride, of which padded rows have one."""
        # logits[:, -1] of a model has another row stride for each length of the prompts
        length, stride = rows.shape[1], rows.stride(0)
        if rows.shape[0] == 1 and stride != length:  # contiguous() would return it as it is
            return rows.as_strided((1, length), (length, 1))
        return rows.contiguous() if stride >= 2 * length else rows

    def overlap(self, device: torch.device, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
        """What two chains return, the first from a second stream; a CUDA graph that records both lets them overlap."""
        if device.type != "cuda" or self._listing is not None:
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

    def any_row(self, flags: Tensor) -> bool:
        """As ``Run``; in a warm-up every chain runs, so that later calls load none."""
        if self._listing is not None or self._at_calls == "loads" or (self._at_calls and self.compares):
            return True  # every chain is listed, loaded or compared
        return bool(flags.any())

    @contextmanager
    def precompiling(
        self, device: torch.device, progress: Progress | None = None, *, waits: bool = True
    ) -> Iterator[None]:
        """Within, stages give zeros, in their shapes; at the end all that were ever called are compiled in parallel."""
        # Without waits they are asked for alone, before all others; progress is then called by a thread.
        with suppress(Exception):  # without a cache directory say; the stages that then do not compile give the reason
            set_up_compilers(device)
        self._listing = listing = Listing()
        try:
            yield
        finally:
            self._listing = None
        self.compile_all(progress, listing.longest_first(), waits=waits)

    def compile_all(
        self, progress: Progress | None = None, listed: Sequence[StageCode] = (), *, waits: bool = True
    ) -> None:
        """Compile in parallel what is listed and what was ever called, also what failed before; or ask for it."""
        self._called.clear()  # what runs in eager torch
        if self.compares:  # on the tensors of their next call, which compiles them
            for wanted in self._wanted.values() if waits else ():
                wanted.state = "due" if wanted.compiled is None else wanted.state
            return
        codes = {code.key: code for code in (*listed, *(each.code for each in self._wanted.values()))}
        missing, done = [code for code in codes.values() if not self._is_ready(code)], 0

        def settled(wanted: WantedStage) -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, len(missing), f"compiled stage {wanted.name}")

        asked = self._ask(missing, None if waits else settled, first=True)
        if not waits:
            return
        for code, wanted in zip(reversed(missing), reversed(asked), strict=True):  # processes begin with the longest
            if not QUEUE.withdraw(wanted):
                QUEUE.wait_for(wanted)
            if wanted.compiled is None:
                self._compile(code)
            settled(wanted)

    @contextmanager
    def compiling_at_calls(self, *, only_loads: bool = False) -> Iterator[None]:
        """Within, the first call of a stage compiles it, or ``only_loads`` it, where NotOnDisk says that it cannot."""
        self._called.clear()  # of stages that ran in eager torch
        self._at_calls = "loads" if only_loads else "compiles"
        try:
            yield
        finally:
            self._at_calls = ""

    def forget(self) -> None:
        """Know no stage any more: in a forked child, where some may be compiled by a thread that is not there."""
        self._wanted.clear()
        self._called.clear()
        self._listing = None

    def status(self) -> LoweringStatus:
        """Which torch compiles the stages, and which of them run in eager torch instead."""
        wanted = [*self._wanted.values()]
        reasons = {each.name: each.reason for each in wanted if each.reason}
        reasons |= {stage.__name__: reason for stage, reason in self._eager.items()}
        queued = Counter(each.name for each in wanted if each.state == "queued")
        return LoweringStatus(str(torch.__version__), is_known(), reasons, queued, len(QUEUE.processes))

    def _is_ready(self, code: StageCode) -> bool:
        """Whether the compiled code of a stage is there and serves such tensors."""
        wanted = self._wanted.get(code.key)
        compiled = None if wanted is None else wanted.compiled
        return compiled is not None and compiled.serves(*code.made_tensors())

    def _warn(self, stage: Stage, reason: str) -> None:
        """Warn of a stage that stays in eager torch; of several that fail in one way, of the first."""
        kind = reason if "differs" in reason else reason.split(":")[0].split(",")[0]
        if kind in self._warned:
            return
        self._warned.add(kind)
        warnings.warn(
            f"stage {stage.__name__} runs in eager torch {torch.__version__}: compiled, {reason}. Tokens stay the "
            "same, steps take longer. To compile stages takes a C++ compiler (CXX), on a GPU a C compiler (CC), and a "
            "cache directory that can be written and executed from (TORCHINDUCTOR_CACHE_DIR); "
            "Sampler.statistics().lowering names all that are eager",
            StageWarning,
            stacklevel=2,
        )

    def _runs_as_is(self, stage: Stage) -> bool:
        """Whether a stage is never compiled: it calls numpy, or its compiled code or its kernels are not to be used."""
        return stage in self._eager or (tuning_of(stage).opaque and not is_hand_written(stage))

    def _list(self, listing: Listing, stage: Stage, tensors: tuple[Any, ...], static: dict[str, Any]) -> Any:
        """Zeros in the shapes of what a stage returns; what compiles it is listed."""
        shapes = _shapes_of(stage, tensors, static)
        if shapes not in listing.results:
            began = time.perf_counter()
            listing.results[shapes] = fake_results(stage, tensors, static)
            seconds = time.perf_counter() - began
            if not self._runs_as_is(stage):
                code = StageCode.of(stage, tensors, static).without_numbers()
                listing.codes.setdefault(code.key, (code, seconds))
        return zeros_like(listing.results[shapes])

    def _first_call(self, shapes: Hashable, code: StageCode) -> Callable[..., Any]:
        """What runs a stage for tensors of such shapes: compiled code, or eager torch until that is there."""
        if QUEUE.hangs:
            self._eager[code.stage] = HANGS
            return in_torch(code)
        wanted = self._wanted.get(code.key)
        compiled = None if wanted is None else wanted.compiled  # looked at once, as a thread may bring it now
        if wanted is not None and compiled is not None and compiled.serves(*code.tensors):
            if not wanted.has_run:
                code.check_not_capturing()  # Inductor may time kernels at their first run
                wanted.has_run = True
            found = compiled.function
        elif wanted is not None and wanted.state == "refused" and self._at_calls != "loads":
            found = in_torch(code)
        elif self.compiles_at_calls or self._at_calls or (wanted is not None and wanted.state == "due"):
            found = self._compile(code)
        else:
            code.check_not_capturing()
            # code for other numbers of rows stays; warmup() compiles such a stage again
            found = in_torch(code) if compiled is not None else self._eager_until_ready(shapes, code, wanted)
        if len(self._called) >= _MOST_CALLS:
            self._called.clear()
        self._called[shapes] = found
        return found

    def _eager_until_ready(self, shapes: Hashable, code: StageCode, wanted: WantedStage | None) -> Callable[..., Any]:
        """A stage in eager torch, whose compiled code takes over when a thread has it."""
        asked, eager = wanted or self._ask([code])[0], in_torch(code)
        code = code._replace(tensors=())  # which nothing here may keep alive

        def run(*tensors: Any) -> Any:
            wanted = self._wanted.get(code.key, asked)  # a warm-up may have asked for it anew
            if wanted.state == "queued":
                QUEUE.wake()
            elif wanted.state == "ready":
                self._called.pop(shapes, None)  # another thread may have been here
                return self(code.stage, *tensors, **code.static)
            elif wanted.state == "failed":
                wanted.state = "eager"  # warned of once
                self._warn(code.stage, wanted.reason)
            code.check_not_capturing()
            self.num_uncompiled_calls += 1
            return eager(*tensors)

        return run

    def _ask(
        self, codes: Sequence[StageCode], settled: Settled | None = None, *, first: bool = False
    ) -> list[WantedStage]:
        """Have the code of stages compiled in the background; what no thread has taken is asked for anew."""
        asked, new = list[WantedStage](), list[WantedStage]()
        for code in codes:
            wanted = self._wanted.get(code.key)
            if wanted is None or QUEUE.withdraw(wanted):
                wanted = WantedStage(code.portable(), settled)
                self._wanted[code.key] = wanted
                new.append(wanted)
            asked.append(wanted)
        if self.compares or self._options is not EXACT_OPTIONS:
            for wanted in new:
                wanted.reason = "warmup() alone compiles it, and compares it with eager torch"
        elif new:
            QUEUE.put(new, codes[0].device, first=first)
        return asked

    def _compile(self, code: StageCode) -> Callable[..., Any]:
        """The code of a stage from disk, or compiled now in this thread; in eager torch where it fails or differs."""
        code.check_not_capturing()
        known = self._wanted.get(code.key)
        is_unfit = known is not None and known.compiled is not None  # and so is what is on disk

        @functools.cache
        def made() -> Compiled:
            return code.compiled(self._options) if is_unfit else code.found_or_compiled(self._options)

        try:
            set_up_compilers(code.device)
            if self._at_calls == "loads" and not code.is_on_disk(self._options):
                raise NotOnDisk(code.stage.__name__)
            reason = ""
            if self.compares:
                reason = fault(code.stage, lambda *tensors: made().function(*tensors), code.tensors, code.static)
            if not reason:
                made()
        except NotOnDisk:
            raise
        except Exception as error:
            reason = fault_of(error)
            before = known or WantedStage(code.portable())  # its code for other numbers of rows stays
            self._wanted[code.key] = replace(before, settled=None, state="refused", reason=reason)
            self._warn(code.stage, reason)
            return in_torch(code)
        if reason:  # it differs, and so may its other forms
            self._eager[code.stage] = reason
            self._warn(code.stage, reason)
            return in_torch(code)
        self._wanted[code.key] = WantedStage(code.portable(), state="ready", compiled=made(), has_run=True)
        return made().function


def in_torch(code: StageCode) -> Callable[..., Any]:
    """A stage in eager torch; what stands in for kernels of our own is not captured, as the host waits for it."""
    code, eager = code._replace(tensors=()), functools.partial(without_kernels, code.stage, **code.static)
    if not is_hand_written(code.stage):
        return eager

    def run(*tensors: Any) -> Any:
        code.check_not_capturing()
        return eager(*tensors)

    return run


def zeros_like(results: Any) -> Any:
    """Zeros in the shapes of the tensors inside nested tuples."""
    return tree_map_only(
        Tensor,
        lambda like: torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_(),
        results,
    )


def _shapes_of(stage: Stage, tensors: tuple[Any, ...], static: dict[str, Any]) -> tuple[Any, ...]:
    """What distinguishes calls of stages: everything but the numbers in their tensors."""
    given = [*leaves(tensors)]
    device = next(leaf.device for leaf in given if leaf is not None)  # functions share stages between devices
    return stage, device, *static.items(), *map(shape, given)


@functools.cache
def _second_stream(device: torch.device, stream: int) -> torch.cuda.Stream:
    """Another for each stream, so that no call meets the memory of one that is not ordered with it."""
    second: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return second
