"""The last token of a request: drawn from ``relu(p - q)`` after a rejection, else from the target.

Both draws are races over the same tokens. The residual's weight of a token is a difference of float32 products, its
score the base-2 logarithm of the weight plus noise of the RESIDUAL stream. Rounding moves a weight by at most ``3 *
2**-24 * p + 2 * 2**-24 * q``, the logarithm is off by at most 2e-7 and the float32 sum by ``2**-20`` for the likely
tokens. Weights are the rest of a row, not scaled up, so however rare its rejection, the law of the emitted tokens moves
by a total variation below 2e-6.

Tokens without a residual race too, as in the target's own draw, and count only if no token has a residual; such a row
gets the flag ZERO_RESIDUAL. A rejection means ``p < q``, so none is left only if rounding removes it, less than
``2**-21`` of p, or if all tokens are masked; the draw is then one from the target's law, on the noise of the residual.
A draft that is not a token id, or has no weight in its proposal, was not drawn from it: nothing is subtracted, and the
token is the target's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.batch import AnyTable, RowStatus, SampleOutputs, VerifyOutputs
from compiled_sampler.core.arithmetic import log2_float32
from compiled_sampler.core.mass import MASS_BITS
from compiled_sampler.core.noise import TARGET
from compiled_sampler.core.order import (
    MASKED_BITS,
    MASKED_KEY,
    key_float,
    packed_id,
    packed_key,
    ranked,
    ranked_key,
    score_order,
)
from compiled_sampler.core.rows import RowSlots, expand_to, gather_rows, take
from compiled_sampler.core.score import admitted, drawn_noise, in_any_mode, noise_of, raced_bits
from compiled_sampler.core.stage import holds
from compiled_sampler.passes.blocks import gather_logits_of, logit_blocks, own_tokens, rows_in_blocks, rows_in_windows
from compiled_sampler.passes.kept import unpacked, weight_units
from compiled_sampler.passes.law import Law, LawBlocks, sum_law
from compiled_sampler.passes.maxima import first_of, nan_bits_of
from compiled_sampler.passes.race import tokens_from_keys
from compiled_sampler.speculation.acceptance import (
    UNIT,
    Judged,
    in_range,
    proposal_law,
    proposal_weight,
    proposed_at,
    proposed_of,
    rows_at,
)
from compiled_sampler.speculation.emission import Final, emit_final
from compiled_sampler.speculation.row_layout import CachedRows, Layout

Values = Tensor | CachedRows | None
"""Of the proposals: logits or probabilities ``[D, >=V]``, or where a draft table has them; None for one-hot drafts."""


def residual_weight(
    w: Tensor, law: Law, carry: Tensor | None, m: Tensor | None, proposed: Law, dtype: torch.dtype = torch.float32
) -> Tensor:
    """``carry * p - q`` of tokens, ``[R, ...]`` in ``dtype``; zero or negative where the target has no residual."""
    # w and m are weights of the target and of the proposals, int64 or float32 [R, ...].
    share = law.inverse if carry is None else carry * law.inverse
    p = w.to(dtype) * expand_to(share.to(dtype), w)
    return p if m is None else p - m.to(dtype) * expand_to(proposed.inverse.to(dtype), m)


def final_race(
    x: Tensor, values: Tensor | None, ids: Tensor, final: Final, *, by_key: bool = False
) -> tuple[Tensor, Tensor]:
    """The keys, int32, with which the tokens of the final rows race, and which tokens have a residual, bool."""
    # A token with a residual stands above every token without; among tokens of one kind keys decide, and a token with
    # MASKED_KEY takes no part. A greedy request has one token, whether or not a draft was rejected: the target's own
    # draw.
    rows, cut = final.rows, final.law.cut
    w = weight_units(x, ids, None if cut is None else cut._replace(only=None))
    m = None if final.proposed is None or values is None else weight_units(values, ids, final.proposed.cut)
    left = residual_weight(w, final.law, final.carry, m, proposal_law(final.proposed, final.drafts))
    is_draft = ids == expand_to(final.drafts, x).to(torch.int32)
    is_left = expand_to(subtracts(final), x) & ~is_draft & (left > 0.0)  # a rejected draft has no residual
    if cut is None:
        t, keep, noise = log2_float32(torch.where(is_left, left, w * 2.0**-MASS_BITS)), w > 0.0, noise_of(rows, ids, x)
    else:
        last = None if cut.threshold is None else unpacked(cut.threshold)
        keep = admitted(x, ids, rows, None if cut.min_p_log2 is None else cut.row_max, last)
        t, noise = torch.where(is_left, log2_float32(left), x * expand_to(rows.scale, x)), drawn_noise(rows, ids, x)
    bits = raced_bits(t, noise)
    if by_key and cut is not None:
        bits = in_any_mode(bits, x, rows)
    return score_order(torch.where(keep, bits, MASKED_BITS)), is_left


def subtracts(final: Final) -> Tensor:
    """Whether proposals are subtracted from a final row: bool ``[N]``, after a rejection, if logits are not greedy."""
    rejected = final.drafts >= 0
    return rejected if final.law.cut is None else rejected & (final.rows.noise_mask != 0)


def residual_of_candidates(
    ordered: Tensor, values: Values, judged: Judged, carry: Tensor, layout: Layout, *, vocab_size: int
) -> Tensor:
    """The residual sum of each row over its candidates, in units of ``1 / UNIT``: int64 ``[R, 1]``."""
    x, ids = key_float(packed_key(ordered)), packed_id(ordered)
    values = proposed_at(values, layout.proposals, ids, vocab_size)
    rows = judged.law, judged.proposed, carry, layout.drafts, layout.proposals
    return _residual_sum(x, values, ids.to(torch.int32), *rows)[:, None]


@holds(tokens=True, whole=2)
def residual_of_blocks(
    values: Values, proposed: Law | None, logits: Tensor, law: Law, carry: Tensor, drafts: Tensor, proposals: Tensor,
    *, vocab_size: int, block: int,
) -> Tensor:  # fmt: skip
    """The residual sum of each block of a row, int64 ``[R, B]``; unit and arguments as ``residual_of_candidates``."""
    # All but the first two are by row.
    x, ids = logit_blocks(logits, vocab_size, block)
    if values is not None:
        values = rows_in_blocks(*rows_at(values, proposals), vocab_size, block)
    return _residual_sum(x, values, ids, law, proposed, carry, drafts, proposals)


def residual_of_walked_candidates(
    ordered: Tensor, values: Tensor | CachedRows, law: Law, proposed: Law, debt: Tensor, rows: tuple[Tensor, Tensor],
    *, vocab_size: int,
) -> Tensor:  # fmt: skip
    """The residual sum of some rows over their candidates, int64 ``[N, 1]``; ``rows``: of target and proposals."""
    row_ids, proposals = rows
    ordered = ordered[row_ids]
    x, ids = key_float(packed_key(ordered)), packed_id(ordered)
    m = gather_logits_of(*rows_at(values, proposals), ids, vocab_size)
    return _sum_left(
        x, m, ids.to(torch.int32), take(law, row_ids), take(proposed, in_range(proposals, proposed.total)), debt
    )[:, None]


@holds(tokens=True, whole=4)
def residual_of_walked_blocks(
    logits: Tensor, values: Tensor | CachedRows, law: Law, proposed: Law, debt: Tensor, rows: tuple[Tensor, Tensor],
    *, vocab_size: int, block: int,
) -> Tensor:  # fmt: skip
    """The residual sum of each block of some rows, int64 ``[N, B]``; arguments as for candidates."""
    row_ids, proposals = rows
    x, ids = rows_in_windows(logits, row_ids, vocab_size, block)
    m, _ = rows_in_windows(*rows_at(values, proposals), vocab_size, block)
    parts = (take(law, row_ids), take(proposed, in_range(proposals, proposed.total)), debt)
    return _sum_left(x, m, ids, *parts, own_tokens(ids, block))


def _sum_left(
    x: Tensor, m: Tensor, ids: Tensor, law: Law, proposed: Law, debt: Tensor, own: Tensor | None = None
) -> Tensor:
    """The sum of ``relu(p - debt * q)`` along the last dimension, in units of ``1 / UNIT``."""
    w, m = weight_units(x, ids, law.cut), weight_units(m, ids, proposed.cut)
    owed = proposed._replace(inverse=debt * proposed.inverse)
    left = residual_weight(w, law, None, m, owed, torch.float64)
    keep = left > 0.0 if own is None else (left > 0.0) & own
    return (torch.where(keep, left, 0.0) * UNIT).to(torch.int64).sum(-1)


def draw_from_final_candidates(ordered: Tensor, values: Values, final: Final, *, vocab_size: int) -> SampleOutputs:
    """The last token and the status of each request, ``[N]`` each, from the candidates of its final row."""
    ordered = ordered[final.row_ids]
    x, ids = key_float(packed_key(ordered)), packed_id(ordered)
    values = proposed_at(values, final.proposals, ids, vocab_size)
    ids = ids.to(torch.int32)
    keys, is_left = final_race(x, values, ids, final)
    nan_bits = torch.zeros_like(final.drafts)  # the status in the row's law says if there is a NaN
    return _final_outputs(ranked(keys, ids, is_left), nan_bits, final)


def emit_from_final_candidates(
    ordered: Tensor, values: Values, final: Final, slots: Tensor, draft_token_ids: Tensor, *, vocab_size: int
) -> VerifyOutputs:
    """``emission.emit_final`` of ``draw_from_final_candidates``: one kernel less than the two as separate stages."""
    last = draw_from_final_candidates(ordered, values, final, vocab_size=vocab_size)
    return emit_final(last, final, slots, draft_token_ids)


@holds(tokens=True, whole=2)
def final_winners(
    logits: Tensor, values: Values, final: Final, *, vocab_size: int, block: int, by_bits: bool = False
) -> tuple[Tensor, Tensor]:
    """The winner of each block of the final rows, int64 ranks ``[N, B]`` of ``ranked``, and its ``nan_bits``, int32."""
    x, ids = rows_in_windows(logits, final.row_ids, vocab_size, block)
    if values is not None:
        values, _ = rows_in_windows(*rows_at(values, final.proposals), vocab_size, block)
    keys, is_left = final_race(x, values, ids, final, by_key=not by_bits)
    if not by_bits:
        return ranked(keys, ids, is_left).amax(-1), nan_bits_of(x)
    left = torch.where(is_left, keys, MASKED_KEY)
    best_left = left.amax(-1)
    any_left = best_left > MASKED_KEY
    best = torch.where(any_left, best_left, keys.amax(-1))
    token_ids = first_of([torch.where(any_left[..., None], left, keys)], best, ids)
    return ranked(best, token_ids, any_left), nan_bits_of(x, by_bits=True)


def draw_from_final_blocks(ranks: Tensor, nan_bits: Tensor, final: Final) -> SampleOutputs:
    """The last token and the status of each request, ``[N]`` each, from the ``final_winners``."""
    return _final_outputs(ranks, nan_bits.amax(-1), final)


def emit_from_final_blocks(
    ranks: Tensor, nan_bits: Tensor, final: Final, slots: Tensor, draft_token_ids: Tensor
) -> VerifyOutputs:
    """``emission.emit_final`` of ``draw_from_final_blocks``: one kernel less than the two as separate stages."""
    return emit_final(draw_from_final_blocks(ranks, nan_bits, final), final, slots, draft_token_ids)


def every_row_final(law: Law | LawBlocks, layout: Layout, table: AnyTable) -> Final:
    """A ``Final`` ``[R]`` in which each row is a final row without drafts, to draw every row's own token."""
    law, nothing = sum_law(law), torch.full_like(layout.drafts, -1)
    return Final(
        row_ids=torch.arange(layout.slots.shape[0], device=layout.slots.device),
        num_accepted=torch.zeros_like(nothing),
        num_matching=torch.zeros_like(nothing),
        drafts=nothing,
        proposals=layout.proposals,
        rows=gather_rows(RowSlots(table, layout.slots, layout.positions), stream=TARGET),
        law=law,
        proposed=None,
        carry=None,
        status=law.status.to(torch.int64),
    )


