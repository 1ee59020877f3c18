"""Modes: what a compiled variant can do, which requests it covers, and which one a batch needs.

A mode is static: it is part of every key, log line and test id. The table runs from the cheapest mode to ``full``,
which covers everything; a batch takes the first mode that covers each of its requests. Whatever covers a request gives
it the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compiled_sampler.params import SamplingParams

TOP_P_BASES = ("top_k", "all")
CAPACITIES = (64,)
"""Candidate counts of the ``top_k_top_p`` modes."""

SMALL_ROWS, LARGE_ROWS = 8, 128
"""Batches for which kernels are shaped and tuned, besides the single row: one for 2 to 32 rows, one for more."""


def row_class(rows: int, device: torch.device) -> int:
    """The batch whose kernels serve ``rows`` rows: 1, ``SMALL_ROWS`` or ``LARGE_ROWS``; on the CPU 1 or the last."""
    if rows == 1:
        return 1
    return SMALL_ROWS if rows <= 4 * SMALL_ROWS and device.type == "cuda" else LARGE_ROWS


@dataclass(frozen=True)
class Mode:
    """The static part of a sampling step."""

    name: str
    vocab_size: int
    draws: bool = True
    """False: every request is greedy and no noise is computed."""
    filters_min_p: bool = False
    """min_p is applied."""
    capacity: int = 0
    """Candidates that top-k and top-p look at; 0 applies neither."""
    wide: bool = False
    """Rows whose filters keep more tokens than ``capacity`` are exact too."""
    base_is_row: bool = False
    """top-p is a share of the whole row's mass instead of the mass after top-k."""


def mode_table(vocab_size: int, top_p_base: str) -> tuple[Mode, ...]:
    """All modes of a sampler, cheapest first."""
    base_is_row = top_p_base == "all"
    narrow = tuple(Mode(f"top_k_top_p[{c}]", vocab_size, True, True, c, False, base_is_row) for c in CAPACITIES)
    return (
        Mode("greedy", vocab_size, draws=False),
        Mode("no_filter", vocab_size),
        Mode("min_p", vocab_size, filters_min_p=True),
        *narrow,
        Mode("full", vocab_size, True, True, CAPACITIES[-1], True, base_is_row),
    )


def uncovered(mode: Mode, params: SamplingParams) -> str | None:
    """Why a mode cannot serve a request, or None where it can."""
    if params.is_greedy:
        return None
    if not mode.draws:
        return f"temperature {params.temperature} draws"
    if params.min_p > 0.0 and not mode.filters_min_p:
        return f"min_p {params.min_p} is applied"
    covers_row = mode.wide or mode.capacity >= mode.vocab_size
    keeps_all_k = params.top_k == 0 or params.top_k >= mode.vocab_size
    if keeps_all_k and params.top_p >= 1.0:
        return None if covers_row or not mode.capacity else "top_k is off, so candidates alone cannot hold the row"
    if not mode.capacity:
        return f"top_k {params.top_k}, top_p {params.top_p} are applied"
    if covers_row or params.top_k in range(1, mode.capacity + 1):
        return None
    return f"top_k {params.top_k or 'off'} exceeds the capacity of {mode.capacity}"


def includes(mode: Mode, other: Mode) -> bool:
    """Whether a mode covers every request that another covers."""
    if not other.draws or mode.wide:
        return True
    if other.wide or not mode.draws:
        return False
    if bool(other.capacity) != bool(mode.capacity):
        return False
    return mode.capacity >= other.capacity and mode.filters_min_p >= other.filters_min_p
