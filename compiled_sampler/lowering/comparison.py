"""Compiled stages compared with eager torch, bit for bit, on a torch on which the library was not tested.

A stage is compared once, when its compiled form is about to be used, on the tensors of that call. A warm-up calls steps
with rows of ``hard_rows``, and with padding, which no table of an edit acts on; so calls of padding are compared a
second time, on copies in which rows belong to requests and tables hold numbers.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from compiled_sampler.batch import SlotTable
from compiled_sampler.edits.history import History, HistoryRows
from compiled_sampler.edits.tables import TABLES as EDIT_TABLES
from compiled_sampler.logit_edit import CustomEdits
from compiled_sampler.lowering.layouts import TABLES, TensorSpec, copies
from compiled_sampler.lowering.stage_code import fault_of
from compiled_sampler.lowering.tuning import Stage, tuning_of
from compiled_sampler.pipeline.chunks import eagerly

_NAN_BITS = 0x7F80_0001  # the smallest NaN, as an integer

KINDS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: 4.0 * x,
    lambda x: (2.0 * x).round(),
    lambda x: 0.01 * x.bfloat16().float(),
    lambda x: torch.zeros_like(x).copysign(x),
    lambda x: (x.abs() * 1e5).to(torch.int32).view(torch.float32).copysign(x),  # denormals
    lambda x: 1e38 * x,
    lambda x: torch.where(x > 1.0, x, -math.inf),
    lambda x: torch.full_like(x, -math.inf),
    lambda x: torch.where(x.abs() > 2.0, torch.full_like(x, math.nan).copysign(x), 4.0 * x),
    lambda x: torch.where(x.abs() > 2.0, x * math.inf, x),
    lambda x: 3.0 * x * x * x,
)
"""Rows on which compiled code differs if it can, made of a standard normal sample ``[V]``: ties, NaN, infinities."""


def hard_rows(like: Tensor, *, are_probabilities: bool) -> Tensor:
    """Logits, or probabilities of such logits, that lie as a tensor ``[R, V]`` does; each row is one of ``KINDS``."""
    noise = torch.randn(like.shape, generator=torch.Generator().manual_seed(len(like)))
    rows = torch.stack([KINDS[number % len(KINDS)](row) for number, row in enumerate(noise)])
    return TensorSpec.of(like).empty().copy_(torch.softmax(rows, -1) if are_probabilities else rows)


def fault(stage: Stage, compiled: Callable[..., Any], tensors: tuple[Any, ...], static: dict[str, Any]) -> str:
    """How compiled code fails, or how its results differ from those of eager torch; empty where they are equal."""
    # compiled may compile at its first call; nothing here writes the tensors.
    users = [edit for value in static.values() if isinstance(value, CustomEdits) for edit in value.edits]
    if not all(edit.bit_exact for edit in users):
        return ""  # nothing can be said of edits that do not promise equal bits
    eager, writes = partial(eagerly, stage, **static), tuning_of(stage).writes
    calls = [(tensors, outcome(eager, tensors, writes=writes))]
    served = of_requests(stage, tensors, static.get("vocab_size", 2))
    if served is not None:
        with contextlib.suppress(Exception):  # a user's edit may refuse such numbers
            calls.append((served, outcome(eager, served, writes=writes)))
    try:
        reasons = (difference(outcome(compiled, given, writes=writes), wanted) for given, wanted in calls)
        return next(filter(None, reasons), "")
    except Exception as error:  # whatever a compiler that was not tested, or its code, may raise
        return fault_of(error)


def of_requests(stage: Stage, tensors: tuple[Any, ...], vocab_size: int) -> tuple[Any, ...] | None:
    """Copies of the arguments of a padding call whose rows belong to slots; None where no edit's table is read."""
    # Integers in tables of edits are 1, which counts one entry, names a token or a position, and is in range for each.
    named = _named(stage, tensors)
    is_edit = bool(_tables_of_edits(tensors)) or "token_bitmask" in named
    if not is_edit or "slots" not in named or bool((named["slots"] >= 0).any()):
        return None
    made, token_id = copies(tensors), min(1, vocab_size - 1)
    named, tables = _named(stage, made), _tables_of_edits(made)
    sizes = [len(column) for table in tables if not isinstance(table, HistoryRows) for column in table]
    entries = torch.arange(len(named["slots"]), device=named["slots"].device)
    is_first = entries < min(sizes, default=len(entries))  # of two rows that write one slot either may be the last
    numbers: dict[str, Tensor | int] = {
        "slots": torch.where(is_first, entries, -1),
        "positions": next((table.entries.shape[2] - 1 for table in tables if isinstance(table, History)), 1),
        "token_ids": token_id,
        "draft_token_ids": token_id,
        "num_drafts": int("draft_token_ids" in named),
        "emitted": token_id,
        "token_bitmask": 1,
    }
    for name in named.keys() & numbers.keys():
        named[name][:] = numbers[name]
    for leaf in tree_leaves(made, is_leaf=lambda value: isinstance(value, SlotTable)):
        if isinstance(leaf, SlotTable):
            leaf.needs.zero_()  # else the step serves none of these slots, and writes nothing
    generator = torch.Generator().manual_seed(0)
    for column in (column for table in tables for column in table):
        if column.is_floating_point():
            column.copy_(0.5 + torch.rand(column.shape, generator=generator))
        else:
            column.fill_(token_id)
    return made


