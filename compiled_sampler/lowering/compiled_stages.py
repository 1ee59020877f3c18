"""Stages compiled by Inductor, each found again by its static arguments and the layout of its tensors.

Each stage of a step is compiled apart, for a single row, for a few and for many rows, with options under which
Inductor's results equal eager torch bit for bit. Stages of one step share nothing but tensors, so a CUDA graph can
record them in their order, or two chains of them side by side.
"""

from __future__ import annotations

import functools
import re
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compiled_sampler.lowering.bit_equality import fault
from compiled_sampler.lowering.disk_cache import load, path_of, store
from compiled_sampler.lowering.inductor.caches import set_up_triton
from compiled_sampler.lowering.inductor.compilation import Compiled, Options, compiled
from compiled_sampler.lowering.inductor.patches import one_wait, tuned_kernels
from compiled_sampler.lowering.inductor.versions import is_known
from compiled_sampler.lowering.layouts import fixed, layout, leaves, shape
from compiled_sampler.lowering.parallel_compile import BackgroundLaunches, fake_results
from compiled_sampler.lowering.stage_tuning import Stage
from compiled_sampler.lowering.status import LoweringStatus, StageWarning
from compiled_sampler.lowering.tuning import tuning_of
from compiled_sampler.pipeline.schedule import is_gpu

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

_FAR = 2**31  # elements from which Inductor must index with 64 bits
_MOST_CALLS = 4096  # shapes of calls that are remembered


