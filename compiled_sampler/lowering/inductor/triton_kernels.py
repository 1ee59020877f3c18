"""Inductor's Triton kernels with a tiling instead of several to time, and with rewritten source."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.triton import FixedTritonConfig, TritonKernel, TritonScheduling
from torch._inductor.virtualized import V

from compiled_sampler.lowering.stages.tuning import Tile

_POLICY = re.compile(r", eviction_policy='\w+'")
_WAIT, _LAUNCH = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"
_LONGEST = 4096  # elements of one reduction that a thread block holds in registers


class FixedTiles(InductorChoices):
    """Inductor's choices, but for reductions: each is held in registers whole, in tiles of a given size."""

    def __init__(self, tile: Tile) -> None:
        """One tiling for all reductions of a stage."""
        self._tile = tile

    def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: Any) -> Any:
        """What a kernel is made with; here a tiling instead of several to time."""
        if not self.should_use_persistent_reduction(features, False):
            return kernel_kwargs
        width = 1 << (int(features.reduction_numel) - 1).bit_length()
        reductions = max(self._tile.least, self._tile.elements // width)
        config = {"XBLOCK": reductions, "num_warps": self._tile.warps, "num_stages": 1}
        return {**kernel_kwargs, "fixed_config": FixedTritonConfig(config)}

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        """Whether a reduction is held in registers whole."""
        length = features.reduction_numel
        return bool(features.is_reduction() and length.is_number and length <= _LONGEST and not cooperative_reduction)

    @staticmethod
    def reduction_split_factor(*_: Any, **__: Any) -> int:
        """Into how many kernels a scan is cut, which Inductor also asks of short ones."""
        return 1


def fixed(tile: Tile) -> AbstractContextManager[Any]:
    """A context in which Inductor makes kernels with such tiles; it holds for one thread."""
    context: AbstractContextManager[Any] = V.set_choices_handler(FixedTiles(tile))
    return context


class _Rewritten(TritonKernel):
    """Inductor's kernel, its source rewritten; it may have tiles of one reduction."""

    streams, prompts = False, False

    def want_no_x_dim(self) -> bool:
        """Whether a tile of one reduction has one axis; with the code for it, torch 2.11 fails."""
        return False

    def codegen_kernel(self, name: str | None = None) -> str:
        source: str = super().codegen_kernel(name)
        if self.streams:
            inputs = self.args.input_buffers.items()
            source = streamed(source, {pointer for buffer, pointer in inputs if _is_matrix(buffer)})
        return prompt(source) if self.prompts else source


def _is_matrix(name: str) -> bool:
    """Whether a buffer is an input of the stage with a float for each row and token."""
    found: Any = V.graph.graph_inputs.get(name)
    return found is not None and found.get_dtype().is_floating_point and len(found.get_size()) == 2


@contextmanager
def rewritten(*, streams: bool, prompts: bool) -> Iterator[None]:
    """Within, Inductor's kernels are ``streamed``, with respect to logits and the like, or ``prompt``, or as usual."""
    usual = TritonScheduling.kernel_type
    TritonScheduling.kernel_type = type("Rewritten", (_Rewritten,), {"streams": streams, "prompts": prompts})
    try:
        yield
    finally:
        TritonScheduling.kernel_type = usual


def streamed(source: str, pointers: Collection[str]) -> str:
    """The source, its loads from some pointers marked as the last of what they read.

    A pass over logits larger than the cache then leaves there what the small kernels around it read: 2 to 4 us of 48.

    Args:
        source: of a kernel; the newest Inductor keeps what it loads by parts, which is as wrong here.
        pointers: names of its parameters.
    """
    loads = [match for match in re.finditer(r"\btl\.load\((\w+)", source) if match[1] in pointers]
    for load in reversed(loads):
        end = _end_of_call(source, load.start(1))
        call = _POLICY.sub("", source[load.start() : end])
        source = f"{source[: load.start()]}{call}, eviction_policy='evict_first'{source[end:]}"
    return source


def prompt(source: str) -> str:
    """The source of a kernel that lets the next start as soon as it has waited, instead of after its last load."""
    lines = [line for line in source.splitlines() if line.strip() != _LAUNCH]
    waits = [number for number, line in enumerate(lines) if line.strip() == _WAIT]
    if not waits or _LAUNCH not in source:
        return source
    lines.insert(waits[0] + 1, lines[waits[0]].replace(_WAIT, _LAUNCH))
    return "\n".join(lines) + "\n"


def _end_of_call(source: str, first: int) -> int:
    """Where the parenthesis stands that ends a call, from where its first argument begins."""
    depth, end = 1, first
    while depth:
        depth += {"(": 1, ")": -1}.get(source[end], 0)
        end += 1
    return end - 1
