"""From stages to kernels: the one place that calls ``torch.compile``.

Each stage of a step is compiled apart, for a single row, for a few and for many rows, with options under which
Inductor's results equal eager torch bit for bit. Stages of one step share nothing but tensors, so a CUDA graph can
record them in their order, or two chains of them side by side.
"""

from __future__ import annotations

import functools
import random
import re
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compiled_sampler.batch import (
    ProbabilityOutputs,
    SampleInputs,
    SampleOutputs,
    SlotTable,
    VerifyInputs,
    VerifyOutputs,
)
from compiled_sampler.core.stage import call
from compiled_sampler.exact.row_race import race_and_weigh, race_beyond, race_rows, race_top_k
from compiled_sampler.exact.threshold import threshold_by_keys, wide_threshold
from compiled_sampler.lowering.disk_cache import Compiled, load, path_of, set_up_triton, store
from compiled_sampler.lowering.parallel_compile import Ahead, foreseen, side_by_side
from compiled_sampler.lowering.tuning import made_for, overlaps, shaped
from compiled_sampler.modes import Mode
from compiled_sampler.passes.selection import select
from compiled_sampler.pipeline.law import probability_step
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.pipeline.schedule import is_gpu
from compiled_sampler.pipeline.verify import verify_step
from compiled_sampler.speculation.row_layout import with_padding

Options = dict[str, str | int | bool | Callable[..., Any]]

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

_OPAQUE: frozenset[Any] = frozenset(
    {select, threshold_by_keys, wide_threshold, race_and_weigh, race_beyond, race_rows, race_top_k}
)  # not for Inductor

_FAR = 2**31  # elements from which Inductor must index with 64 bits
_MOST_CALLS = 4096  # shapes of calls that are remembered


class CompiledStages:
    """Runs stages through Inductor; a ``run`` for the pipeline.

    Args:
        options: Inductor options, ``EXACT_OPTIONS`` unless a tool compares others.
    """

    def __init__(self, options: Options | None = None) -> None:
        """Start without compiled stages."""
        self._options = EXACT_OPTIONS if options is None else options
        self._compiled: dict[Any, Compiled] = {}
        self._called: dict[Any, Compiled] = {}
        self._ahead: Ahead | None = None

    def __call__(self, stage: Any, /, *tensors: Any, **static: Any) -> Any:
        """Run a stage compiled for its static arguments, its class of row counts, and the layout of its tensors.

        The class is that of the tensor with the most rows; tensors of a single row are compiled as such. The first call
        of a class decides how Inductor tunes its kernels: make it with ``row_class`` rows.
        """
        if stage in _OPAQUE:
            return stage(*tensors, **static) if self._ahead is None else self._ahead.launched(stage, tensors, static)
        leaves = list(_leaves(tensors))
        shapes = (stage, *static.items(), *map(_shape, leaves))
        compiled = self._called.get(shapes)
        if compiled is None:
            compiled = self._find(stage, tensors, static, leaves)
            if len(self._called) >= _MOST_CALLS:
                self._called.clear()
            self._called[shapes] = compiled
        return compiled(*tensors) if self._ahead is None else foreseen(stage, tensors, static)

    def both(self, device: torch.device, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
        """``stage.both`` on two streams; a CUDA graph that records them lets them overlap."""
        if device.type != "cuda" or self._ahead is not None:
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

    def any_of(self, flags: Tensor) -> bool:
        """``stage.any_of``; ahead, where no row has a value yet, every chain is compiled."""
        return self._ahead is not None or bool(flags.any())

    @contextmanager
    def ahead(self, device: torch.device) -> Iterator[None]:
        """Within, stages are compiled side by side and give zeros, in their shapes; afterwards they are ready to run.

        Args:
            device: of the tensors.
        """
        try:
            with side_by_side(), Ahead(device) as self._ahead:
                yield
        except BaseException:
            self._compiled.clear()  # some may have no kernels
            self._called.clear()
            raise
        finally:
            self._ahead = None

    def _find(self, stage: Any, tensors: tuple[Any, ...], static: dict[str, Any], leaves: list[Tensor | None]) -> Any:
        """The stage compiled for such tensors: before, on disk, or now."""
        present = [leaf for leaf in leaves if leaf is not None]
        device, rows = present[0].device, max(leaf.shape[0] for leaf in present)
        far = any(leaf.shape[0] * leaf.stride(0) >= _FAR for leaf in present if leaf.dim() > 1)
        hint = rows if far else made_for(stage, rows, device)
        key = (stage, *static.items(), far or hint, *map(_layout, leaves))
        known = self._compiled.get(key)
        if known is not None and known.guard_check(*tensors):
            return known
        _check_not_capturing(stage, leaves)
        set_up_triton(device)
        early = overlaps(stage, hint, static.get("block", 0))
        options = {**self._options, "triton.enable_pdl": early, "guard_filter_fn": _is_about_sizes}
        fixed = [tuple(each.shape) for table in _tables(tensors) for each in table]
        path = path_of(stage, device, options, *key[1:], *fixed) if known is None else None
        compiled = None if path is None else load(path)
        if compiled is not None and not compiled.guard_check(*tensors):
            compiled = path = None  # made for other numbers of rows
        if compiled is None:
            with shaped(stage, hint, is_gpu(device), static.get("block", 0)):
                compiled = _compiled(_specialised(stage, static), tensors, hint, options)
            if path is not None:
                store(path, compiled)
        compiled.disable_guard_check()  # a matter of shapes alone, and looked at above
        self._compiled[key] = compiled
        return compiled


@functools.cache
def _second_stream(device: torch.device, stream: int) -> torch.cuda.Stream:
    """Another for each stream, so that no call meets the memory of one that is not ordered with it."""
    second: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return second


def _compiled(stage: Callable[..., Any], tensors: tuple[Any, ...], hint: int, options: Options) -> Compiled:
    """A stage compiled for any number of rows of the class of ``hint``; it is not run.

    Torch compiles nothing ahead of a run where Inductor's caches are forbidden; those that it would use are turned off.
    """
    forbidden = torch._inductor.config.force_disable_caches
    options = {**options, "fx_graph_cache": False} if forbidden else options
    arguments = tuple(_first_arguments(argument, hint) for argument in tensors)
    with (
        _unseeded(),
        torch._dynamo.config.patch(enable_aot_compile=True),
        torch._inductor.config.patch(force_disable_caches=False),
    ):
        function: Any = torch.compile(stage, fullgraph=True, dynamic=False, options=options)
        return function.aot_compile((arguments, {}))


@contextmanager
def _unseeded() -> Iterator[None]:
    """Within, ``random`` is seeded by chance; afterwards it is as it was.

    Torch names a graph that it cannot hash by ``random.random()``: after equal seeds it would take one for another.
    """
    state = random.getstate()
    random.seed()
    try:
        yield
    finally:
        random.setstate(state)


def sampling_step(mode: Mode, inputs: SampleInputs, stages: CompiledStages | None) -> SampleOutputs:
    """``pipeline.sample_step`` with compiled stages, or in eager torch where there are none."""
    return sample_step(mode, inputs, call if stages is None else stages)


def probabilities_step(mode: Mode, inputs: SampleInputs, stages: CompiledStages | None) -> ProbabilityOutputs:
    """``pipeline.probability_step``, as ``sampling_step``."""
    return probability_step(mode, inputs, call if stages is None else stages)


def verification_step(mode: Mode, inputs: VerifyInputs, stages: CompiledStages | None) -> VerifyOutputs:
    """``pipeline.verify_step``, as ``sampling_step``.

    A single request gets another of padding, and single rows too, so that all stages are compiled for several alone:
    a third of the kernels.
    """
    if stages is None:
        return verify_step(mode, inputs, call)
    logits, slots, positions, num_drafts, draft_token_ids, proposals, table = inputs
    single = slots.shape[0] == 1
    requests = slots, positions, num_drafts, draft_token_ids
    slots, positions, num_drafts, draft_token_ids = stages(with_padding, *requests) if single else requests
    proposals = None if proposals is None else _two_rows(proposals)
    several = VerifyInputs(_two_rows(logits), slots, positions, num_drafts, draft_token_ids, proposals, table)
    made = verify_step(mode, several, stages)
    return VerifyOutputs(*(each[:1] for each in made)) if single else made


def _two_rows(values: Tensor) -> Tensor:
    """At least two rows, the new ones 0."""
    return values if values.shape[0] > 1 else F.pad(values, (0, 0, 0, 2 - values.shape[0]))


def _shape(leaf: Tensor | None) -> Any:
    return leaf if leaf is None else (leaf.shape, leaf.dtype, leaf.stride())


def _layout(leaf: Tensor | None) -> Any:
    """What a compiled stage is made for: everything about a tensor but how many rows there are, if several."""
    return leaf if leaf is None else (leaf.shape[0] == 1, leaf.dtype, tuple(leaf.shape[1:]), leaf.stride())


def _leaves(value: Any) -> Iterator[Tensor | None]:
    """The tensors inside nested tuples, in order; None where one is left out. Slot tables are all alike."""
    if value is None or isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple) and not isinstance(value, SlotTable):
        for item in value:
            yield from _leaves(item)


