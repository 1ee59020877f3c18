"""The last token of a request: drawn from ``relu(p - q)`` after a rejection, else from the target itself.

Both are races over the same tokens. The residual's weight of a token is a difference of float64 products, its score the
base-2 logarithm of the weight plus noise of the RESIDUAL stream. The logarithm is off by at most 2e-7 and the float32
sum by ``2**-20`` for the likely tokens, so the law moves by a total variation below 2e-6.

A rejection means ``p < q`` by at least a factor of ``1 - 2**-33``, so another token has a residual, unless rounding
swallows it. So that even then a token of the target is drawn, each has at least ``2**-60`` times its probability as its
residual weight; a row where such a token wins says ZERO_RESIDUAL. A draft that is no token id was proposed by nobody:
nothing is subtracted, and the target's own draw decides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.batch import (
    BlockMaxima,
    Cut,
    Entries,
    Final,
    Law,
    Layout,
    Proposal,
    RowStatus,
    SampleOutputs,
    SlotTable,
    VerifyOutputs,
)
from compiled_sampler.blocks import best_block, logit_blocks, nan_bits, rows_in_blocks, rows_in_windows, widened
from compiled_sampler.draw import admitted_bits, best_score, noise_of, outputs
from compiled_sampler.filters import KEEP_ALL
from compiled_sampler.law import law_of, weight_units
from compiled_sampler.mass import MASS_BITS
from compiled_sampler.noise import MAGIC, MAGIC_BITS, TARGET
from compiled_sampler.order import MASKED_BITS, key_float, last_of, pack, packed_id, packed_key, score_order
from compiled_sampler.polynomial import polynomial
from compiled_sampler.rows import expand_to, gather_rows, take
from compiled_sampler.verification import UNIT, emit_final, proposal_law, proposal_rows, proposal_weight, proposed_at

# log2(1 + f) / f on [0, 1], exact at 1; absolute error of the log in float32 1.8e-7
_LOG = (
    1.4426898956298828,
    -0.7211657762527466,
    0.4786836802959442,
    -0.34730103611946106,
    0.2418646514415741,
    -0.1375211924314499,
    0.05205890163779259,
    -0.009309137240052223,
)
_NEARLY_NOTHING = 2.0**-60
FINAL_BLOCK = 256
"""Tokens a block in the race over final rows: with 512 a thread needs twice the registers, and few fit on a GPU."""

_FRACTION, _ONE, _BIAS = 2**52 - 1, 1023 << 52, 1023


def log2(x: Tensor) -> Tensor:
    """``log2(x)`` of positive normal float64 numbers as float32, absolute error below 2e-7 besides its rounding."""
    bits = x.view(torch.int64)
    exponent = ((bits >> 52).to(torch.int32) + (MAGIC_BITS - _BIAS)).view(torch.float32) - MAGIC  # no conversion
    fraction = (((bits & _FRACTION) | _ONE).view(torch.float64) - 1.0).to(torch.float32)
    return exponent + fraction * polynomial(fraction, _LOG)


def weight_bits(weights: Tensor, noise: Tensor) -> Tensor:
    """Int32 bits of the scores of a race with these float64 weights; ``MASKED_BITS`` where one is not positive.

    Args:
        weights: float64 ``[R, ...]``, at most 1.
        noise: float32, the same shape.
    """
    return torch.where(weights > 0.0, (log2(weights) + noise).view(torch.int32), MASKED_BITS)


def residual_weight(w: Tensor, law: Law, carry: Tensor | None, m: Tensor, proposed: Law) -> tuple[Tensor, Tensor]:
    """``carry * p`` and ``carry * p - q`` of tokens: float64 ``[R, ...]`` each.

    Args:
        w: int64 or float32 ``[R, ...]``, weights of the target.
        law: of the target ``[R]``.
        carry: float64 ``[R]``, see ``verification.carried_ratio``; None for 1.
        m: the same of the proposals.
        proposed: ``verification.proposal_law`` ``[R]``.
    """
    share = law.inverse if carry is None else carry * law.inverse
    p = w.to(torch.float64) * expand_to(share, w)
    return p, p - m.to(torch.float64) * expand_to(proposed.inverse, m)


def target_bits(x: Tensor, ids: Tensor, final: Final, cut: Cut | None) -> Tensor:
    """Int32 bits of the scores of the target's own draw, those of the plain sampler for logits."""
    if cut is not None:
        last = None if cut.threshold is None else last_of(cut.threshold)
        return admitted_bits(x, ids, final.rows, None if cut.min_p_log2 is None else cut.row_max, last)
    return weight_bits(weight_units(x, ids, None).to(torch.float64) * 2.0**-MASS_BITS, noise_of(final.rows, ids, x))


