"""The only hand-written kernels: the search and the race of single rows on CUDA, twins of definitions in plain torch.

Its modules are imported when the first CUDA tensor asks for them: CPU builds of torch have no Triton. What schedules
need is known here, without Triton: how long the lists of a search are, the memory that the kernels need most of, and
how a race cuts rows into parts.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

LOCK = threading.RLock()
"""Held while what compiles in torch is imported or patched: two threads that import it find it half imported."""


def triton_operators() -> ModuleType:
    """The module of Triton operators, imported when a CUDA tensor needs it: CPU builds of torch have no Triton."""
    name = "compiled_sampler.exact.triton.operators"
    with nullcontext() if name in sys.modules else LOCK:
        return importlib.import_module(name)


@functools.cache
def triton_operator(name: str) -> Callable[..., Any]:
    """A Triton operator."""
    # It runs on the device of its first tensor; Triton itself would launch on the current device.
    operator: Callable[..., Any] = getattr(triton_operators(), name)

    def on_its_device(first: Tensor, *arguments: Any) -> Any:
        with torch.cuda.device_of(first):
            return operator(first, *arguments)

    return on_its_device


LONGEST = 24576
"""Entries of a list; a bracket holds about ``_DEVIATIONS / sqrt(_SAMPLE)`` of a row at most, see ``operators.py``."""

SPARE = 256
"""Entries after a full list: a program that finds it full writes there what it has, at most so much."""

ENTRY_BYTES = 8
"""An int64 each, see ``rows.py``."""

TILE = 128
"""Tokens of a tile of a race."""

MOST_PARTS = 256
"""Parts of a row in a race, at most, one program each."""

GROUP, FEW_ROWS = 4, 32
"""Rows of a large batch that a program looks at, where few race: thousands that end at once take 5 us. Up to the second
number a program of a race looks at one row, and few rows are measured."""

BRACKETS = 2 * 132
"""Rows whose samples are searched at once with 8 warps each; of more rows, without masses, with 4."""

_RACING = 24 * 132  # programs that race at once
_PARTS = MOST_PARTS, 198, 132, 99, 66, 49, 33, 24, 16, 12  # of a row; few, as stages that read parts depend on them
_ALIGNED = 16  # entries; so that each list begins where wide loads can


def list_capacity(vocab_size: int, longest: int = LONGEST) -> int:
    """Entries that a row's list holds: no more than the row has tokens, rounded up."""
    return min(-(-vocab_size // _ALIGNED) * _ALIGNED, longest)


def list_stride(vocab_size: int, longest: int = LONGEST) -> int:
    """Entries from list to list: a list that holds every token of its row is never full and needs no spare."""
    capacity = list_capacity(vocab_size, longest)
    return capacity if capacity >= vocab_size else capacity + SPARE


def rows_of_program(num_rows: int, weighs: bool) -> int:
    """Rows that a program of a race looks at."""
    return 1 if weighs or num_rows <= FEW_ROWS else GROUP


def part_tiles(vocab_size: int, num_rows: int, tile: int = TILE, *, weighs: bool) -> int:
    """Tiles of a part of a row, so that all programs run at once, unless parts would be long to race again."""
    rows = -(-num_rows // rows_of_program(num_rows, weighs))
    parts = next((count for count in _PARTS if count * rows <= _RACING), _PARTS[-1])
    return -(-vocab_size // (tile * parts))


def num_parts(vocab_size: int, num_rows: int, *, weighs: bool) -> int:
    """Parts of a row."""
    return -(-vocab_size // (TILE * part_tiles(vocab_size, num_rows, weighs=weighs)))


def launch_class(num_rows: int) -> tuple[bool, ...]:
    """What launches share that one compiled form of each kernel serves."""
    return num_rows >= GROUP, num_rows > FEW_ROWS, num_rows > BRACKETS
