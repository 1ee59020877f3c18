"""A tiling for Inductor to take instead of timing several. Imported where one is asked for: it takes a second."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.triton import FixedTritonConfig
from torch._inductor.virtualized import V

_LONGEST = 4096  # elements of one reduction that a thread block holds in registers


class FixedTiles(InductorChoices):
    """Inductor's choices, but for reductions: each is held in registers whole, in tiles of a given size."""

    def __init__(self, elements: int, warps: int, least: int) -> None:
        """Tiles of about so many elements, warps to reduce them, and reductions in a tile at least."""
        self._elements, self._warps, self._least = elements, warps, least

    def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: Any) -> Any:
        """What a kernel is made with; here a tiling instead of several to time."""
        if not self.should_use_persistent_reduction(features, False):
            return kernel_kwargs
        width = 1 << (int(features.reduction_numel) - 1).bit_length()
        tile = {"XBLOCK": max(self._least, self._elements // width), "num_warps": self._warps, "num_stages": 1}
        return {**kernel_kwargs, "fixed_config": FixedTritonConfig(tile)}

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        """Whether a reduction is held in registers whole."""
        length = features.reduction_numel
        return bool(features.is_reduction() and length.is_number and length <= _LONGEST and not cooperative_reduction)

    @staticmethod
    def reduction_split_factor(*_: Any, **__: Any) -> int:
        """Into how many kernels a scan is cut, which Inductor also asks of short ones."""
        return 1


def fixed(elements: int, warps: int, least: int = 2) -> AbstractContextManager[Any]:
    """A context in which Inductor makes kernels with such tiles."""
    context: AbstractContextManager[Any] = V.set_choices_handler(FixedTiles(elements, warps, least))
    return context
