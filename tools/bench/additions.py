"""What do edits of logits and logprobs add to the time of a step, in each mode?

A cell is the median time of a step inside a replayed graph of many, as in the benchmark of kernels, for a batch whose
requests all have the addition, with prompts of 2,048 tokens and 512 drawn ones. "over" is what it adds to the same step
without. A step that writes into its logits gets copies, and so does the step without that it is compared with. Tokens
and logprobs of the timed steps are compared with those of eager torch on the CPU, a row in eight.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from compiled_sampler import Logprobs, SampleOutputs, Sampler, SamplingParams
from tools.bench.batches import WrongAnswer
from tools.bench.cases import CASES, TARGET_VOCAB_SIZE
from tools.bench.custom_edits import COMPARED, custom_us, edits_of, rotated_logits
from tools.measuring import environment, time_calls, write_json

PROMPT, OUTPUT = 2048, 512
ROWS = {"cuda": [128], "cpu": [8]}
_BIASES = 300
_NOTHING, _COPIED = "nothing", "nothing but copies"


@dataclasses.dataclass(frozen=True)
class Addition:
    """What a step does besides drawing."""

    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Parameters that all requests have."""
    is_masked: bool = False
    """Whether a mask comes with the call."""
    consumes: bool | str = False
    """``consume_logits`` of the call; True writes into logits, of which each step gets a copy that is not counted."""
    logprobs: Logprobs | None = None
    """What the call asks for."""


_PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
_BIAS = {"logit_bias": {17 * token: 0.5 - token / _BIASES for token in range(_BIASES)}}
EDITS = {
    "penalties": Addition(_PENALTIES),
    "bias": Addition(_BIAS),
    "mask": Addition(is_masked=True),
    "allowed": Addition({"allowed_token_ids": tuple(range(0, TARGET_VOCAB_SIZE, 2))}),
    "stops": Addition({"stop_token_ids": (7, 11), "eos_token_id": 2}),
    "bad words": Addition({"bad_words_token_ids": ((5, 6), (9,), (1, 2, 3))}),
    "dry": Addition({"dry_multiplier": 0.8, "dry_sequence_breakers": (5, 6, 7, 8)}),
    "top-n-sigma": Addition({"top_n_sigma": 1.0}),
    "min-k": Addition({"min_k": True}),
    "p-less": Addition({"p_less": True}),
    "typical-p": Addition({"typical_p": 0.9}),
    "xtc": Addition({"xtc_probability": 0.5, "xtc_threshold": 0.1}),
    "penalties, bias, mask": Addition({**_PENALTIES, **_BIAS}, is_masked=True),
    "penalties, consumed": Addition(_PENALTIES, consumes=True),
    "penalties, bias, consumed": Addition({**_PENALTIES, **_BIAS}, consumes=True),
    "penalties, bias, mask, consumed": Addition({**_PENALTIES, **_BIAS}, is_masked=True, consumes=True),
    "penalties, restored": Addition(_PENALTIES, consumes="restore"),
    "penalties, bias, restored": Addition({**_PENALTIES, **_BIAS}, consumes="restore"),
    "penalties, bias, mask, restored": Addition({**_PENALTIES, **_BIAS}, is_masked=True, consumes="restore"),
}
"""What ``--edits`` measures; greedy requests ignore filters of whole rows."""
LOGPROBS = {
    "filtered": Addition(logprobs=Logprobs(of="filtered")),
    "processed": Addition(logprobs=Logprobs(of="processed")),
    "raw": Addition(logprobs=Logprobs()),
    "raw, rank": Addition(logprobs=Logprobs(rank=True)),
    "filtered, top 5": Addition(logprobs=Logprobs(of="filtered", top=5)),
    "raw, top 5": Addition(logprobs=Logprobs(top=5)),
    "filtered, boundary": Addition(logprobs=Logprobs(of="filtered", num_kept=True, boundary=True)),
    "raw, entropy": Addition(logprobs=Logprobs(entropy=True)),
}
"""What ``--logprobs`` measures."""


@dataclasses.dataclass(frozen=True)
class AdditionCell:
    """One measurement."""

    case: str
    addition: str
    rows: int
    us: float
    over_us: float
    """What the addition takes beyond the same step without it."""


def measure(
    additions: dict[str, Addition], rows: Sequence[int], cases: Sequence[str], device: str, dtype: torch.dtype
) -> Iterator[AdditionCell]:
    """The cells of all cases and additions, for batches of so many rows, each when it was measured."""
    for count in rows:
        for case in cases:
            plain: dict[bool, float] = {}  # by whether a step gets copies of its logits besides
            for name, addition in {_NOTHING: Addition(), **additions}.items():
                copies = addition.consumes is True
                where = case, count, torch.device(device), dtype
                if copies not in plain:
                    plain[copies] = _step_us(_COPIED if copies else _NOTHING, Addition(consumes=copies), *where)
                over = _step_us(name, addition, *where) - plain[copies] if name != _NOTHING else 0.0
                print(f"{case}, {name}, {count} rows: {plain[False] + over:.1f} us, {over:+.1f}", flush=True)
                yield AdditionCell(case, name, count, plain[False] + over, over)