def _tables(value: Any) -> Iterator[SlotTable]:
    """The slot tables inside nested tuples, which have a fixed number of slots."""
    if isinstance(value, SlotTable):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tables(item)


def _is_about_sizes(guards: Sequence[Any]) -> list[bool]:
    """Keep the guards on sizes; our own key holds the rest of a tensor.

    Others would recompile a warmed-up stage when the engine's grad mode, inference mode or default dtype differs.
    """
    return [guard.guard_type == "SHAPE_ENV" for guard in guards]


def _first_arguments(argument: Any, hint: int) -> Any:
    """Aliases of the tensors, marked as having any number of rows; a slot table has a fixed number of slots."""
    if isinstance(argument, Tensor):
        alias = argument.detach()
        if argument.shape[0] > 1:
            torch._dynamo.mark_dynamic(alias, 0, hint_override=hint)
        return alias
    if isinstance(argument, tuple) and not isinstance(argument, SlotTable):
        items = [_first_arguments(item, hint) for item in argument]
        return type(argument)(*items) if hasattr(argument, "_fields") else tuple(items)
    return argument


def _specialised(stage: Any, static: dict[str, Any]) -> Callable[..., Any]:
    """A copy of a stage with its static arguments as defaults and code of its own, so that Dynamo caches it apart."""
    label = "_".join((stage.__name__, *(f"{value}" for value in static.values())))
    code = stage.__code__.replace(co_name=re.sub(r"\W", "_", label))
    copy = types.FunctionType(code, stage.__globals__, code.co_name, stage.__defaults__, stage.__closure__)
    copy.__kwdefaults__ = {**(stage.__kwdefaults__ or {}), **static}
    return copy


def _check_not_capturing(stage: Any, leaves: Sequence[Tensor | None]) -> None:
    if any(leaf is not None and leaf.is_cuda for leaf in leaves) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"stage {stage.__name__} was not compiled for such a call before the capture; warmup() does so for what "
            "Sampler(verifications=, probabilities=) names, max_num_requests rows, and bind_logits(), of other strides"
        )
