"""The only hand-written kernels: the search and the race of single rows on CUDA, twins of definitions in plain torch.

Its modules are imported when the first CUDA tensor asks for them: CPU builds of torch have no Triton. How long the
lists of a search are, the memory that the kernels need most of, is known here, without Triton.
"""

from __future__ import annotations

LONGEST = 24576
"""Entries of a list; a bracket holds about ``_DEVIATIONS / sqrt(_SAMPLE)`` of a row at most, see ``operators.py``."""

SPARE = 256
"""Entries after a full list: a program that finds it full writes there what it has, at most so much."""

ENTRY_BYTES = 8
"""An int64 each, see ``records.py``."""

_ALIGNED = 16  # entries; so that each list begins where wide loads can


def list_capacity(vocab_size: int, longest: int = LONGEST) -> int:
    """Entries that a row's list holds: no more than the row has tokens, rounded up."""
    return min(-(-vocab_size // _ALIGNED) * _ALIGNED, longest)


def list_stride(vocab_size: int, longest: int = LONGEST) -> int:
    """Entries from list to list: a list that holds every token of its row is never full and needs no spare."""
    capacity = list_capacity(vocab_size, longest)
    return capacity if capacity >= vocab_size else capacity + SPARE