def _named(stage: Stage, tensors: tuple[Any, ...]) -> dict[str, Tensor]:
    """The arguments by the names of their parameters, and what named tuples hold by the names of their fields."""
    named, found = [*inspect.signature(stage).bind_partial(*tensors).arguments.items()], dict[str, Tensor]()
    for name, value in named:
        if isinstance(value, Tensor):
            found[name] = value
        elif hasattr(value, "_asdict") and not isinstance(value, TABLES):
            named += value._asdict().items()
    return found


def _tables_of_edits(tensors: tuple[Any, ...]) -> list[tuple[Tensor, ...]]:
    leaves = tree_leaves(tensors, is_leaf=lambda value: isinstance(value, TABLES))
    return [leaf for leaf in leaves if isinstance(leaf, EDIT_TABLES)]


def outcome(function: Callable[..., Any], tensors: tuple[Any, ...], *, writes: bool) -> Any:
    """The results of a stage, after the arguments where it writes: it gets copies of them."""
    if not writes:
        return function(*tensors)
    written = copies(tensors)
    results = function(*written)
    for argument in written:
        if isinstance(argument, History):
            argument.entries[-1].zero_()  # the last slot, where several entries may write at once
    return *written, results


def difference(found: Any, wanted: Any) -> str:
    """How nested tuples of tensors differ; empty where they are equal, bit for bit, but for the payloads of NaNs."""
    pairs = tree_leaves(found), tree_leaves(wanted)
    if len(pairs[0]) != len(pairs[1]):
        return f"{len(pairs[0])} results instead of {len(pairs[1])}"
    for number, (left, right) in enumerate(zip(*pairs, strict=True)):
        if not isinstance(left, Tensor) or not isinstance(right, Tensor):
            if left is not right:
                return f"result {number} is {type(left).__name__} instead of {type(right).__name__}"
        elif (left.dtype, left.shape) != (right.dtype, right.shape):
            return f"result {number} is {left.dtype} {[*left.shape]} instead of {right.dtype} {[*right.shape]}"
        elif not torch.equal(_bits(left), _bits(right)):
            wrong = int((_bits(left) != _bits(right)).sum())
            return f"result {number} differs in {wrong} of {right.numel()} numbers"
    return ""


def _bits(values: Tensor) -> Tensor:
    """The bits of floats as integers, every NaN the same."""
    if values.dtype == torch.int32:  # may be ``nan_bits``, the bits of a float
        return values.clamp(max=_NAN_BITS)
    if not values.is_floating_point():
        return values
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.where(values.isnan(), torch.nan, values).contiguous().view(integers[values.itemsize])