def _final_outputs(ranks: Tensor, nan_bits: Tensor, final: Final) -> SampleOutputs:
    """The last token and the status of each request, ``[N]`` each."""
    best = ranks.amax(-1)
    key, any_left = ranked_key(best)
    drawn = tokens_from_keys(key, packed_id(best), nan_bits, final.rows.idle)
    zero = torch.where(subtracts(final) & ~any_left, int(RowStatus.ZERO_RESIDUAL), 0)
    return SampleOutputs(drawn.token_ids, (drawn.status | final.status | zero).to(torch.int32))


def _residual_sum(
    x: Tensor, values: Tensor | None, ids: Tensor, law: Law, proposed: Law | None, carry: Tensor, drafts: Tensor,
    proposals: Tensor,
) -> Tensor:  # fmt: skip
    """The sum of ``relu(carry * p - q)`` along the last dimension, int64 in units of ``1 / UNIT``."""
    proposed = proposed_of(proposed, proposals)
    m = proposal_weight(values, ids, expand_to(drafts, x), proposed)
    w = weight_units(x, ids, law.cut)
    left = residual_weight(w, law, carry, m, proposal_law(proposed, drafts), torch.float64)
    return (torch.where(left > 0.0, left, 0.0) * UNIT).to(torch.int64).sum(-1)
