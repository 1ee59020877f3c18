"""Logprobs from integers: ``ln(2) * (t - log2(total))``, finished in float64 and rounded once to float32.

t is the scaled logit of a token and total the integer mass of its law. Here t is computed in float64 from the float32
logit, maximum and scale, so a logprob is finite also where the integer weight of a token is 0, and its error is that of
the scale, 6e-8 of ``|t|``, and of the total, whose relative error ``core/mass.py`` bounds.

The law of all visible tokens of a row is made by a pass that does not know the row's largest logit: in blocks, each
relative to its own largest logit, so that the row is read once instead of twice. Bringing the blocks to the unit of the
row rounds: so the blocks are the same on every path, whatever the batch and the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.core.arithmetic import LN2, LOG2_E, log2, reciprocal
from compiled_sampler.core.filters import KEEP_ALL
from compiled_sampler.core.mass import FLOAT_MAX, MASS_BITS, clamped, exp2_mass, exp2_moment, exp2_scaled, scaled_logits
from compiled_sampler.core.noise import TARGET
from compiled_sampler.core.order import Last, is_visible, key_float, order_key, pack, packed_id, packed_key, reaches
from compiled_sampler.core.rows import RowSlots, expand_to, gather_rows, idle_status, with_scale
from compiled_sampler.core.stage import holds
from compiled_sampler.logprobs import LogprobOutputs
from compiled_sampler.passes.blocks import AnyLogits, gather_logits, logit_blocks
from compiled_sampler.passes.kept import Cut, Kept, passes
from compiled_sampler.passes.maxima import best_bits, largest_key, largest_logit, visible_bits
from compiled_sampler.passes.race import last_before_winner

LAW_BLOCK = 512
"""Tokens of a block. Another number changes bits of logprobs."""

_NONE = float("-inf")
_UNIT = 2.0**-MASS_BITS


class BlockLaws(NamedTuple):
    """The visible tokens of each block, ``[R, B]``."""

    keys: Tensor
    """int32, the order key of the largest logit."""
    masses: Tensor
    """int64, the mass relative to that logit."""
    moments: Tensor | None
    """int64, the sum of ``-2**t * t`` relative to that logit; None where no entropy is asked for."""


def law_scale(row_slots: RowSlots, processed_scale: Tensor | None) -> Tensor:
    """``log2(e) / temperature`` of each row, float32 ``[R]``; for padding, whose results mean nothing, any."""
    # This is a stage of its own, as each block of a row would wait for the request's slot and for what stands there.
    # processed_scale: float32 [S], also of greedy requests; None takes the table's, where these have temperature 1.
    if processed_scale is not None:
        row_slots = with_scale(row_slots, processed_scale)
    rows = gather_rows(row_slots, stream=TARGET)  # the noise is not used
    return rows.scale if processed_scale is not None else torch.where(rows.noise_mask == 0, LOG2_E, rows.scale)


@holds(tokens=True)
def law_in_blocks(
    logits: AnyLogits, scale: Tensor | None, *, vocab_size: int, moment: bool, by_bits: bool
) -> BlockLaws:
    """The law of each block of a row ``[R, B]``, without filters."""
    x, _ = logit_blocks(logits, vocab_size, LAW_BLOCK)
    key = order_key(best_bits(visible_bits(x)).view(torch.float32)) if by_bits else largest_key(x)
    return block_laws(x, key, scale, moment=moment)


def block_laws(x: Tensor, keys: Tensor, scale: Tensor | None, *, moment: bool) -> BlockLaws:
    """The law of each block ``[R, B]`` of logits, float32 ``[R, B, n]``, relative to the logit of an order key."""
    row_max = key_float(keys)[..., None]
    row_scale = torch.full_like(row_max, LOG2_E) if scale is None else scale[:, None, None]
    t = scaled_logits(x, row_max, row_scale)  # of tokens that are not visible -inf or NaN: no mass
    return BlockLaws(keys, exp2_mass(t).sum(-1), exp2_moment(t).sum(-1) if moment else None)


def sum_block_laws(blocks: BlockLaws, scale: Tensor | None) -> Kept:
    """The law of each row ``[R]`` from those of its blocks; arguments as ``law_in_blocks``."""
    # A product of a block's weight and its mass is rounded to float64 and truncated to units of 2**-40, so sums do not
    # depend on their order.
    row_max = largest_logit(blocks.keys)
    cut = Cut(row_max, torch.full_like(row_max, LOG2_E) if scale is None else scale, None, None, None)
    t = scaled_logits(key_float(blocks.keys), cut.row_max[:, None], cut.scale[:, None])
    weights, masses = exp2_scaled(t).to(torch.float64) * _UNIT, blocks.masses.to(torch.float64)
    moment = None
    if blocks.moments is not None:
        below = -clamped(t).to(torch.float64)
        own = (weights * blocks.moments.to(torch.float64)).to(torch.int64)
        moment = (own + (weights * masses * below).to(torch.int64)).sum(-1)
    return Kept(cut, (weights * masses).to(torch.int64).sum(-1), moment, None, None)


class Asked(NamedTuple):
    """The tokens of each row that logprobs are asked of; None where ``Logprobs`` does not name them."""

    token_ids: Tensor
    """int64 ``[R]``, the row's token; -1 for none."""
    given: Tensor | None
    """int64 ``[R, n]``."""
    before: Tensor | None
    """int32 ``[R, B]``, how many tokens of each block stand before the row's token, from ``tokens_before``."""


