"""What do the edits of logits cost a step, in each mode?

A cell is the median time of a step inside a replayed graph of many, as in the benchmark of kernels, for a batch whose
requests all have the edits, with prompts of 2,048 tokens and 512 drawn ones. "over" is what the edits add to the same
step without them. The tokens of each timed step are compared with those of eager torch on the CPU, a row in eight.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from compiled_sampler import SampleOutputs, Sampler, SamplingParams
from tools.bench.batches import WrongAnswer
from tools.bench.cases import CASES, TARGET_VOCAB_SIZE
from tools.measuring.environment import environment, write_json
from tools.measuring.timing import num_inputs, time_calls
from tools.measuring.workloads import logits_like

PROMPT, OUTPUT = 2048, 512
ROWS = {"cuda": [128], "cpu": [8]}
_COMPARED = 8  # one row of so many
_BIASES = 300
EDITS: dict[str, dict[str, Any]] = {
    "none": {},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    "bias": {"logit_bias": {17 * token: 0.5 - token / _BIASES for token in range(_BIASES)}},
    "mask": {},
    "allowed": {"allowed_token_ids": tuple(range(0, TARGET_VOCAB_SIZE, 2))},
    "stops": {"stop_token_ids": (7, 11), "eos_token_id": 2},
    "bad words": {"bad_words_token_ids": ((5, 6), (9,), (1, 2, 3))},
    "top-n-sigma": {"top_n_sigma": 1.0},
    "p-less": {"p_less": True},
    "typical-p": {"typical_p": 0.9},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.1},
}
"""Parameters by name; the mask comes with the call. Greedy requests ignore filters of whole rows."""
EDITS["penalties, bias, mask"] = {**EDITS["penalties"], **EDITS["bias"]}
_MASKED = ("mask", "penalties, bias, mask")


@dataclasses.dataclass(frozen=True)
class EditCell:
    """One measurement."""

    case: str
    edits: str
    rows: int
    us: float
    over_us: float
    """What the edits add to the same step without them."""


def measure(rows: Sequence[int], cases: Sequence[str], device: str, dtype: torch.dtype) -> list[EditCell]:
    """The cells of all cases and edits, for batches of so many rows."""
    found = list[EditCell]()
    for count in rows:
        for case in cases:
            plain = 0.0
            for edits in EDITS:
                us = _step_us(case, edits, count, torch.device(device), dtype)
                plain = plain if plain else us
                found.append(EditCell(case, edits, count, us, us - plain))
                print(f"{case}, {edits}, {count} rows: {us:.1f} us, {us - plain:+.1f}", flush=True)
    return found


def _step_us(case: str, edits: str, rows: int, device: torch.device, dtype: torch.dtype) -> float:
    source = random.Random(1)
    tokens = [[source.randrange(3000) for _ in range(PROMPT + OUTPUT)] for _ in range(rows)]
    params = [dataclasses.replace(CASES[case].params, seed=n, **EDITS[edits]) for n in range(rows)]
    size = rows * TARGET_VOCAB_SIZE * dtype.itemsize
    logits = [
        logits_like("peaked", rows, TARGET_VOCAB_SIZE, device, dtype, seed=n) for n in range(num_inputs(size, device))
    ]
    positions = torch.full((rows,), PROMPT + OUTPUT, device=device)
    words = -(-TARGET_VOCAB_SIZE // 32)
    mask = None
    if edits in _MASKED:
        generator = torch.Generator().manual_seed(2)
        mask = torch.randint(-(2**31), 2**31, (rows, words), dtype=torch.int32, generator=generator).to(device)
    sampler, plan = _planned(params, tokens, device, dtype, "compiled")

    def step(given: Tensor) -> SampleOutputs:
        return sampler.sample(plan, given, positions, token_bitmask=mask)

    us, results = time_calls(step, logits, device)
    _compare(f"{case}, {edits}", params, tokens, logits[-1], mask, results[-1], dtype)
    return us


def _planned(
    params: Sequence[SamplingParams],
    tokens: Sequence[Sequence[int]],
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
) -> tuple[Sampler, Any]:
    sampler = Sampler(TARGET_VOCAB_SIZE, len(params), device, dtype, backend, history_len=PROMPT + OUTPUT + 8)
    slots = [sampler.add_request(p, t[:PROMPT], t[PROMPT:]) for p, t in zip(params, tokens, strict=True)]
    return sampler, sampler.plan(slots)


def _compare(
    label: str,
    params: Sequence[SamplingParams],
    tokens: Sequence[Sequence[int]],
    logits: Tensor,
    mask: Tensor | None,
    made: SampleOutputs,
    dtype: torch.dtype,
) -> None:
    """Raise unless some rows have the tokens of eager torch on the CPU."""
    rows = slice(None, None, _COMPARED)
    sampler, plan = _planned(params[rows], tokens[rows], torch.device("cpu"), dtype, "eager")
    positions = torch.full((len(plan.slots),), PROMPT + OUTPUT)
    given = None if mask is None else mask[rows].cpu()
    wanted = sampler.sample(plan, logits[rows].cpu(), positions, token_bitmask=given)
    if made.token_ids[rows].tolist() != wanted.token_ids.tolist():
        raise WrongAnswer(f"{label}: tokens {made.token_ids[rows].tolist()}, not {wanted.token_ids.tolist()}")


def run(options: argparse.Namespace) -> None:
    """Measure, print a table, and store the cells in a file."""
    dtype = getattr(torch, options.dtype[0])
    cells = measure(options.rows or ROWS[options.device], options.cases, options.device, dtype)
    table = Table(title="us of a step, and what the edits add")
    for name in ("case", "edits", "rows", "us", "over"):
        table.add_column(name)
    for cell in cells:
        table.add_row(cell.case, cell.edits, str(cell.rows), f"{cell.us:.1f}", f"{cell.over_us:+.1f}")
    Console(width=100).print(table)
    if options.json:
        facts = {**environment(options.device), "dtype": options.dtype[0]}
        write_json(options.json, {**facts, "table": [dataclasses.asdict(each) for each in cells]})
