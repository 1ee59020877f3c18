"""One request of a verification with its own rows, its laws, numbers and noise: what ``reference.py`` judges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.batch import DraftTable, RowStatus, VerifyInputs
from compiled_sampler.core import reference
from compiled_sampler.core.arithmetic import reciprocal
from compiled_sampler.core.mass import MASS_BITS
from compiled_sampler.core.noise import RESIDUAL, TARGET
from compiled_sampler.core.order import indices, row_logits
from compiled_sampler.core.rows import RowSlots, gather_rows, idle_status
from compiled_sampler.core.score import drawn_noise
from compiled_sampler.edits.watermark import noise_positions
from compiled_sampler.modes import PROCESSED, Mode
from compiled_sampler.passes.kept import probability_mass
from compiled_sampler.speculation.acceptance import accept_number
from compiled_sampler.speculation.residual import log2


def requests_of(mode: Mode, inputs: VerifyInputs) -> Iterator[Request | int]:
    """All requests in their order; the ``idle_status`` of padding and of requests that are not covered."""
    row = draft = 0
    entries = zip(inputs.slots.tolist(), inputs.num_drafts.tolist(), strict=True)
    idle = idle_status(inputs.table, inputs.slots).tolist()
    for n, (slot, count) in enumerate(entries):
        x = row_logits(inputs.logits[row : row + count + 1], mode.vocab_size)
        proposals = inputs.proposals if mode.drafts != "one_hot" else None
        if isinstance(proposals, DraftTable):
            proposals = row_logits(proposals.logits[slot, : max(count, 0)], mode.vocab_size)
        elif proposals is not None:
            proposals = row_logits(proposals[draft : draft + count], mode.vocab_size)
        yield idle[n] or _request(mode, inputs, n, x, proposals)
        row, draft = row + count + 1, draft + max(count, 0)


def _request(mode: Mode, inputs: VerifyInputs, n: int, x: Tensor, proposals: Tensor | None) -> Request:
    """Request n, with its rows and what its drafts were drawn from, float32 ``[k+1, V]`` and ``[k, V]``."""
    offsets, count, ids = torch.arange(len(x), device=x.device), len(x) - 1, indices(mode.vocab_size, x.device)
    slots, positions = inputs.slots[n].expand(len(x)), inputs.positions[n] + offsets
    keyed = positions if inputs.noise is None else noise_positions(slots, positions, *inputs.noise)
    target, rest = (gather_rows(RowSlots(inputs.table, slots, keyed), stream=each) for each in (TARGET, RESIDUAL))
    if mode.from_probabilities:  # no parameter but the seed has a part
        target, rest = (each._replace(noise_mask=torch.full_like(each.noise_mask, -1)) for each in (target, rest))
        weights = probability_mass(x)
        kept, logarithms = weights > 0, log2(weights.to(torch.float32) * 2.0**-MASS_BITS)
        flags = torch.where(x.isnan().any(-1), int(RowStatus.NAN_SEEN), 0)
    else:
        weights = reference.weights(x, target, base_is_row=mode.base_is_row)
        kept, logarithms = reference.kept(x, target, base_is_row=mode.base_is_row), x * target.scale[:, None]
        flags = reference.status(x, target.scale)
    is_greedy = bool((target.noise_mask == 0).any())
    drafts = [each if 0 <= each < mode.vocab_size else -1 for each in inputs.draft_token_ids[n, :count].tolist()]
    proposed = (ids == torch.tensor(drafts, dtype=torch.int32, device=x.device)[:, None]).to(torch.int64)
    if proposals is not None and mode.drafts == "probabilities":
        proposed = probability_mass(proposals)
    elif proposals is not None:
        table = inputs.draft_table if mode.drafts == PROCESSED and inputs.draft_table is not None else inputs.table
        parameters = gather_rows(RowSlots(table, slots[:count], positions[:count]), stream=TARGET)
        proposed = reference.weights(proposals, parameters, base_is_row=mode.base_is_row)
    return Request(
        p=_laws(weights),
        q=_laws(proposed),
        drafts=drafts,
        possible=[is_greedy or draft < 0 or int(row[draft]) > 0 for row, draft in zip(proposed, drafts, strict=True)],
        numbers=accept_number(inputs.table, slots, positions, offsets)[:count].tolist(),
        kept=kept,
        logarithms=logarithms,
        noise={TARGET: drawn_noise(target, ids, x), RESIDUAL: drawn_noise(rest, ids, x)},
        flags=flags.tolist(),
        is_greedy=is_greedy,
    )


def _laws(weights: Tensor) -> Laws:
    """The laws with these weights ``[n, V]``; the total of a row without mass counts as 1."""
    total = weights.sum(-1)
    return Laws(weights, total.clamp(min=1), reciprocal(total.to(torch.float64)))


class Laws(NamedTuple):
    """Distributions in integers: a token's probability is its weight over the total."""

    weights: Tensor
    """int64 ``[n, V]``, 0 where a filter drops the token."""
    total: Tensor
    """int64 ``[n]``, the sums, at least 1."""
    inverse: Tensor
    """float64 ``[n]``, 1 over the sums; 0 for a sum of 0."""


class Request(NamedTuple):
    """One request with k drafts, and all that its verification reads."""

    p: Laws
    """Of the target ``[k+1]``."""
    q: Laws
    """Of what the drafts were drawn from ``[k]``."""
    drafts: list[int]
    """k token ids; -1 where a draft is none."""
    possible: list[bool]
    """k, false where q gives the draft no weight, so that it cannot have been drawn from it; true if ``is_greedy``."""
    numbers: list[float]
    """k uniform numbers, one for the test of each draft."""
    kept: Tensor
    """bool ``[k+1, V]``, the tokens that race in the target's own draw."""
    logarithms: Tensor
    """float32 ``[k+1, V]``, base-2 logarithms of their weights."""
    noise: dict[int, Tensor]
    """float32 ``[k+1, V]`` by stream; 0 of a greedy request."""
    flags: list[int]
    """``RowStatus`` of the k+1 rows."""
    is_greedy: bool
    """Whether its first token of the order is taken."""
