"""Acceptance of drafts: three rules, in integers and exactly rounded float64.

- ``match``: a draft is accepted while it equals the target's own draw, so the stream is the one without drafts.
- ``rejection`` (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): with probability ``min(1, p / q)``.
- ``block`` (Sun et al., arXiv 2403.10444): the same law of tokens, tested on whole prefixes; accepts more drafts.

With a weight w of W for the target and m of M for the draft, ``u < p / q`` is ``u * (m * W) < w * M``, strict and with
u > 0: w = 0 is never accepted, and ``p >= q > 0`` always is, because u is at most ``1 - 2**-33`` while the products are
rounded by ``2**-53``. A draft with m = 0 was not drawn from q: it ends the block, as one that is no token id does, and
the target's own token takes its place, whose law is the target's however the draft came about.

Uniform numbers are keyed by the position of the block's first token and the offset in it: every call has numbers of its
own, which ``block`` needs, since it reads numbers beyond the tokens that it emits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.batch import AnyTable, DraftTable
from compiled_sampler.core.arithmetic import reciprocal
from compiled_sampler.core.noise import ACCEPT, noise_keys, uniform
from compiled_sampler.core.rows import take
from compiled_sampler.passes.blocks import gather_logits, gather_logits_of
from compiled_sampler.passes.kept import weight_units
from compiled_sampler.passes.law import AnyLaw, Law, sum_law
from compiled_sampler.speculation.row_layout import CachedRows, Layout

UNIT = 2.0**50
"""Fixed-point unit of residual sums: truncating V terms to it loses less than ``V * 2**-50`` of the mass."""

_LARGEST_RATIO = 2.0**60  # a finite stand-in for infinity, so that 0 times it is 0


class Proposal(NamedTuple):
    """The proposals that drafts were drawn from, one row per draft; both fields are None for one-hot drafts."""

    values: Tensor | CachedRows | None
    """Logits after edits, or probabilities, ``[D, >=V]``; or where a draft table holds such logits."""
    law: AnyLaw | None  # the law of the drafts [D]


class Judged(NamedTuple):
    """The test of each draft, and the laws that it compares."""

    accepted: Tensor  # bool [D], true if the draft passes the test of its own position
    ratio: Tensor | None  # float64 [D], p / q of the draft, 0 for no draft; None if the rule does not use ratios
    is_possible: Tensor
    """bool ``[D]``, true if the proposal gives the draft a weight above 0; on logits of greedy requests always."""
    law: Law  # of the target [R], or [D] if only the rows that judge a draft have a law
    proposed: Law | None  # of the proposals [D]; None for one-hot drafts


def proposal_law(law: Law | None, drafts: Tensor) -> Law:
    """The law ``[R]`` that each draft was drawn from; the total of a row without mass counts as 1."""
    if law is not None:
        return Law(law.cut, law.total.clamp(min=1), law.inverse, law.status)
    one = torch.ones_like(drafts)
    return Law(None, one, one.to(torch.float64), one.to(torch.int32))


def proposal_weight(values: Tensor | None, ids: Tensor, drafts: Tensor, law: Law | None) -> Tensor:
    """The weight of tokens in the law that the drafts were drawn from: float32, the shape of ``values`` or ``ids``."""
    if law is None or values is None:
        return (ids == drafts.to(torch.int32)).to(torch.float32)
    return weight_units(values, ids, law.cut)


def proposed_at(values: Tensor | CachedRows | None, index: Tensor, ids: Tensor, vocab_size: int) -> Tensor | None:
    """Logits or probabilities of ``ids`` ``[R, n]`` in the proposals' rows ``index``, ``[R, n]``; None if one-hot."""
    return None if values is None else gather_logits_of(*rows_at(values, index), ids, vocab_size)


def rows_at(values: Tensor | CachedRows, index: Tensor) -> tuple[Tensor | DraftTable, Tensor]:
    """The rows of the proposals ``index``, int64 ``[n]``: a tensor or a draft table, and int64 ``[n]`` rows of it."""
    if isinstance(values, Tensor):
        return values, in_range(index, values)
    return values.table, values.row_ids[in_range(index, values.row_ids)]


def drafted_at(values: Tensor | CachedRows, drafts: Tensor, vocab_size: int) -> Tensor:
    """Logits or probabilities, float32 ``[D, n]``, of the tokens ``drafts``, int64 ``[D, n]``, of each proposal."""
    if isinstance(values, Tensor):
        return gather_logits(values, drafts, vocab_size)
    return gather_logits_of(values.table, values.row_ids, drafts, vocab_size)


def proposed_of(proposed: Law | None, index: Tensor) -> Law | None:
    """The laws of the proposals' rows ``index``, int64 ``[R]``; None for one-hot drafts."""
    law: Law | None = None if proposed is None else take(proposed, in_range(index, proposed.total))
    return law


def in_range(index: Tensor, values: Tensor) -> Tensor:
    """``index`` clamped to the rows of ``values``; no caller uses the result of a row whose index was out of range."""
    return index.clamp(0, values.shape[0] - 1)


def accept_number(
    table: AnyTable, slots: Tensor, positions: Tensor, offsets: Tensor, siblings: Tensor | None = None
) -> Tensor:
    """The uniform numbers that drafts are tested with, float64 ``[n]``, keyed by each draft's offset in its block."""
    # siblings: how many siblings of a tree stand before each draft; None for 0.
    return uniform(noise_keys(table.seeds[slots.clamp(min=0)], positions, ACCEPT, offsets, siblings))


