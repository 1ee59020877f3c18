"""Inductor's Triton kernels with a tiling instead of several to time, and with rewritten source."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.triton import FixedTritonConfig, TritonKernel, TritonScheduling
from torch._inductor.virtualized import V

from compiled_sampler.lowering.tuning import Tile

_POLICY = re.compile(r", eviction_policy='\w+'")
_WAIT, _LAUNCH = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"
_VALUE = re.compile(r"(tmp\d+) = (.*)")
_READ = re.compile(r"\b(?:_?tmp\w*|(?:in|out|in_out)_ptr\d+)\b")
_LONGEST = 4096  # elements of one reduction that a thread block holds in registers


class FixedTiles(InductorChoices):
    """Inductor's choices, but for reductions: each is held in registers whole, in tiles of a given size.

    A tile for a stage without reductions gives the elements of a thread block. What has a tile is not timed.
    """

    def __init__(self, tile: Tile) -> None:
        self._tile = tile

    def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: Any) -> Any:
        """What a kernel is made with; here a tiling instead of several to time."""
        if not self._tile.least and not features.is_reduction():
            config = {"XBLOCK": self._tile.elements, "num_warps": self._tile.warps, "num_stages": 1}
            return {**kernel_kwargs, "fixed_config": FixedTritonConfig(config)}
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

    streams, prompts, looks_ahead = False, False, False

    def want_no_x_dim(self) -> bool:
        """Whether a tile of one reduction has one axis; with the code for it, torch 2.11 fails."""
        return False

    def codegen_kernel(self, name: str | None = None) -> str:
        source: str = super().codegen_kernel(name)
        if self.streams:
            source = streamed(source, self._pointers(_is_matrix))
        if self.looks_ahead:
            source = ahead(source, self._pointers(_is_vector))
        return prompt(source) if self.prompts else source

    def _pointers(self, is_wanted: Callable[[Any], bool]) -> set[str]:
        """The parameters for those inputs of the stage that are wanted."""
        given: dict[str, Any] = V.graph.graph_inputs
        inputs = self.args.input_buffers.items()
        return {pointer for buffer, pointer in inputs if buffer in given and is_wanted(given[buffer])}


def _is_matrix(read: Any) -> bool:
    """Whether an input has a float for each row and token."""
    return bool(read.get_dtype().is_floating_point) and len(read.get_size()) == 2


def _is_vector(read: Any) -> bool:
    """Whether an input has a number for each row, or for each slot."""
    return len(read.get_size()) == 1


@contextmanager
def rewritten(*, streams: bool, prompts: bool, looks_ahead: bool) -> Iterator[None]:
    """Within, Inductor's kernels are ``streamed`` by logits and the like, ``prompt``, ``ahead`` by row, or as usual."""
    usual, how = TritonScheduling.kernel_type, {"streams": streams, "prompts": prompts, "looks_ahead": looks_ahead}
    TritonScheduling.kernel_type = type("Rewritten", (_Rewritten,), how)
    try:
        yield
    finally:
        TritonScheduling.kernel_type = usual


def streamed(source: str, pointers: Collection[str]) -> str:
    """The source, its loads from the parameters named marked as the last of what they read."""
    # A pass over logits larger than the cache then leaves there what the small kernels around it read: 2 to 4 us of 48.
    # The newest Inductor keeps what it loads by parts, which is as wrong here.
    loads = [match for match in re.finditer(r"\btl\.load\((\w+)", source) if match[1] in pointers]
    for load in reversed(loads):
        end = _end_of_call(source, load.start(1))
        call = _POLICY.sub("", source[load.start() : end])
        source = f"{source[: load.start()]}{call}, eviction_policy='evict_first'{source[end:]}"
    return source


def ahead(source: str, pointers: Collection[str]) -> str:
    """The source of a kernel that reads from pointers, and what these lead to, before it waits for the one before."""
    # A slot and what its request needs are two reads one after the other: 0.15 to 0.3 us behind a reduction, none here.
    # Pointers name parameters that no kernel writes which may still run, such as the one before. Values are assigned
    # once, on a line each.
    lines, settled = source.splitlines(), set(pointers)
    waits = [number for number, line in enumerate(lines) if line.strip() == _WAIT]
    if not waits:
        return source
    indent = lines[waits[0]].removesuffix(_WAIT)
    moved = []
    for number, line in enumerate(lines[waits[0] :], waits[0]):
        if line.startswith(f"{indent}for "):
            break  # what follows a loop may depend on it by other names
        value = _VALUE.fullmatch(line.removeprefix(indent))
        if value and settled.issuperset(_READ.findall(value[2])):
            settled.add(value[1])
            moved.append(number)
    kept = [line for number, line in enumerate(lines) if number not in moved]
    kept[waits[0] : waits[0]] = [lines[number] for number in moved]
    return "\n".join(kept) + "\n"


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