def measure_custom(
    rows: Sequence[int], cases: Sequence[str], device: str, dtype: torch.dtype
) -> Iterator[AdditionCell]:
    """The cells of edits that users write, as edits of the sampler and in eager torch before it."""
    for count, case, name in itertools.product(rows, cases, edits_of(1)):
        us = custom_us(name, case, count, torch.device(device), dtype, TARGET_VOCAB_SIZE)
        for way, label in (("edit", name), ("before", f"{name}, eager before")):
            print(f"{case}, {label}, {count} rows: {us[way]:.1f} us, {us[way] - us['plain']:+.1f}", flush=True)
            yield AdditionCell(case, label, count, us[way], us[way] - us["plain"])


def _step_us(name: str, addition: Addition, case: str, rows: int, device: torch.device, dtype: torch.dtype) -> float:
    source = random.Random(1)
    tokens = [[source.randrange(3000) for _ in range(PROMPT + OUTPUT)] for _ in range(rows)]
    params = [dataclasses.replace(CASES[case].params, seed=n, **addition.params) for n in range(rows)]
    logits = rotated_logits(rows, TARGET_VOCAB_SIZE, device, dtype)
    positions = torch.full((rows,), PROMPT + OUTPUT, device=device)
    mask = _mask(rows).to(device) if addition.is_masked else None
    sampler, plan = _planned(params, tokens, device, dtype, "compiled")
    asked = {"logprobs": addition.logprobs, "consume_logits": addition.consumes}

    def step(given: Tensor) -> SampleOutputs:
        return sampler.sample(plan, given, positions, token_bitmask=mask, **asked)

    if addition.consumes is True:
        us, results = time_calls(_renewing(step, logits), range(len(logits)), device)
    else:
        us, results = time_calls(step, logits, device)
    _compare(f"{case}, {name}", addition, params, tokens, logits[-1], mask, results[-1])
    return us


def _renewing(step: Callable[[Tensor], SampleOutputs], logits: Sequence[Tensor]) -> Callable[[int], SampleOutputs]:
    """The n-th step, on a copy of its logits, which it may write into.

    It copies the logits of the step behind it first, so that its own are no longer in the L2.
    """
    copies = [each.clone() for each in logits]

    def renewing(n: int) -> SampleOutputs:
        following = (n + 1) % len(copies)
        copies[following].copy_(logits[following])
        return step(copies[n])

    return renewing


def _mask(rows: int) -> Tensor:
    words, generator = -(-TARGET_VOCAB_SIZE // 32), torch.Generator().manual_seed(2)
    return torch.randint(-(2**31), 2**31, (rows, words), dtype=torch.int32, generator=generator)


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
    addition: Addition,
    params: Sequence[SamplingParams],
    tokens: Sequence[Sequence[int]],
    logits: Tensor,
    mask: Tensor | None,
    made: SampleOutputs,
) -> None:
    """Raise unless some rows have the tokens and the logprobs of eager torch on the CPU."""
    rows = slice(None, None, COMPARED)
    sampler, plan = _planned(params[rows], tokens[rows], torch.device("cpu"), logits.dtype, "eager")
    positions = torch.full((len(plan.slots),), PROMPT + OUTPUT)
    given = None if mask is None else mask[rows].cpu()
    wanted = sampler.sample(plan, logits[rows].cpu(), positions, token_bitmask=given, logprobs=addition.logprobs)
    pairs = [(made.token_ids, wanted.token_ids), *zip(made.logprobs or (), wanted.logprobs or (), strict=True)]
    for found, told in pairs:
        if told is not None and found[rows].tolist() != told.tolist():
            raise WrongAnswer(f"{label}: {found[rows].tolist()}, not {told.tolist()}")


def rendered(measured: dict[str, Any]) -> str:
    """A row an addition, what it takes beyond the step without; a column a case of the benchmark; then the machine."""
    over: dict[str, dict[str, float]] = {}
    plain: dict[str, float] = {}
    for cell in measured["table"]:
        if cell["addition"] == _NOTHING:
            plain[cell["case"]] = cell["us"]
        else:
            over.setdefault(cell["addition"], {})[cell["case"]] = cell["over_us"]
    cases = sorted(plain, key=[*CASES, *plain].index)
    lines = [
        f"| added | {' | '.join(f'{case} ({plain[case]:.1f})' for case in cases)} |",
        f"| --- |{' ---: |' * len(cases)}",
    ]
    for name, found in over.items():
        lines.append(f"| {name} | {' | '.join(f'{found[case]:.1f}' if case in found else '' for case in cases)} |")
    machine = f"{measured['device']}; torch {measured['torch']}, {measured['dtype']}"
    return "\n".join(lines) + f"\n\n{machine}."


def run(options: argparse.Namespace) -> None:
    """Measure, print a table, and store the cells in a file, after each of them."""
    additions, dtype = EDITS if options.edits else LOGPROBS, getattr(torch, options.dtype[0])
    batches = options.rows or ROWS[options.device], options.cases, options.device, dtype
    cells = list[AdditionCell]()
    for cell in itertools.chain(measure(additions, *batches), measure_custom(*batches) if options.edits else ()):
        cells.append(cell)
        if options.json:
            facts = {**environment(options.device), "dtype": options.dtype[0]}
            write_json(options.json, {**facts, "table": [dataclasses.asdict(each) for each in cells]})
    table = Table(title="us of a step, and what is added")
    for name in ("case", "addition", "rows", "us", "over"):
        table.add_column(name)
    for cell in cells:
        table.add_row(cell.case, cell.addition, str(cell.rows), f"{cell.us:.1f}", f"{cell.over_us:+.1f}")
    Console(width=100).print(table)
