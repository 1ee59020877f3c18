"""Stages compiled by Inductor, each found again by its static arguments and the layout of its tensors.

Each stage of a step is compiled apart, for a single row, for a few and for many rows, with options under which
Inductor's results equal eager torch bit for bit. Stages of one step share nothing but tensors, so a CUDA graph can
record them in their order, or two chains of them side by side.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compiled_sampler.lowering.comparison import fault
from compiled_sampler.lowering.compiling.compile_processes import CompileProcesses, number_of_processes
from compiled_sampler.lowering.compiling.disk_cache import CompiledElsewhere, is_complete, record_of, write_record
from compiled_sampler.lowering.compiling.parallel_compile import BackgroundLaunches, Listing
from compiled_sampler.lowering.compiling.stage_code import StageCode
from compiled_sampler.lowering.inductor.compilation import Compiled, Options, set_up_triton
from compiled_sampler.lowering.inductor.patches import one_wait
from compiled_sampler.lowering.inductor.versions import is_known
from compiled_sampler.lowering.stages.stage_call import leaves, shape
from compiled_sampler.lowering.stages.tuning import Stage, tuning_of

EXACT_OPTIONS: Options = {
    "emulate_precision_casts": True,  # turns FMA contraction off in Triton; C++ has it off already
    "pattern_matcher": False,  # else y = x * t; y - y.amax() becomes (x - amax) * t
    "constant_and_index_propagation": False,  # else int64 arange arithmetic runs in int32
    "eager_numerics.disable_ftz": True,
    "eager_numerics.division_rounding": True,
    "realize_opcount_threshold": 30,  # more lets Inductor trace shared subexpressions again for every use
    "realize_reads_threshold": 32,
    "split_reductions": False,  # rows are cut into blocks by hand; a short reduction split again is a kernel more
    "score_fusion_memory_threshold": 1,  # else the outputs of one row, a few bytes each, become a kernel each
}
"""Inductor options that keep compiled equal to eager. Results are integers, so tuning choices are left free."""

Progress = Callable[[int, int, str], object]

VARIABLE = "COMPILED_SAMPLER_KNOWN_ANSWERS"
"""The environment variable that is 1 where stages are compared with eager torch, also on a torch that is known."""

_MOST_CALLS = 4096  # shapes of calls that are remembered
_STAGES_OF_A_RUN = 3  # a GPU's 22 runs of all modes have 68 stages


@dataclass(frozen=True)
class LoweringStatus:
    """How a sampler's stages run.

    Attributes:
        torch_version: of the torch that compiles them.
        torch_is_known: whether Inductor's private parts were checked on it; on an unknown torch they are not touched,
            which costs speed alone.
        eager_stages: by name of a stage that runs in eager torch instead of compiled, why.
    """

    torch_version: str
    torch_is_known: bool
    eager_stages: Mapping[str, str]


class StageWarning(UserWarning):
    """A compiled stage differs from eager torch, or does not compile, and runs in eager torch instead."""


class CompiledStages:
    """Runs stages through Inductor; a ``run`` for the pipeline."""

    fuses = True

    def __init__(self, options: Options | None = None) -> None:
        self._options = EXACT_OPTIONS if options is None else options  # others for tools alone
        self._compiled: dict[Any, Compiled] = {}
        self._called: dict[Any, Callable[..., Any]] = {}
        self._eager: dict[Stage, str] = {}
        self._listing: Listing | None = None
        self._is_set_up, self._takes_every_chain = False, False

    def __call__(self, stage: Any, /, *tensors: Any, **static: Any) -> Any:
        """Run a stage compiled for its static arguments, its class of row counts, and the layout of its tensors."""
        # The class is that of the tensor with the most rows; tensors of a single row are compiled as such. The first
        # call of a class decides how Inductor tunes its kernels: make it with row_class rows.
        if self._listing is not None:
            return self._list(self._listing, stage, tensors, static)
        if self._runs_as_is(stage):
            if not self._is_set_up:
                self._set_up(next(leaf for leaf in leaves(tensors) if leaf is not None).device)
            return stage(*tensors, **static)
        shapes = _shapes_of(stage, tensors, static)
        found = self._called.get(shapes)
        if found is None:
            found = self._find(StageCode.of(stage, tensors, static))
            if len(self._called) >= _MOST_CALLS:
                self._called.clear()
            self._called[shapes] = found
        return found(*tensors)

    @property
    def lists(self) -> bool:
        """Whether stages are listed now: ``stage.lists``."""
        return self._listing is not None

    @property
    def compares(self) -> bool:
        """Whether each compiled stage is compared with eager torch before it is used."""
        return not is_known() or os.environ.get(VARIABLE) == "1"

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
        """``stage.any_row``; while precompiling, where no row has a value yet, every chain is compiled."""
        return self._listing is not None or self._takes_every_chain or bool(flags.any())

    def compile(self, code: StageCode, *, waits: bool = True) -> bool:
        """Whether the code of a stage is here: from before, from disk, or compiled now; it does not run."""
        # It is not where another process compiles it, and this one does not wait.
        try:
            self._find(code, waits=waits)
        except CompiledElsewhere:
            return False
        return True

    def are_on_disk(self, device: torch.device, *steps: Any) -> bool:
        """Whether all stages that some steps need were kept on disk, by ``precompiling`` with the same arguments."""
        # Those that are never kept, such as those of the user's edits, are passed over.
        record = record_of(device, self._options, *steps)
        return record is not None and is_complete(record)

    @contextmanager
    def precompiling(
        self, device: torch.device, progress: Progress | None = None, *steps: Any, runs: int = 0
    ) -> Iterator[None]:
        """Within, stages give zeros, in their shapes; at the end those that were called are compiled in parallel."""
        # steps: what decides which stages are called, for are_on_disk; none keeps no record of them. runs: how many
        # steps will be listed; processes start at once to compile about as many stages as they have. A stage of which
        # progress tells is ready but for its kernels.
        self._set_up(device)
        try:
            with one_wait(), BackgroundLaunches(device) as background, CompileProcesses(device) as others:
                others.start(self._processes(_STAGES_OF_A_RUN * runs, device))
                self._listing = Listing(background)
                yield
                paths = self._compile_listed(self._listing, device, others, progress)
            record = record_of(device, self._options, *steps) if steps else None
            if record is not None:  # what is not kept is compiled here, whoever lists it
                write_record(record, [path for path in paths if path is not None])
        except BaseException:
            self._compiled.clear()  # some may have no kernels
            self._called.clear()
            raise
        finally:
            self._listing = None

    @contextmanager
    def taking_every_chain(self, wanted: bool) -> Iterator[None]:
        """Within, if wanted, chains of stages run that no row needs too, so that later calls load none."""
        self._takes_every_chain = wanted
        try:
            yield
        finally:
            self._takes_every_chain = False

    def run_eagerly(self, stage: Stage, reason: str) -> None:
        """Run a stage in eager torch from now on, and warn of it."""
        self._eager[stage] = reason
        warnings.warn(
            f"stage {stage.__name__} runs in eager torch {torch.__version__}: compiled, {reason}. Tokens stay the "
            "same, steps take longer",
            StageWarning,
            stacklevel=2,
        )

    def status(self) -> LoweringStatus:
        """Which torch compiles the stages, and which of them run in eager torch instead."""
        reasons = {stage.__name__: reason for stage, reason in self._eager.items()}
        return LoweringStatus(str(torch.__version__), is_known(), reasons)

    def _runs_as_is(self, stage: Stage) -> bool:
        """Whether a stage is not compiled: it has kernels of its own, or its compiled code is not to be used."""
        return stage in self._eager or tuning_of(stage).opaque

    def _list(self, listing: Listing, stage: Stage, tensors: tuple[Any, ...], static: dict[str, Any]) -> Any:
        """Zeros in the shapes of what a stage returns; the call is kept, or launched in the background."""
        shapes = _shapes_of(stage, tensors, static)
        if self._runs_as_is(stage):
            return listing.launch(shapes, stage, tensors, static)
        made = listing.zeros if shapes in self._called else listing.add
        return made(shapes, stage, tensors, static)

    def _compile_listed(
        self, listing: Listing, device: torch.device, others: CompileProcesses, progress: Progress | None
    ) -> Sequence[Path | None]:
        """Compile what was listed, in other processes what is not on disk; the place of each, None if it has none."""
        longest = listing.longest_first()
        paths = [code.path(self._options) for code, _ in longest]
        missing = [
            (call, path)
            for (code, call), path in zip(longest, paths, strict=True)
            if path is not None and code.key not in self._compiled and not path.exists()
        ]
        if missing:
            others.start(self._processes(len(missing), device))
            others.compile(missing)
        codes = [code for code, _ in longest]
        for done, code in enumerate(self._compiled_in_turn(codes, paths, others), start=1):
            if progress is not None:
                progress(done, len(codes), f"compiled stage {code.stage.__name__}")
        for code in listing.codes():  # of shapes that what was made may not serve
            self.compile(code)
        return paths

    def _compiled_in_turn(
        self, codes: Sequence[StageCode], paths: Sequence[Path | None], others: CompileProcesses
    ) -> Iterator[StageCode]:
        """Each stage once its code is here; last those that processes compile which are not ours."""
        left = []
        for code, path in zip(codes, paths, strict=True):
            if path is not None:
                others.wait_for(path)
            if self.compile(code, waits=False):
                yield code
            else:
                left.append(code)
        for code in left:
            self.compile(code)
            yield code

    def _processes(self, calls: int, device: torch.device) -> int:
        """How many others to compile with; they know no options but ``EXACT_OPTIONS``."""
        return number_of_processes(calls, device) if calls and self._options is EXACT_OPTIONS else 0

    def _set_up(self, device: torch.device) -> None:
        set_up_triton(device)
        self._is_set_up = True

    def _find(self, code: StageCode, *, waits: bool = True) -> Callable[..., Any]:
        """The compiled code of a stage: from before, from disk, or made now, by this process or another one."""
        known = self._compiled.get(code.key)
        if known is not None and known.guard_check(*code.tensors):
            return known
        code.check_not_capturing()
        self._set_up(code.device)

        @functools.cache
        def made() -> Compiled:
            if known is not None:  # what is on disk is made for other numbers of rows, too
                return code.compiled(self._options)
            return code.found_or_compiled(self._options, waits=waits)

        if self.compares:
            reason = fault(code.stage, lambda *tensors: made()(*tensors), code.tensors, code.static)
            if reason:
                self.run_eagerly(code.stage, reason)
                return functools.partial(code.stage, **code.static)
        made().disable_guard_check()  # a matter of shapes alone, and looked at above
        self._compiled[code.key] = made()
        return made()


def _shapes_of(stage: Stage, tensors: tuple[Any, ...], static: dict[str, Any]) -> tuple[Any, ...]:
    """What distinguishes calls of stages: everything but the numbers in their tensors."""
    return stage, *static.items(), *map(shape, leaves(tensors))


@functools.cache
def _second_stream(device: torch.device, stream: int) -> torch.cuda.Stream:
    """Another for each stream, so that no call meets the memory of one that is not ordered with it."""
    second: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return second