@holds(tokens=True)
def tokens_before(logits: AnyLogits, token_ids: Tensor, *, vocab_size: int, block: int) -> Tensor:
    """How many tokens of each block of a row stand before a token in the order: int32 ``[R, B]``."""
    # For -1, which is no token, the result has no meaning.
    x, ids = logit_blocks(logits, vocab_size, block)
    before = last_before_winner(logits, token_ids, vocab_size=vocab_size)
    stands_before = reaches(x, ids, Last(*(expand_to(field, x) for field in before)))
    return stands_before.to(torch.int32).sum(-1, dtype=torch.int32)


def logprobs_from_kept(
    logits: AnyLogits,
    row_slots: RowSlots,
    law: Kept,
    kept: Kept | None,
    asked: Asked,
    *,
    vocab_size: int,
    entropy: bool,
    num_kept: bool,
    boundary: bool,
) -> LogprobOutputs:
    """The logprobs of each row ``[R]`` from the sums of its law, but for those of ``top_logprobs``."""
    live = idle_status(row_slots.table, row_slots.slots) == 0
    x = gather_logits(logits, asked.token_ids[:, None], vocab_size)
    given = None if asked.given is None else gather_logits(logits, asked.given, vocab_size)
    of_law = logprobs_from_logits(x, given, row_slots, law, asked, entropy=entropy)
    return LogprobOutputs(
        *of_law[:-2],
        num_kept=_num_kept(kept, live) if num_kept else None,
        boundary=_boundary(kept, row_slots, vocab_size) if boundary else None,
    )


def logprobs_from_logits(
    x: Tensor, given: Tensor | None, row_slots: RowSlots, law: Kept, asked: Asked, *, entropy: bool
) -> LogprobOutputs:
    """``logprobs_from_kept`` of the law alone, from the logits of the rows' tokens ``[R, 1]`` and of given ones."""
    live = idle_status(row_slots.table, row_slots.slots) == 0
    ids = asked.token_ids[:, None]
    x = torch.where(live[:, None] & (ids >= 0), x, _NONE)
    if given is None or asked.given is None:
        given = None
    else:
        given = _logprobs(torch.where(live[:, None], given, _NONE), asked.given, law)
    return LogprobOutputs(
        token=_logprobs(x, ids, law)[:, 0],
        rank=None if asked.before is None else _rank(x[:, 0], asked.before),
        given=given,
        entropy=_entropy(law, live) if entropy else None,
    )


