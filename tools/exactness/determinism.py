"""Are the tokens of a million hard rows the same bits on every path?

    python -m tools.exactness.determinism [--rows 1000000] [--control] [--json FILE]

Every row is drawn by eager torch on the CPU and again on each other path, there in another order, among padding rows,
and in whatever variant the path has: eager CPU in the mode that covers everything, compiled CPU and, with CUDA, eager,
compiled, replayed and captured in an outer graph. Rows mix modes, parameters, ties, scores one ulp apart, denormals,
infinities and NaN. The exit status is 1 when a token or a status differs. With ``--control`` one bit of one seed is
changed on the reference side, and the exit status is 1 unless every path then differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler import SampleOutputs, Sampler
from compiled_sampler.batch import tensors_of
from tools.exactness.comparison import reported
from tools.exactness.hard_rows import Batch, mixed_batch, mixed_requests
from tools.exactness.processes import in_processes
from tools.exactness.sampling_paths import direct, paths_of

SHARES = {(127, torch.float32): 0.6, (257, torch.bfloat16): 0.385, (4099, torch.float16): 0.015}
"""Vocabulary and dtype, and its share of the rows."""
NUM_REQUESTS = 240
PARTS = 2
"""Processes that share the modes of a vocabulary and a device."""
PADDING = 17
"""Rows of padding that every batch gets."""

_MOST_ROWS, _MOST_LOGITS = 4096, 1 << 24


def arranged(batch: Batch, padding: int, seed: int) -> tuple[Batch, Tensor]:
    """The rows in another order with padding rows between them, and where each went.

    Args:
        batch: ``[R, V]``.
        padding: rows to add; their slots are -1, and their logits and positions belong to other rows.
        seed: of the order.
    """
    rows = len(batch.slots)
    order = torch.randperm(rows + padding, generator=torch.Generator().manual_seed(seed))
    slots = torch.cat([batch.slots, torch.full((padding,), -1)])
    source = order % rows
    return Batch(batch.logits[source], slots[order], batch.positions[source]), order.argsort()


def num_mismatches(wanted: SampleOutputs, found: SampleOutputs, places: Tensor) -> int:
    """Rows whose token or status differs, and padding rows that are not -1.

    Args:
        wanted: ``[R]``, in the first order.
        found: ``[R + padding]``, arranged.
        places: int64 ``[R + padding]``, where each row went.
    """
    wrong = torch.zeros(len(places), dtype=torch.bool)
    for want, have in zip(tensors_of(wanted), tensors_of(found), strict=True):
        padding = torch.full((len(places) - len(want),), -1, dtype=want.dtype)
        wrong |= torch.cat([want, padding]) != have[places]
    return int(wrong.sum())


class Count(NamedTuple):
    """What was compared on one path."""

    path: str
    rows: int
    mismatches: int
    seconds: float


def compare(
    rows: int, vocab_size: int, dtype: torch.dtype, device: str, control: bool, part: int = 0, parts: int = 1
) -> Iterator[Count]:
    """One count a batch and path of the device; batches take the modes in turn, every ``parts``-th is of this part."""
    requests = mixed_requests(vocab_size, NUM_REQUESTS, seed=vocab_size)
    changed = dataclasses.replace(requests[1], seed=(requests[1].seed or 0) ^ 1)
    reference = Sampler(vocab_size, NUM_REQUESTS, "cpu", dtype, "eager")
    for slot, request in enumerate(requests):
        reference.add_request(changed if control and slot == 1 else request)
    modes = [mode.name for mode in reference.modes]
    size = min(_MOST_ROWS, max(1, _MOST_LOGITS // vocab_size), -(-rows // len(modes)))
    paths = paths_of(device, vocab_size, dtype, requests, size + PADDING, modes[part::parts])
    for i, start in enumerate(range(0, rows, size)):
        mode = reference.modes[i % len(modes)]
        if mode.name not in modes[part::parts]:
            continue
        batch = mixed_batch(requests, mode, min(size, rows - start), dtype, seed=i)
        wanted = direct(reference)(batch, mode.name)
        other, places = arranged(batch, padding=PADDING, seed=i)
        for name, path in paths.items():
            began = time.perf_counter()
            wrong = num_mismatches(wanted, path(other, mode.name), places)
            yield Count(name, len(batch.slots), wrong, time.perf_counter() - began)


def counts_of(rows: int, control: bool) -> Iterator[Count]:
    """The counts of all paths, from processes that share the work: most of it is tracing, one stage after the other."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    parts = [
        functools.partial(compare, math.ceil(rows * share), *kind, device, control, part, PARTS)
        for kind, share in SHARES.items()
        for device in devices
        for part in range(PARTS)
    ]
    yield from in_processes(parts)


def main() -> int:
    """Compare, print, store; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--control", action="store_true", help="change one bit of one seed: every path must differ")
    parser.add_argument("--json", help="store the counts in this file, after each batch")
    arguments = parser.parse_args()
    if arguments.rows < 1:
        parser.error(f"--rows must be at least 1, got {arguments.rows}")
    return reported(counts_of(arguments.rows, arguments.control), arguments.control, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
