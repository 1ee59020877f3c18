"""The tuning of one stage: how Inductor shapes its kernels. No result depends on it.

Left alone, Inductor chooses between a few tilings by timing each. Kernels of two microseconds time alike, so what it
picks is chance, and up to six times slower than what ``tuning.py`` declares, measured on an H200.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch

from compiled_sampler.pipeline.scheduling.schedule import LARGE_ROWS, SMALL_ROWS, is_gpu, row_class

Stage = Callable[..., Any]
Value = TypeVar("Value")

NEVER, ALWAYS = 0, sys.maxsize
"""Values of ``StageTuning.overlap_rows``."""

_FUSED_OPERATIONS = 512  # more than any stage has


class Tile(NamedTuple):
    """What a thread block of a Triton kernel reduces."""

    elements: int
    """Elements that are reduced at once; of blocks in slices, the elements of one slice."""
    warps: int
    least: int = 2
    """Reductions that are done at once at least."""


def _nothing() -> Mapping[int, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class StageTuning:
    """How the kernels of a stage are made; the defaults leave everything to Inductor.

    Mappings ``..._by_block`` hold what differs for a stage in blocks, by tokens a block.
    """

    tile: Tile | None = None
    """For several rows; None lets Inductor time tilings of its own."""
    tile_by_block: Mapping[int, Tile] = field(default_factory=_nothing)
    tile_of_one_row: Tile | None = None
    """For a single row."""
    warps_of_few_rows: int | None = None
    """For 2 to ``SMALL_ROWS`` rows: the warps of a thread block that reduces one row, or one block of it, alone."""
    overlap_rows: int = NEVER
    """Rows up to which the stage takes part in programmatic dependent launch: 0.3 to 0.5 us less a dependent kernel.

    Inductor leaves out a kernel's wait where it reads nothing that the kernel before wrote; the kernel after would then
    not wait for both. So only stages take part all of whose kernels wait (a test reads their code), and of those only
    the ones that it does not make slower.
    """
    overlap_rows_by_block: Mapping[int, int] = field(default_factory=_nothing)
    streams: bool = False
    """Whether what it reads of logits or probabilities is marked as not to be kept in the cache."""
    launches_next_promptly: bool = False
    """Whether the next kernel may start before the loads of this one: 0.2 to 0.5 us less before a race; others may lose
    by it."""
    shared_by_row_classes: bool = False
    """Whether kernels for few rows are as good for many on a GPU: compiled once instead of twice."""
    same_by_row_classes: bool = False
    """Whether kernels for few rows and for many are the same code where tile and overlap are: compiled once too."""
    keeps_reductions: bool = False
    """Whether reductions of a few elements stay reductions: what follows one writes the columns of a ``stack`` too.

    Without any, Inductor writes the columns in a kernel of its own.
    """
    fuses_everything: bool = False
    """Whether more operations are put into one kernel than Inductor does if left alone."""
    one_axis: bool = False
    """Whether tiles of kernels without a reduction have one axis: several take more registers, and fewer threads."""
    writes: bool = False
    """Whether the stage writes into tensors that it gets, which may share memory; otherwise it is pure."""
    opaque: bool = False
    """Whether Inductor does not see the stage: it launches hand-written kernels or calls numpy."""
    num_kernels: int = 1
    """Kernels, one after the other, of an opaque stage on a GPU."""

    def rows_hint(self, rows: int, device: torch.device, block: int = 0) -> int:
        """The number of rows for which the kernels that serve ``rows`` rows are made; ``block`` as ``tile_for``."""
        shared = (self.shared_by_row_classes or self._is_same(block)) and is_gpu(device)
        return row_class(min(rows, SMALL_ROWS) if shared else rows, device)

    def _is_same(self, block: int) -> bool:
        """Whether few and many rows have the same code; arguments as ``tile_for``."""
        few, many = ((self.tile_for(rows, block), self.overlaps(rows, block)) for rows in (SMALL_ROWS, LARGE_ROWS))
        return self.same_by_row_classes and few == many

    def tile_for(self, rows: int, block: int = 0) -> Tile | None:
        """The tile of a stage's Triton kernels; None where Inductor times tilings of its own.

        Args:
            rows: that the kernels are made for, see ``rows_hint``.
            block: tokens a block; 0 for a stage without blocks.
        """
        if rows == 1:
            return self.tile_of_one_row
        if self.warps_of_few_rows is not None and rows <= SMALL_ROWS:
            return Tile(1, self.warps_of_few_rows, 1)
        return self.tile_by_block.get(block, self.tile)

    def overlaps(self, rows: int, block: int = 0) -> bool:
        """Whether kernels start while the one before ends, and let the next do; arguments as ``tile_for``."""
        return rows <= self.overlap_rows_by_block.get(block, self.overlap_rows)

    def options(self, rows: int, block: int = 0, *, on_gpu: bool) -> dict[str, Any]:
        """Inductor's own options for a stage; the other arguments as ``tile_for``.

        Args:
            rows: that the kernels are made for.
            block: tokens a block.
            on_gpu: whether they are Triton kernels.
        """
        options: dict[str, Any] = {"triton.enable_pdl": self.overlaps(rows, block)}
        if on_gpu and self.keeps_reductions:
            options["unroll_reductions_threshold"] = 1
        if on_gpu and self.one_axis:
            options["triton.max_tiles"] = 1
        if on_gpu and self.fuses_everything:
            options["max_fusion_size"] = _FUSED_OPERATIONS
        return options