class CompiledStages:
    """Runs stages through Inductor; a ``run`` for the pipeline.

    Args:
        options: Inductor options, ``EXACT_OPTIONS`` unless a tool compares others.
    """

    fuses = True

    def __init__(self, options: Options | None = None) -> None:
        """Start without compiled stages."""
        self._options = EXACT_OPTIONS if options is None else options
        self._compiled: dict[Any, Compiled] = {}
        self._called: dict[Any, Callable[..., Any]] = {}
        self._eager: dict[Stage, str] = {}
        self.checks_known_answers = False
        self._background: BackgroundLaunches | None = None

    def __call__(self, stage: Any, /, *tensors: Any, **static: Any) -> Any:
        """Run a stage compiled for its static arguments, its class of row counts, and the layout of its tensors.

        The class is that of the tensor with the most rows; tensors of a single row are compiled as such. The first call
        of a class decides how Inductor tunes its kernels: make it with ``row_class`` rows.
        """
        background = self._background
        if stage in self._eager or tuning_of(stage).opaque:
            return stage(*tensors, **static) if background is None else background.launch(stage, tensors, static)
        given = list(leaves(tensors))
        shapes = (stage, *static.items(), *map(shape, given))
        found = self._called.get(shapes)
        if found is None:
            found = self._find(stage, tensors, static, given)
            if len(self._called) >= _MOST_CALLS:
                self._called.clear()
            self._called[shapes] = found
        return found(*tensors) if background is None else fake_results(stage, tensors, static)

    def overlap(self, device: torch.device, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
        """``stage.overlap`` on two streams; a CUDA graph that records them lets them overlap."""
        if device.type != "cuda" or self._background is not None:
            return first(), second()
        here = torch.cuda.current_stream(device)
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
        return self._background is not None or bool(flags.any())

    @contextmanager
    def precompiling(self, device: torch.device) -> Iterator[None]:
        """Within, stages are compiled in parallel and give zeros, in their shapes; afterwards they are ready to run.

        On an unknown torch they are compiled one after the other, and run.

        Args:
            device: of the tensors.
        """
        if not is_known():
            yield
            return
        try:
            with one_wait(), BackgroundLaunches(device) as self._background:
                yield
        except BaseException:
            self._compiled.clear()  # some may have no kernels
            self._called.clear()
            raise
        finally:
            self._background = None

    @contextmanager
    def checking_known_answers(self, wanted: bool) -> Iterator[None]:
        """Within, if wanted, steps first run on known inputs, and stages that differ from eager torch are found."""
        self.checks_known_answers = wanted
        try:
            yield
        finally:
            self.checks_known_answers = False

    def run_eagerly(self, stage: Stage, reason: str) -> None:
        """Run a stage in eager torch from now on, and warn of it.

        Args:
            stage: whose compiled code is not to be used.
            reason: how it fails or differs.
        """
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

    def _find(
        self, stage: Stage, tensors: tuple[Any, ...], static: dict[str, Any], given: list[Tensor | None]
    ) -> Callable[..., Any]:
        """The stage compiled for such tensors: before, on disk, or now."""
        present = [leaf for leaf in given if leaf is not None]
        device, rows = present[0].device, max(leaf.shape[0] for leaf in present)
        far = any(leaf.shape[0] * leaf.stride(0) >= _FAR for leaf in present if leaf.dim() > 1)
        hint = rows if far else tuning_of(stage).rows_hint(rows, device)
        key = (stage, *static.items(), far or hint, *map(layout, given))
        known = self._compiled.get(key)
        if known is not None and known.guard_check(*tensors):
            return known
        _check_not_capturing(stage, device)
        set_up_triton(device)
        call = _Call(stage, tensors, static, hint, is_gpu(device))
        if not is_known():
            return self._compared(call, key)
        path = path_of(stage, device, call.options(self._options), *key[1:], *fixed(tensors)) if known is None else None
        made = None if path is None else load(path)
        if made is not None and not made.guard_check(*tensors):
            made = path = None  # made for other numbers of rows
        if made is None:
            made = call.compiled(self._options)
            if path is not None:
                store(path, made)
        made.disable_guard_check()  # a matter of shapes alone, and looked at above
        self._compiled[key] = made
        return made

    def _compared(self, call: _Call, key: tuple[Any, ...]) -> Callable[..., Any]:
        """A stage that an unknown torch compiled, if its first results are those of eager torch; else the latter."""
        eager = functools.partial(call.stage, **call.static)
        made = functools.cache(lambda: call.compiled(self._options))
        reason = fault(lambda: made()(*call.tensors), eager(*call.tensors))
        if reason:
            self.run_eagerly(call.stage, reason)
            return eager
        self._compiled[key] = made()
        return made()


class _Call(NamedTuple):
    """A call of a stage for which code is needed."""

    stage: Stage
    tensors: tuple[Any, ...]
    static: dict[str, Any]
    hint: int
    """Rows for which Inductor tunes."""
    on_gpu: bool

    @property
    def _block(self) -> int:
        block: int = self.static.get("block", 0)
        return block

    def options(self, exact: Options) -> Options:
        """Inductor's options: what keeps its results exact, and the tuning of the stage."""
        return {**exact, **tuning_of(self.stage).options(self.hint, self._block, on_gpu=self.on_gpu)}

    def compiled(self, exact: Options) -> Compiled:
        """The stage compiled for such tensors."""
        with tuned_kernels(tuning_of(self.stage), self.hint, self._block, on_gpu=self.on_gpu):
            return compiled(_specialised(self.stage, self.static), self.tensors, self.hint, self.options(exact))


@functools.cache
def _second_stream(device: torch.device, stream: int) -> torch.cuda.Stream:
    """Another for each stream, so that no call meets the memory of one that is not ordered with it."""
    second: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return second


def _specialised(stage: Any, static: dict[str, Any]) -> Callable[..., Any]:
    """A copy of a stage with its static arguments as defaults and code of its own, so that Dynamo caches it apart."""
    label = "_".join((stage.__name__, *(f"{value}" for value in static.values())))
    code = stage.__code__.replace(co_name=re.sub(r"\W", "_", label))
    copy = types.FunctionType(code, stage.__globals__, code.co_name, stage.__defaults__, stage.__closure__)
    copy.__kwdefaults__ = {**(stage.__kwdefaults__ or {}), **static}
    return copy


def _check_not_capturing(stage: Stage, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"stage {stage.__name__} was not compiled for such a call before the capture; warmup() does so for what "
            "Sampler(verifications=, probabilities=) names, max_num_requests rows, and bind_logits(), of other strides"
        )
