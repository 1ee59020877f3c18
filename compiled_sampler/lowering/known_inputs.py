"""Inputs on which a compiled step differs from eager torch if it can: ties, NaN, infinities, denormals, extremes.

They have the shapes, dtypes and strides of a given batch, so that the code compiled for it serves them. They follow
from the number of the round alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from compiled_sampler.batch import DraftTable, SampleInputs, SlotTable, VerifyInputs
from compiled_sampler.lowering.known_edits import has_edits, is_padding, known_edits, known_positions, lying_as
from compiled_sampler.lowering.known_requests import NUM_REQUESTS
from compiled_sampler.modes import Mode
from compiled_sampler.speculation.row_layout import first_rows

_TEMPERATURES = (1e-5, 0.1, 0.7, 1.0, 3.0, 1e30)
_TOP_P = (1e-9, 0.25, 0.5, 0.9, 0.999, 1.0)
_MIN_P = (0.0, 1e-12, 0.05, 0.5, 1.0)
_POSITIONS = (0, 1, 2**31 - 1, 2**31, 2**32, 2**62)
_TABLE_ROWS = 37  # that differ in a draft table

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
"""Rows made of a standard normal sample ``[V]``."""


def rounds(like: SampleInputs | VerifyInputs) -> range:
    """Numbers of rounds in which rows like these meet every kind, and their slots every request with edits."""
    least = math.ceil(NUM_REQUESTS / len(like.slots)) if has_edits(like) else 2
    return range(max(2, least, math.ceil(len(KINDS) / like.logits.shape[0])))


def hard_inputs(mode: Mode, like: Any, number: int) -> Any:
    """Inputs of a step, of the type of ``like``: SampleInputs or VerifyInputs.

    Args:
        mode: what the step does; the parameters are such as it covers.
        like: a batch whose shapes, dtypes, strides and device they have.
        number: of the round.
    """
    source, num_slots = random.Random(number), like.table.seeds.shape[0]
    made: dict[str, Any] = {
        "logits": _rows(like.logits, number, are_probabilities=mode.from_probabilities),
        "slots": _filled(like.slots, (_slot(i, num_slots) for i in range(len(like.slots)))),
        "positions": _filled(like.positions, (source.choice(_POSITIONS) for _ in range(len(like.positions)))),
        "table": _table(mode, like.table, source),
    }
    if isinstance(like, VerifyInputs):
        made |= _known_drafts(mode, like, number, made["logits"])
    elif like.offsets is not None:
        made["offsets"] = _filled(like.offsets, (i % 3 for i in range(len(like.offsets))))
    if has_edits(like):
        made["positions"] = lying_as(known_positions(like, number, made["positions"]), like.positions)
        likely = made["logits"][_first_rows(made.get("num_drafts"), len(like.slots)), : mode.vocab_size].argmax(-1)
        made |= known_edits(mode.vocab_size, like, number, likely)
    return like._replace(**made)


def _known_drafts(mode: Mode, like: VerifyInputs, number: int, logits: Tensor) -> dict[str, Any]:
    """Drafts, their numbers and what they were drawn from, by the names of the inputs of a verification."""
    made = dict[str, Any]()
    if isinstance(like.proposals, DraftTable):
        made["proposals"] = DraftTable(_table_rows(like.proposals.logits, number + 1))
    elif like.proposals is not None:
        are_probabilities = mode.drafts == "probabilities"
        made["proposals"] = _rows(like.proposals, number + 1, are_probabilities=are_probabilities)
    num_requests, width = like.draft_token_ids.shape
    counts = _draft_counts(num_requests, width, like.logits.shape[0], number)
    made["num_drafts"] = _filled(like.num_drafts, iter(counts))
    made["draft_token_ids"] = _drafts(like.draft_token_ids, counts, logits, mode.vocab_size)
    return made


def _first_rows(num_drafts: Tensor | None, num_entries: int) -> list[int]:
    """The first row of each entry, or of padding some row."""
    if num_drafts is None:
        return [*range(num_entries)]
    rows = num_drafts + 1
    return first_rows(rows, searched=True).clamp(max=int(rows.sum()) - 1).tolist()


def _rows(like: Tensor, number: int, *, are_probabilities: bool) -> Tensor:
    """A row of another kind each: logits, or probabilities of such logits."""
    noise = torch.randn(like.shape, generator=torch.Generator().manual_seed(number))
    first = number * min(len(noise), len(KINDS) - 1)  # goes on where the last round ended
    rows = torch.stack([KINDS[(first + row) % len(KINDS)](each) for row, each in enumerate(noise)])
    return lying_as(torch.softmax(rows, -1) if are_probabilities else rows, like)


def _table_rows(like: Tensor, number: int) -> Tensor:
    """A row of another kind at each place of a draft table; they come back, as a table may have very many."""
    made, rows = (
        torch.empty_like(like),
        _rows(like.new_empty(_TABLE_ROWS, like.shape[-1]), number, are_probabilities=False),
    )
    every = torch.arange(made.shape[0] * made.shape[1], device=like.device) % _TABLE_ROWS
    return torch.index_select(rows, 0, every, out=made.flatten(0, 1)).view(like.shape)


def _table(mode: Mode, like: SlotTable, source: random.Random) -> SlotTable:
    """Parameters of requests that the mode covers, some of them greedy."""
    rows = list[tuple[float | int, ...]]()
    top_p, min_p = _TOP_P if mode.capacity else (1.0,), _MIN_P if mode.filters_min_p else (0.0,)
    for _ in range(like.seeds.shape[0]):
        seed = source.getrandbits(64) - 2**63
        if not mode.draws or source.random() < 0.1:
            rows.append((seed, 1.0, 0, 1, 1.0, -math.inf))
            continue
        scale, least = math.log2(math.e) / source.choice(_TEMPERATURES), source.choice(min_p)
        top_k = source.choice(_top_k(mode))
        rows.append(
            (seed, scale, -1, top_k, source.choice(top_p), math.log2(least) if least else -math.inf),
        )
    columns = zip(*rows, strict=True)
    made = (_filled(old, iter(new)) for old, new in zip(like[:-2], columns, strict=True))
    return SlotTable(*(*made, like.needs, torch.zeros_like(like.unserved)))


def _top_k(mode: Mode) -> list[int]:
    """Numbers of tokens to keep that the mode covers."""
    whole = mode.vocab_size
    if not mode.beyond_candidates and not mode.capacity:
        return [whole]
    some = [1, 2, 5, 50, mode.capacity] if mode.capacity else [1, 2]
    if mode.beyond_candidates or mode.capacity >= whole:
        some += [65, whole // 2, whole - 1, whole]
    return [min(max(each, 1), whole) for each in some]


def _draft_counts(num_requests: int, width: int, num_rows: int, number: int) -> list[int]:
    """Drafts of each request, as many as the rows of logits allow; -1 for padding without rows."""
    counts, spare = list[int](), num_rows - num_requests
    for request in range(num_requests):
        count = -1 if is_padding(request) else min(width - (request + number) % (width + 1), max(spare, 0))
        spare -= count
        counts.append(count)
    return counts


def _drafts(like: Tensor, counts: list[int], logits: Tensor, vocab_size: int) -> Tensor:
    """Drafts of which some are likely, some are any token, and some are none."""
    likely = logits[:, :vocab_size].argmax(-1).tolist()
    made, row = [[-1] * like.shape[1] for _ in counts], 0
    for request, count in enumerate(counts):
        for place in range(max(count, 0)):
            kind = (request + place) % 5
            made[request][place] = {3: (31 * row) % vocab_size, 4: vocab_size}.get(kind, likely[row + place])
        row += count + 1
    return lying_as(torch.tensor(made, dtype=like.dtype), like)


def _slot(entry: int, num_slots: int) -> int:
    return -1 if is_padding(entry) else entry % num_slots


def _filled(like: Tensor, values: Iterator[float | int]) -> Tensor:
    return lying_as(torch.tensor(list(values), dtype=like.dtype), like)
