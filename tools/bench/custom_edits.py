"""What do edits that users write cost a step, beside the same done in eager torch before the sampler?

Of the three edits of ``examples``, one a batch: as an edit of the sampler, and as its function called on the logits,
both inside a replayed graph of many steps. Tokens of both are those of eager torch on the CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_sampler import EditRows, LogitEdit, SampleOutputs, Sampler
from examples.green_list import GreenList
from examples.guidance import Guidance
from examples.no_digits import NoDigits
from tools.bench.batches import WrongAnswer
from tools.bench.cases import CASES
from tools.measuring import logits_like, num_inputs, time_calls

COMPARED = 8
"""One row of so many is compared with eager torch."""
_HISTORY, _POSITION = 64, 3
_PROMPT = (3, 1, 2)


def edits_of(vocab_size: int) -> dict[str, tuple[LogitEdit, dict[str, float | int]]]:
    """The edits by name, each with the parameters of its requests."""
    words = tuple(str(n) if n % 10 == 0 else "word" for n in range(vocab_size))
    return {
        "green list": (GreenList(), {"key": 17, "bias": 2.0}),
        "no digits": (NoDigits(words), {}),
        "guidance": (Guidance(), {"scale": 1.5}),
    }


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Requests that all have one edit."""

    edit: LogitEdit
    given: Mapping[str, float | int]
    case: str
    rows: int
    device: torch.device
    dtype: torch.dtype
    vocab_size: int

    def sampler(self, device: torch.device, rows: Sequence[int], backend: str, *, edited: bool) -> tuple[Sampler, Any]:
        """A sampler with some of the requests, and their plan."""
        made = Sampler(self.vocab_size, len(rows), device, self.dtype, backend, history_len=_HISTORY, edits=[self.edit])
        extra: Any = {type(self.edit).__name__: self.given} if edited else ()
        params = [dataclasses.replace(CASES[self.case].params, seed=row, extra_args=extra) for row in rows]
        return made, made.plan([made.add_request(each, _PROMPT) for each in params])

    def inputs(self, device: torch.device, rows: Sequence[int]) -> dict[str, Tensor]:
        """What the edit gets with each call."""
        other = logits_like("peaked", self.rows, self.vocab_size, device, torch.float32, seed=99)
        return {name: other[list(rows)] for name in self.edit.inputs}

    def before(self) -> Callable[[Tensor], Tensor]:
        """The edit in eager torch, on logits of all rows."""
        ids = torch.arange(self.vocab_size, dtype=torch.int32, device=self.device)[None]
        column = torch.ones(self.rows, 1, device=self.device)
        rows = EditRows(
            positions=column.long() * _POSITION,
            params={
                name: column.to(torch.float32 if type(v) is float else torch.int64) * v
                for name, v in self.given.items()
            },
            inputs=self.inputs(self.device, range(self.rows)),
            tables={name: each.to(self.device)[None] for name, each in self.edit.tables(self.vocab_size).items()},
            history=column.to(torch.int32) * _PROMPT[-1] if self.edit.history_tokens else None,
        )
        return lambda logits: self.edit.edit(logits.to(torch.float32), ids, rows)


def rotated_logits(rows: int, vocab_size: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Peaked logits ``[R, V]`` for as many calls as a replay goes through."""
    count = num_inputs(rows * vocab_size * dtype.itemsize, device)
    return [logits_like("peaked", rows, vocab_size, device, dtype, seed=n) for n in range(count)]


def custom_us(
    name: str, case: str, rows: int, device: torch.device, dtype: torch.dtype, vocab_size: int
) -> dict[str, float]:
    """Microseconds of a step: "plain", "edit" of the sampler, "before" it in eager torch.

    Raises:
        WrongAnswer: tokens differ from those of eager torch on the CPU.
    """
    edit, given = edits_of(vocab_size)[name]
    batch = _Batch(edit, given, case, rows, device, dtype, vocab_size)
    logits = rotated_logits(rows, vocab_size, device, dtype)
    positions = torch.full((rows,), _POSITION, device=device)
    sampler, plan = batch.sampler(device, range(rows), "compiled", edited=True)
    plain, plan_of = batch.sampler(device, range(rows), "compiled", edited=False)
    float_batch = dataclasses.replace(batch, dtype=torch.float32)
    after, plan_after = float_batch.sampler(device, range(rows), "compiled", edited=False)
    inputs, function = batch.inputs(device, range(rows)), batch.before()
    steps: dict[str, Callable[[Tensor], SampleOutputs]] = {
        "plain": lambda x: plain.sample(plan_of, x, positions),
        "edit": lambda x: sampler.sample(plan, x, positions, edit_inputs=inputs),
        "before": lambda x: after.sample(plan_after, function(x), positions),
    }
    found = {}
    for way, step in steps.items():
        found[way], results = time_calls(step, logits, device)
        if way != "plain":
            _compare(f"{case}, {name}, {way}", batch, logits[-1], results[-1])
    return found


def _compare(label: str, batch: _Batch, logits: Tensor, made: SampleOutputs) -> None:
    """Raise unless some rows have the tokens of eager torch on the CPU."""
    rows, here = range(0, batch.rows, COMPARED), torch.device("cpu")
    sampler, plan = batch.sampler(here, rows, "eager", edited=True)
    inputs = {name: each.cpu() for name, each in batch.inputs(batch.device, rows).items()}
    positions = torch.full((len(rows),), _POSITION)
    wanted = sampler.sample(plan, logits[list(rows)].cpu(), positions, edit_inputs=inputs)
    if made.token_ids[list(rows)].tolist() != wanted.tolist():
        raise WrongAnswer(f"{label}: tokens {made.token_ids[list(rows)].tolist()}, not {wanted.tolist()}")
