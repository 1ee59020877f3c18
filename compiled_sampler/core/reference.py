"""The definition of sampling, in plain torch over whole rows: sort the row, filter it, race.

Every other path of this library is a faster way to the same bits, and is tested against this one; ``Sampler(...,
backend="reference")`` runs it. The kept set of a row is a prefix of its order, cut by top-k, then top-p, then min-p.
The token is ``argmax(x * c + G)`` over the kept set, where ``c = log2(e) / temperature`` and G is the noise of (seed,
position, token id): an exponential race, which draws each token in proportion to ``2**(x * c)`` without a sum, a scan
or a second number. A greedy request keeps one token and has no noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.batch import ProbabilityOutputs, RowStatus, SampleInputs, SampleOutputs
from compiled_sampler.core.arithmetic import reciprocal
from compiled_sampler.core.filters import keep_prefix, keep_top_k, last_kept, ordered_logits
from compiled_sampler.core.mass import exp2_mass, scaled_logits
from compiled_sampler.core.order import MASKED_KEY, indices, is_visible, order_key, pack, packed_id, row_logits, visible
from compiled_sampler.core.rows import RowParams, gather_rows, row_slots_of
from compiled_sampler.core.score import score_key


def sample(inputs: SampleInputs, *, vocab_size: int, base_is_row: bool) -> SampleOutputs:
    """A token for every row: the winner of the race among the tokens that the filters keep."""
    rows = row_parameters(inputs)
    x, ids = row_logits(inputs.logits, vocab_size), indices(vocab_size, inputs.logits.device)
    keep = kept(x, rows, base_is_row=base_is_row)
    winner = pack(torch.where(keep, score_key(x, ids, rows), MASKED_KEY), ids).amax(-1)
    token_ids = torch.where(rows.live & keep.any(-1), packed_id(winner), -1)
    return SampleOutputs(token_ids, torch.where(rows.live, status(x, rows.scale), rows.idle))


def probabilities(inputs: SampleInputs, *, vocab_size: int, base_is_row: bool) -> ProbabilityOutputs:
    """The distribution that ``sample`` draws from, float32 ``[R, V]``."""
    rows = row_parameters(inputs)
    weight = weights(row_logits(inputs.logits, vocab_size), rows, base_is_row=base_is_row)
    share = torch.where(rows.live, reciprocal(weight.sum(-1).to(torch.float64)), 0.0)
    return ProbabilityOutputs((weight.to(torch.float64) * share[:, None]).to(torch.float32))


def row_parameters(inputs: SampleInputs) -> RowParams:
    """The parameters and the noise keys of each row, ``[R]``: of the target's noise, or of a draft's own."""
    row_slots = row_slots_of(inputs)
    return gather_rows(row_slots, stream=row_slots.stream)


def weights(x: Tensor, rows: RowParams, *, base_is_row: bool) -> Tensor:
    """The integer weight of every token, 0 where a filter drops it: int64 ``[R, V]``; arguments as ``kept``."""
    return torch.where(kept(x, rows, base_is_row=base_is_row), exp2_mass(scaled(x, rows.scale)), 0)


def kept(x: Tensor, rows: RowParams, *, base_is_row: bool) -> Tensor:
    """True for the tokens that can be drawn and pass all filters: bool ``[R, V]``, false throughout a masked row."""
    last = threshold(x, rows.scale, rows.top_k, rows.top_p, vocab_size=x.shape[1], base_is_row=base_is_row)
    in_prefix = pack(order_key(x), indices(x.shape[1], x.device)) >= last[:, None]
    return is_visible(x) & in_prefix & (scaled(x, rows.scale) >= rows.min_p_log2[:, None])


def threshold(
    logits: Tensor, scale: Tensor, top_k: Tensor, top_p: Tensor, *, vocab_size: int, base_is_row: bool
) -> Tensor:
    """The last token that top-k and top-p keep, by sorting the row: int64 ``[R]``, packed (order key, id)."""
    packed = pack(order_key(row_logits(logits, vocab_size)), indices(vocab_size, logits.device))
    ordered = packed.sort(-1, descending=True).values
    mass, in_top_k = exp2_mass(ordered_logits(ordered, scale)), keep_top_k(ordered, top_k)
    base = torch.where(in_top_k | base_is_row, mass, 0).sum(-1)
    return last_kept(ordered, keep_prefix(ordered, torch.where(in_top_k, mass, 0), top_k, top_p, base))


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """Base-2 logits relative to the row's maximum, float32 ``[R, V]``, from logits ``[R, V]`` and ``[R]`` scales."""
    return scaled_logits(x, visible(x).amax(-1, keepdim=True), scale[:, None])


def status(x: Tensor, scale: Tensor) -> Tensor:
    """The ``RowStatus`` flags of rows of logits ``[R, V]`` with scales ``[R]``: int32 ``[R]``."""
    flags = {
        RowStatus.NAN_SEEN: x.isnan().any(-1),
        RowStatus.ALL_MASKED: ~is_visible(x).any(-1),
        RowStatus.POSITIVE_INFINITY: visible(x).amax(-1) * scale == float("inf"),
    }
    return torch.stack([is_set.to(torch.int32) * int(flag) for flag, is_set in flags.items()]).sum(0).to(torch.int32)