class Weighed(NamedTuple):
    """Drafts in the two laws that their tests compare."""

    w: Tensor  # float32 [D], the weight in the target's law
    m: Tensor  # float32 [D], the weight in the law that the draft was drawn from
    own: Law  # of the target [D]
    q: Law  # of the proposals [D]
    is_possible: Tensor  # bool [D], see Judged

    @property
    def mine(self) -> Tensor:
        """``w * M``, float64 ``[D]``; M is the proposal's total."""
        return self.w.to(torch.float64) * self.q.total.to(torch.float64)

    @property
    def theirs(self) -> Tensor:
        """``m * W``, float64 ``[D]``; W is the target's total."""
        return self.m.to(torch.float64) * self.own.total.to(torch.float64)


def weighed_drafts(
    logits: Tensor, own: Law, proposed: Law | None, values: Tensor | CachedRows | None, layout: Layout, table: AnyTable,
    *, vocab_size: int,
) -> Weighed:  # fmt: skip
    """The weights of every draft ``[D]`` in the laws ``own`` of the rows that judge them, and ``proposed``."""
    trials = layout.trials
    drafts = trials.drafts
    draft = drafts.clamp(min=0)[:, None]
    ids = draft.to(torch.int32)
    w = weight_units(gather_logits_of(logits, trials.row_ids, draft, vocab_size), ids, own.cut)[:, 0]
    proposed_values = None if values is None else drafted_at(values, draft, vocab_size)
    m = proposal_weight(proposed_values, ids, draft, proposed)[:, 0]
    possible = m > 0.0
    if own.cut is not None:  # a greedy request accepts its own token, whatever the proposals: as without a batch
        possible = possible | (table.noise_mask[trials.slots.clamp(min=0)] == 0)
    return Weighed(w, m, own, proposal_law(proposed, drafts), possible)


def judge_drafts(
    logits: Tensor,
    law: AnyLaw,
    proposal: Proposal,
    layout: Layout,
    table: AnyTable,
    *,
    vocab_size: int,
    filters_min_p: bool,
    by_draft: bool,
    rates: bool,
) -> Judged:
    """The test of every draft ``[D]``, by the ratio of the target's law to the proposal's, and both laws."""
    # by_draft: whether law has one entry per draft [D] instead of one per row [R].
    law = sum_law(law, filters_min_p=filters_min_p)
    proposed = None if proposal.law is None else sum_law(proposal.law, filters_min_p=filters_min_p)
    trials = layout.trials
    own = law if by_draft else take(law, trials.row_ids)
    weighed = weighed_drafts(logits, own, proposed, proposal.values, layout, table, vocab_size=vocab_size)
    mine, theirs = weighed.mine, weighed.theirs
    exists = (trials.drafts >= 0) & weighed.is_possible & (mine > 0.0)
    u = accept_number(table, trials.slots, trials.positions, trials.offsets)
    ratio = torch.where(exists, draft_ratio(mine, theirs), 0.0) if rates else None
    return Judged(exists & (u * theirs < mine), ratio, weighed.is_possible, law, proposed)


def draft_ratio(mine: Tensor, theirs: Tensor) -> Tensor:
    """``p / q`` of drafts, float64, at most ``_LARGEST_RATIO``, and at least 1 exactly where ``p >= q``."""
    ratio = torch.where(theirs > 0.0, mine * reciprocal(theirs), _LARGEST_RATIO).clamp(max=_LARGEST_RATIO)
    return torch.where(mine >= theirs, ratio.clamp(min=1.0), ratio)


def carried_ratio(ratio: Tensor, layout: Layout, draft_token_ids: Tensor) -> Tensor:
    """The carry of ``block`` before each row, float64 ``[R]``: ``p = min(1, p * ratio)`` over the earlier drafts."""
    first_drafts = layout.proposals - layout.offsets
    carry = torch.ones_like(layout.offsets, dtype=torch.float64)
    for offset in range(draft_token_ids.shape[1]):
        earlier = ratio[in_range(first_drafts + offset, ratio)]
        carry = torch.where(layout.offsets > offset, (carry * earlier).clamp(max=1.0), carry)
    return carry


def judge_prefixes(sums: Tensor, carry: Tensor, is_possible: Tensor, layout: Layout, table: AnyTable) -> Tensor:
    """Whether ``block`` accepts all drafts before a row if it accepts no longer prefix: bool ``[R]``."""
    # The probability is S / (S + 1 - p) with the residual sum S = sum(relu(p * target - proposal)) of the row, and p
    # for the row after the last draft, or before one that was not drawn from its proposal.
    u = accept_number(table, layout.slots, layout.positions - 1, layout.offsets - 1)  # of the draft before the row
    residual = sums.sum(-1).to(torch.float64)
    inside = u * (residual + (1.0 - carry) * UNIT) < residual
    return (carry >= 1.0) | torch.where(rejectable(layout, is_possible) >= 0, inside, u < carry)


def rejectable(layout: Layout, is_possible: Tensor) -> Tensor:
    """The draft that each row judges, int64 ``[R]``; -1 where there is none that was drawn from its proposal."""
    return torch.where(is_possible[in_range(layout.proposals, is_possible)], layout.drafts, -1)