def final_bits(
    x: Tensor, values: Tensor | None, ids: Tensor, final: Final, law: Law, proposed: Law | None, carry: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Int32 bits of the scores in the race of the final rows, and where they stand for something of the residual.

    A greedy request has one token, with or without a draft that was rejected: the target's own draw finds it.

    Args:
        x: float32 ``[N, ...]``, logits or probabilities of the target.
        values: the same of the proposals; None for one-hot drafts.
        ids: int32 token ids, broadcastable to ``x``.
        final: the rows ``[N]``.
        law: of the target, ``[R]``.
        proposed: of the proposals ``[N]``; None for one-hot drafts.
        carry: float64 ``[R]``; None for 1.

    Returns:
        int32 and bool, the shape of ``x``.
    """
    law, carry = law_of(law, final.row_ids), take(carry, final.row_ids)
    rejected, cut = final.drafts >= 0, law.cut
    if cut is not None:
        rejected, cut = rejected & (final.rows.noise_mask != 0), cut._replace(only=None)
    m = proposal_weight(values, ids, expand_to(final.drafts, x), proposed)
    p, left = residual_weight(weight_units(x, ids, cut), law, carry, m, proposal_law(proposed, final.drafts))
    least = p * _NEARLY_NOTHING
    residual = weight_bits(torch.where(left > least, left, least), noise_of(final.rows, ids, x))
    rejected = expand_to(rejected, x)
    return torch.where(rejected, residual, target_bits(x, ids, final, cut)), (left > 0.0) | ~rejected


def final_key(
    x: Tensor, values: Tensor | None, ids: Tensor, final: Final, law: Law, proposed: Law | None, carry: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``final_bits`` as keys in their order."""
    bits, meant = final_bits(x, values, ids, final, law, proposed, carry)
    return score_order(bits), meant


def residual_of_candidates(
    ordered: Tensor, law: Law, proposal: Proposal, carry: Tensor, layout: Layout, *, vocab_size: int
) -> Tensor:
    """The residual sum of each row over its candidates, in units of ``1 / UNIT``: int64 ``[R, 1]``.

    Args:
        ordered: int64 ``[R, C]``, packed keys of the candidates.
        law: of the target ``[R]``.
        proposal: ``[D]``.
        carry: float64 ``[R]``.
        layout: of the rows.
        vocab_size: V.
    """
    x, ids = key_float(packed_key(ordered)), packed_id(ordered)
    index, proposed = proposal_rows(proposal, layout.proposals)
    values = proposed_at(proposal, index, ids, vocab_size)
    return _residual_sum(x, values, ids.to(torch.int32), law, proposed, carry, layout)[:, None]


def residual_of_blocks(
    logits: Tensor, law: Law, proposal: Proposal, carry: Tensor, layout: Layout, *, vocab_size: int, block: int
) -> Tensor:
    """The residual sum of each block of a row: int64 ``[R, B]``; arguments as ``residual_of_candidates``."""
    x, ids = logit_blocks(logits, vocab_size, block)
    index, proposed = proposal_rows(proposal, layout.proposals)
    values = _proposed_blocks(proposal, index, vocab_size, block)
    return _residual_sum(x, values, ids, law, proposed, carry, layout)


def draw_from_final_candidates(
    ordered: Tensor, law: Law, proposal: Proposal, carry: Tensor | None, final: Final, *, vocab_size: int
) -> SampleOutputs:
    """The last token of each request from the candidates of its final row; arguments as ``final_maxima``."""
    ordered = ordered[final.row_ids]
    x, ids = key_float(packed_key(ordered)), packed_id(ordered)
    index, proposed = proposal_rows(proposal, final.proposals)
    values, ids = proposed_at(proposal, index, ids, vocab_size), ids.to(torch.int32)
    magnitude = torch.zeros_like(final.drafts)  # the law of a row tells
    return _final_outputs(*final_key(x, values, ids, final, law, proposed, carry), ids, magnitude, final)


def final_maxima(
    logits: Tensor, law: Law, proposal: Proposal, carry: Tensor | None, final: Final, *, vocab_size: int, block: int
) -> BlockMaxima:
    """The best key of each block of the final rows, and what shows a NaN in it.

    Args:
        logits: ``[R, >=V]``, or probabilities.
        law: of the target ``[R]``.
        proposal: ``[D]``.
        carry: float64 ``[R]``; None for 1.
        final: the rows ``[N]``.
        vocab_size: V.
        block: tokens a block.
    """
    x, ids = rows_in_windows(logits, final.row_ids, vocab_size, block)
    index, proposed = proposal_rows(proposal, final.proposals)
    values = None if proposal.values is None else rows_in_windows(proposal.values, index, vocab_size, block)[0]
    return BlockMaxima(best_score(final_bits(x, values, ids, final, law, proposed, carry)[0]), nan_bits(x))


def draw_from_final_blocks(
    logits: Tensor,
    maxima: BlockMaxima,
    law: Law,
    proposal: Proposal,
    carry: Tensor | None,
    final: Final,
    *,
    vocab_size: int,
    block: int,
) -> SampleOutputs:
    """The last token of each request: a second look at the block with the best score; arguments as ``final_maxima``."""
    x, ids = best_block(logits[final.row_ids], maxima.keys, vocab_size, block)
    index, proposed = proposal_rows(proposal, final.proposals)
    values = proposed_at(proposal, index, ids.to(torch.int64), vocab_size)
    magnitude = widened(maxima.magnitudes, block).amax(-1)
    return _final_outputs(*final_key(x, values, ids, final, law, proposed, carry), ids, magnitude, final)


def emit_from_final_blocks(
    logits: Tensor,
    maxima: BlockMaxima,
    law: Law,
    proposal: Proposal,
    carry: Tensor | None,
    final: Final,
    layout: Layout,
    slots: Tensor,
    draft_token_ids: Tensor,
    *,
    vocab_size: int,
    block: int,
) -> VerifyOutputs:
    """``verification.emit_final`` of ``draw_from_final_blocks``, a kernel less than the two apart."""
    last = draw_from_final_blocks(logits, maxima, law, proposal, carry, final, vocab_size=vocab_size, block=block)
    return emit_final(last, law, final, layout, slots, draft_token_ids, vocab_size=vocab_size)


def every_row(layout: Layout, table: SlotTable) -> Final:
    """Final rows for drawing every row's own token: no draft is judged; ``[R]``."""
    nothing = torch.full_like(layout.drafts, -1)
    return Final(
        row_ids=torch.arange(layout.slots.shape[0], device=layout.slots.device),
        num_accepted=torch.zeros_like(nothing),
        num_matching=torch.zeros_like(nothing),
        drafts=nothing,
        proposals=layout.proposals,
        rows=gather_rows(Entries(table, layout.slots, layout.positions), stream=TARGET),
    )


def _final_outputs(key: Tensor, meant: Tensor, ids: Tensor, magnitude: Tensor, final: Final) -> SampleOutputs:
    """Tokens and status of the final rows.

    Args:
        key: int32 ``[N, n]``.
        meant: bool ``[N, n]``, where a key stands for what should be drawn.
        ids: int32, broadcastable to ``key``.
        magnitude: int32 ``[N]``, the ``nan_bits`` of the rows.
        final: the rows.
    """
    packed = pack(key, ids)
    drawn = outputs(best := packed.amax(-1), magnitude, final.rows.live)
    strange = torch.where(meant, packed, KEEP_ALL).amax(-1) != best
    strange = (strange | (drawn.token_ids < 0)) & (final.drafts >= 0) & (final.rows.noise_mask != 0)
    status = drawn.status | torch.where(strange, int(RowStatus.ZERO_RESIDUAL), 0)
    return SampleOutputs(drawn.token_ids, status.to(torch.int32))


def _residual_sum(
    x: Tensor, values: Tensor | None, ids: Tensor, law: Law, proposed: Law | None, carry: Tensor, layout: Layout
) -> Tensor:
    m = proposal_weight(values, ids, expand_to(layout.drafts, x), proposed)
    _, left = residual_weight(weight_units(x, ids, law.cut), law, carry, m, proposal_law(proposed, layout.drafts))
    return (torch.where(left > 0.0, left, 0.0) * UNIT).to(torch.int64).sum(-1)


def _proposed_blocks(proposal: Proposal, index: Tensor, vocab_size: int, block: int) -> Tensor | None:
    """The proposals' logits or probabilities of the named rows in blocks; None for one-hot drafts."""
    return None if proposal.values is None else rows_in_blocks(proposal.values, index, vocab_size, block)