def top_logprobs(row_slots: RowSlots, law: Kept, ordered: Tensor, *, top: int) -> tuple[Tensor, Tensor]:
    """Ids, int64, and logprobs, float32, of the first tokens of the order: ``[R, top]`` each."""
    # This is a stage of its own: its second kernel reads nothing that the first one wrote, so does not wait, and may
    # not begin early; that of logprobs_from_kept may.
    first = ordered[:, :top]
    live = idle_status(row_slots.table, row_slots.slots) == 0
    x = torch.where(live[:, None], key_float(packed_key(first)), _NONE)
    ids = packed_id(first)
    logprobs, kept_ids = _logprobs(x, ids, law), torch.where(_keeps(x, ids, law), ids, -1)
    missing = top - first.shape[1]  # of a vocabulary of fewer tokens
    return F.pad(kept_ids, (0, missing), value=-1), F.pad(logprobs, (0, missing), value=_NONE)


def _logprobs(x: Tensor, ids: Tensor, law: Kept) -> Tensor:
    """Logprobs of tokens, float32 ``[R, m]``; -inf of masked and dropped tokens, and below the least float32."""
    # Beside a +inf token every finite logit has probability 0.
    row_max, scale = law.cut.row_max[:, None], law.cut.scale[:, None]
    t = (x.to(torch.float64) - row_max.clamp(-FLOAT_MAX, FLOAT_MAX).to(torch.float64)) * scale.to(torch.float64)
    t = torch.where(t < 0.0, t, 0.0)
    is_likely = (x == row_max) | (row_max < float("inf"))
    # 0.0 - ... is never -0, though LLVM's minimum makes t -0 for a tie of zeros
    logprobs = 0.0 - LN2 * (_log2_total(law)[:, None] - t)
    return torch.where(_keeps(x, ids, law) & is_likely, logprobs, _NONE).to(torch.float32)


def _keeps(x: Tensor, ids: Tensor, law: Kept) -> Tensor:
    """Mask of the tokens that the law keeps, bool ``[R, m]``; arguments as ``_logprobs``."""
    t = scaled_logits(x, law.cut.row_max[:, None], law.cut.scale[:, None])
    kept = passes(x, ids.to(torch.int32), t, law.cut)
    return is_visible(x) if kept is None else is_visible(x) & kept


def _log2_total(law: Kept) -> Tensor:
    """The base-2 logarithm of the total, 0 for the mass of the likeliest token: float64 ``[R]``; a number for 0."""
    return log2(law.total.to(torch.float64) * _UNIT)


def _rank(x: Tensor, before: Tensor) -> Tensor:
    """The place of each row's token in the order, int64 ``[R]``, from its logit ``[R]`` and counts ``[R, B]``."""
    return torch.where(is_visible(x), before.sum(-1, dtype=torch.int64) + 1, -1)


def _entropy(law: Kept, live: Tensor) -> Tensor:
    """The entropy of each law in nats, float32 ``[R]``: ``ln(2) * (log2(total) + moment / total)``."""
    assert law.moment is not None
    mean = law.moment.to(torch.float64) * reciprocal(law.total.to(torch.float64))
    entropy = LN2 * (_log2_total(law) + mean)
    return torch.where(live & (law.total > 0), entropy, _NONE).to(torch.float32)


def _num_kept(kept: Kept | None, live: Tensor) -> Tensor:
    """The number of kept tokens, int64 ``[R]``."""
    assert kept is not None
    assert kept.num_kept is not None
    return torch.where(live & is_visible(kept.cut.row_max), kept.num_kept, -1)


def _boundary(kept: Kept | None, row_slots: RowSlots, vocab_size: int) -> Tensor:
    """The last kept token, packed, int64 ``[R]``; ``KEEP_ALL`` for requests without filters."""
    assert kept is not None
    rows = gather_rows(row_slots, stream=TARGET)  # the noise is not used
    off = (rows.top_k >= vocab_size) & (rows.top_p >= 1.0) & (rows.min_p_log2 == _NONE) & (rows.noise_mask != 0)
    last = kept.last
    if kept.cut.only is not None:
        first = pack(order_key(kept.cut.row_max), kept.cut.only)
        last = torch.where(rows.noise_mask == 0, first, KEEP_ALL if last is None else last)
    assert last is not None
    last = torch.where(off, KEEP_ALL, last)
    return torch.where(rows.live & is_visible(kept.cut.row_max), last, -1)
