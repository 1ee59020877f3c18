"""The mode of a call: the cheapest that covers its numbers, whatever its tensors hold."""

from __future__ import annotations

import itertools
from functools import lru_cache

from compiled_sampler.modes import CAPACITIES, Mode, mode_table, uncovered
from compiled_sampler.params import SamplingParams
from compiled_sampler.scalars import check_choice

_MOST_CHOICES = 4096

Filters = tuple[float | None, int | None, float | None, float | None]
"""Temperature, top_k, top_p and min_p of all rows; None for one that differs by row and is on the device."""


@lru_cache(_MOST_CHOICES)
def mode_of(name: str | None, filters: Filters, vocab_size: int, top_p_base: str) -> Mode:
    """The mode of a call.

    Args:
        name: of a mode; None takes the cheapest that covers every row that there can be.
        filters: of the call.
        vocab_size: V.
        top_p_base: one of ``TOP_P_BASES``.

    Raises:
        ValueError: an unknown name, a number out of range, or numbers that the named mode does not cover.
    """
    table, possible = mode_table(vocab_size, top_p_base), _possible_rows(filters, vocab_size)
    if name is None:
        return next(mode for mode in table if not any(uncovered(mode, params) for params in possible))
    check_choice("mode", name, [mode.name for mode in table], "None chooses")
    named = next(mode for mode in table if mode.name == name)
    reason = None if None in filters else uncovered(named, possible[0])
    if reason is not None:
        raise ValueError(f"mode {name!r} must cover the parameters, but {reason}; None chooses one that does")
    return named


def _possible_rows(filters: Filters, vocab_size: int) -> list[SamplingParams]:
    """Rows with the numbers of a call, and on each side of the limits of ``uncovered`` with what is on the device."""
    temperature, top_k, top_p, min_p = filters
    limits = {0, 2, vocab_size - 1, vocab_size, *CAPACITIES, *(capacity + 1 for capacity in CAPACITIES)}
    choices = itertools.product(
        (1.0,) if temperature is None else (temperature,),
        sorted(limits) if top_k is None else (top_k,),
        (0.5, 1.0) if top_p is None else (top_p,),
        (0.5,) if min_p is None else (min_p,),
    )
    return [SamplingParams(heat, k, p, least, seed=0) for heat, k, p, least in choices]
