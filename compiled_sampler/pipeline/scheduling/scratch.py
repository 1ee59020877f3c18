"""The scratch of a row: bytes that stages hold besides logits and results, and so the rows that a chunk may have.

A step of more rows than a chunk takes them one chunk after the other (``chunks.py``), in the same memory. The numbers
are of the largest tensors that are alive at once, by mode; ``python -m tools.bench --memory`` measures them.
"""

from __future__ import annotations

from compiled_sampler.exact.triton.lists import ENTRY_BYTES, list_stride
from compiled_sampler.modes import Mode
from compiled_sampler.passes.narrowing import STORED_BLOCK

CHUNK_BYTES = 2**29
"""Scratch of a chunk of fused stages: 2,314 rows of 151,936 tokens in the mode ``full``: no measured cell has more."""
EAGER_CHUNK_BYTES = 2**27
"""Scratch of a chunk in eager torch, where smaller chunks are no slower."""

EDITED_BYTES = 2**28
"""An edited copy of a chunk's logits."""

ALIGNED_ROWS = 16
"""A chunk begins at a multiple, so at an address as aligned as the first row's, whatever the stride."""

_ALIGNED_REQUESTS = 2  # numbers of 8 bytes, which are cloned where they do not begin at a multiple of 16 bytes
_EAGER_TOKEN = 66  # most bytes a token that a stage holds in eager torch: measured, the last race of a verification
_EAGER_BLOCKS = 512, 1024  # tokens of the longest blocks that eager torch pads a row to: of shorter rows, of others
_CANDIDATE_BYTES = 64 * 64  # of a race between candidates in eager torch
_MOST_TOKENS = 2**31 - 1  # of a chunk, so that kernels index it with 32 bits
_LEAST_BLOCK, _BLOCK_BYTES = 256, 12  # of a pass that cuts rows into blocks: a key, a magnitude and a token id each
_STORED_BYTES = 8  # a key and a magnitude
_LEVEL_BYTES = 3 * 8 * 576  # packed keys of a level of narrowing on a GPU, twice, and where they are placed
_SELECTED_BYTES = 24  # a stored block on the CPU: its packed key, in torch and in numpy
_ROW_BYTES = 512  # parameters, thresholds, winners of parts


def row_bytes(mode: Mode, *, triton: bool, fused: bool, edited: bool = False) -> int:
    """Bytes of scratch a row of a mode, at most, beside its logits and results.

    Args:
        mode: the mode.
        triton: whether kernels are Triton's rather than C++.
        fused: whether stages are compiled, so that what is inside of one is never written to memory. On the CPU a
            search puts whole rows in order by numpy, so there it is none.
        edited: whether stages edit the logits, which makes a float32 copy of them.
    """
    size = mode.vocab_size
    least = STORED_BLOCK if edited and triton and not mode.draws else _LEAST_BLOCK  # a copy tells its maxima
    blocks = -(-size // STORED_BLOCK) * _STORED_BYTES if mode.capacity else -(-size // least) * _BLOCK_BYTES
    narrowing = 0
    if mode.capacity:
        narrowing = _LEVEL_BYTES if triton else -(-size // STORED_BLOCK) * _SELECTED_BYTES
    lists = ENTRY_BYTES * list_stride(size) if mode.searches and triton else 0
    tokens = 0 if fused and (triton or not mode.searches) else _EAGER_TOKEN * _padded(size) + _CANDIDATE_BYTES
    return blocks + narrowing + lists + tokens + (4 * size if edited else 0) + _ROW_BYTES


def _padded(size: int) -> int:
    """Tokens of a row after it is padded to blocks."""
    block = _EAGER_BLOCKS[size >= _EAGER_BLOCKS[1]]
    return -(-size // block) * block


def chunk_rows(mode: Mode, *, triton: bool, fused: bool, edited: bool = False) -> int:
    """Most rows of a chunk: as many as its scratch has room for, and one at least; arguments as ``row_bytes``."""
    budget = CHUNK_BYTES if fused else EAGER_CHUNK_BYTES
    row = row_bytes(mode, triton=triton, fused=fused, edited=edited)
    copies = _edited_rows(mode.vocab_size) if edited else _MOST_TOKENS
    return max(min(budget // row, _MOST_TOKENS // mode.vocab_size, copies), 1)


def chunk_ends(num_rows: int, most: int, unit: int = ALIGNED_ROWS) -> list[int]:
    """Where chunks of at most ``most`` rows end: of about as many rows each, so that one kernel serves them all.

    Args:
        num_rows: of all chunks.
        most: of a chunk.
        unit: a chunk begins at a multiple, if it has room for so many.
    """
    unit = unit if most >= unit else 1
    units = -(-num_rows // unit)
    count = -(-units // (most // unit))
    return [min(units * number // count * unit, num_rows) for number in range(1, count + 1)]


def request_ends(mode: Mode, requests: int, rows: int, times: int) -> list[int]:
    """Where chunks of the requests of a verification end, whose edits copy the rows of a chunk at once.

    A chunk has so many requests that an edited copy has room for all rows that they may have, one at least. There is
    one chunk where it has room for the rows of all, and in modes that edit row by row, or nothing.

    Args:
        mode: that verifies.
        requests: of the batch.
        rows: of the batch.
        times: most rows of a request.
    """
    most = _edited_rows(mode.vocab_size)
    if mode.draws_rows or mode.from_probabilities or rows <= most:
        return [requests]
    return chunk_ends(requests, max(most // times, 1), _ALIGNED_REQUESTS)


def _edited_rows(vocab_size: int) -> int:
    """Most rows of an edited copy, one at least."""
    return max(EDITED_BYTES // (4 * vocab_size), 1)


def step_bytes(mode: Mode, rows: int, *, triton: bool, fused: bool) -> int:
    """Bytes of scratch of a step of so many rows, at most: of one chunk; arguments as ``row_bytes``."""
    most = chunk_rows(mode, triton=triton, fused=fused)
    return min(rows, most) * row_bytes(mode, triton=triton, fused=fused)
