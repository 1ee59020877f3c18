"""Acceptance of drafts: three rules, in integers and exactly rounded float64.

- ``match``: a draft is accepted while it equals the target's own draw, so the stream is the one without drafts.
- ``rejection`` (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): with probability ``min(1, p / q)``.
- ``block`` (Sun et al., arXiv 2403.10444): the same law of tokens, tested on whole prefixes; accepts more drafts.

With a weight w of W for the target and m of M for the draft, ``u < p / q`` is ``u * (m * W) < w * M``, strict and with
u > 0: w = 0 is never accepted, and ``p >= q`` always is, because u is at most ``1 - 2**-33`` while the products are
rounded by ``2**-53``. Uniform numbers are keyed by the position of the block's first token and the offset in it: every
call has numbers of its own, which ``block`` needs, since it reads numbers beyond the tokens that it emits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import RowStatus, SlotTable
from compiled_sampler.core.mass import reciprocal
from compiled_sampler.core.noise import ACCEPT, RESIDUAL, TARGET, noise_keys, uniform
from compiled_sampler.core.rows import RowParams, RowSlots, expand_to, gather_rows, take
from compiled_sampler.passes.blocks import gather_logits
from compiled_sampler.passes.law import AnyLaw, Law, sum_law, weight_units
from compiled_sampler.speculation.row_layout import Layout

UNIT = 2.0**50
"""Fixed-point unit of residual sums: truncating V terms to it loses less than ``V * 2**-50`` of the mass."""

_LARGEST_RATIO = 2.0**60  # a finite stand-in for infinity, so that 0 times it is 0


class Proposal(NamedTuple):
    """The proposals that drafts were drawn from, one row per draft; both fields are None for one-hot drafts."""

    values: Tensor | None
    """Logits after edits, or probabilities, ``[D, >=V]``."""
    law: AnyLaw | None
    """The law of the drafts ``[D]``."""


class Judged(NamedTuple):
    """The test of each draft, and the laws that it compares."""

    accepted: Tensor
    """bool ``[D]``, true if the draft passes the test of its own position."""
    ratio: Tensor | None
    """float64 ``[D]``, ``p / q`` of the draft, 0 for no draft; None if the rule does not use ratios."""
    is_proposed: Tensor
    """bool ``[D]``, true if the proposal gives the draft a weight above 0."""
    law: Law
    """Of the target ``[R]``, or ``[D]`` if only the rows that judge a draft have a law."""
    proposed: Law | None
    """Of the proposals ``[D]``; None for one-hot drafts."""


class Final(NamedTuple):
    """The one row of each request that a token is drawn from: of the first rejected draft, or after all drafts."""

    row_ids: Tensor
    """int64 ``[N]``, the index of the row."""
    num_accepted: Tensor
    """int64 ``[N]``, accepted drafts of the request."""
    num_matching: Tensor
    """int64 ``[N]``, see ``VerifyOutputs``."""
    drafts: Tensor
    """int64 ``[N]``, the rejected draft; -1 if none was rejected."""
    proposals: Tensor
    """int64 ``[N]``, the row of the proposals that the rejected draft was drawn from."""
    rows: RowParams
    """Parameters ``[N]``, with noise of RESIDUAL if the proposals hold the rejected draft, else of TARGET."""
    law: Law
    """Of the target ``[N]``."""
    proposed: Law | None
    """Of the proposal of the rejected draft ``[N]``; None for one-hot drafts."""
    carry: Tensor | None
    """float64 ``[N]``, see ``carried_ratio``; None for 1."""
    status: Tensor
    """int64 ``[N]``, the ``RowStatus`` flags that are known before the last token is drawn."""


def proposal_law(law: Law | None, drafts: Tensor) -> Law:
    """The law ``[R]`` that each draft was drawn from; a row of proposals without mass counts as a one-hot draft.

    Args:
        law: the law of the proposals, one row per draft; None for one-hot drafts.
        drafts: int64 ``[R]``.
    """
    one = torch.ones_like(drafts)
    if law is None:
        return Law(None, one, one.to(torch.float64), one.to(torch.int32))
    has_mass = law.total > 0
    total, inverse = torch.where(has_mass, law.total, 1), torch.where(has_mass, law.inverse, 1.0)
    return Law(law.cut, total, inverse, law.status)


def proposal_weight(values: Tensor | None, ids: Tensor, drafts: Tensor, law: Law | None) -> Tensor:
    """The weight of tokens in the law that the drafts were drawn from: float32, the shape of ``values`` or ``ids``.

    Args:
        values: float32 ``[R, ...]`` logits or probabilities of the proposals; None for one-hot drafts.
        ids: int32 token ids, broadcastable to ``[R, ...]``.
        drafts: int64 ``[R]``, broadcastable to ``ids``.
        law: the law of the proposals ``[R]``, before ``proposal_law``; None for one-hot drafts.
    """
    drafts = drafts.to(torch.int32)
    if law is None or values is None:
        return (ids == drafts).to(torch.float32)
    one_hot = torch.where(expand_to(law.total, values) > 0, -1, drafts)  # -1 is no token: the row has mass
    return torch.where(ids == one_hot, 1.0, weight_units(values, ids, law.cut))


def proposed_at(values: Tensor | None, index: Tensor, ids: Tensor, vocab_size: int) -> Tensor | None:
    """Logits or probabilities of ``ids`` ``[R, n]`` in the proposals' rows ``index``, ``[R, n]``; None if one-hot."""
    return None if values is None else gather_logits(values[in_range(index, values)], ids, vocab_size)


def proposed_of(proposed: Law | None, index: Tensor) -> Law | None:
    """The laws of the proposals' rows ``index``, int64 ``[R]``; None for one-hot drafts."""
    law: Law | None = None if proposed is None else take(proposed, in_range(index, proposed.total))
    return law


def in_range(index: Tensor, values: Tensor) -> Tensor:
    """``index`` clamped to the rows of ``values``; no caller uses the result of a row whose index was out of range."""
    return index.clamp(0, values.shape[0] - 1)


def accept_number(table: SlotTable, slots: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
    """The uniform numbers that drafts are tested with, float64 ``[n]``, keyed by each draft's offset in its block."""
    return uniform(noise_keys(table.seeds[slots.clamp(min=0)], positions, ACCEPT, offsets))


def judge_drafts(
    logits: Tensor,
    law: AnyLaw,
    proposal: Proposal,
    layout: Layout,
    table: SlotTable,
    *,
    vocab_size: int,
    filters_min_p: bool,
    by_draft: bool,
    rates: bool,
) -> Judged:
    """The test of every draft ``[D]``, by the ratio of the target's law to the proposal's, and both laws.

    Args:
        logits: ``[R, >=V]``, or probabilities.
        law: the law of the target; its sums are taken here, in the kernel that first needs them.
        proposal: ``[D]``, its law like ``law``.
        layout: the request, the position and the draft of each row ``[R]``.
        table: per-slot parameters.
        vocab_size: V.
        filters_min_p: whether the mode applies min_p.
        by_draft: whether ``law`` has one entry per draft ``[D]`` instead of one per row ``[R]``.
        rates: whether the rule needs the ratios, as ``block`` does.
    """
    law = sum_law(law, filters_min_p=filters_min_p)
    proposed = None if proposal.law is None else sum_law(proposal.law, filters_min_p=filters_min_p)
    trials = layout.trials
    drafts = trials.drafts
    own = law if by_draft else take(law, trials.row_ids)
    draft = drafts.clamp(min=0)[:, None]
    ids = draft.to(torch.int32)
    w = weight_units(gather_logits(logits[trials.row_ids], draft, vocab_size), ids, own.cut)[:, 0]
    proposed_values = None if proposal.values is None else gather_logits(proposal.values, draft, vocab_size)
    m = proposal_weight(proposed_values, ids, draft, proposed)[:, 0]
    q = proposal_law(proposed, drafts)
    mine = w.to(torch.float64) * q.total.to(torch.float64)
    theirs = m.to(torch.float64) * own.total.to(torch.float64)
    exists = (drafts >= 0) & (mine > 0.0)
    u = accept_number(table, trials.slots, trials.positions, trials.offsets)
    ratio = torch.where(exists, draft_ratio(mine, theirs), 0.0) if rates else None
    return Judged(exists & (u * theirs < mine), ratio, m > 0.0, law, proposed)


def draft_ratio(mine: Tensor, theirs: Tensor) -> Tensor:
    """``p / q`` of drafts, float64, at most ``_LARGEST_RATIO``, and at least 1 exactly where ``p >= q``."""
    ratio = torch.where(theirs > 0.0, mine * reciprocal(theirs), _LARGEST_RATIO).clamp(max=_LARGEST_RATIO)
    return torch.where(mine >= theirs, ratio.clamp(min=1.0), ratio)


def carried_ratio(ratio: Tensor, layout: Layout, draft_token_ids: Tensor) -> Tensor:
    """The carry of ``block`` before each row, float64 ``[R]``: ``p = min(1, p * ratio)`` over the earlier drafts.

    Args:
        ratio: float64 ``[D]``, the ratio of each draft.
        layout: the request, the position and the draft of each row ``[R]``.
        draft_token_ids: ``[N, K]``; only K is used.
    """
    first_drafts = layout.proposals - layout.offsets
    carry = torch.ones_like(layout.offsets, dtype=torch.float64)
    for offset in range(draft_token_ids.shape[1]):
        earlier = ratio[in_range(first_drafts + offset, ratio)]
        carry = torch.where(layout.offsets > offset, (carry * earlier).clamp(max=1.0), carry)
    return carry


def judge_prefixes(sums: Tensor, carry: Tensor, layout: Layout, table: SlotTable) -> Tensor:
    """Whether ``block`` accepts all drafts before a row if it accepts no longer prefix: bool ``[R]``.

    The probability is ``S / (S + 1 - p)`` with the residual sum ``S = sum(relu(p * target - proposal))`` of the row,
    and p for the row after the last draft.

    Args:
        sums: int64 ``[R, n]``, parts of the residual sum of each row in units of ``1 / UNIT``.
        carry: float64 ``[R]``, p.
        layout: the request, the position and the draft of each row ``[R]``.
        table: per-slot parameters.
    """
    u = accept_number(table, layout.slots, layout.positions - 1, layout.offsets - 1)  # of the draft before the row
    residual = sums.sum(-1).to(torch.float64)
    inside = u * (residual + (1.0 - carry) * UNIT) < residual
    return (carry >= 1.0) | torch.where(layout.drafts >= 0, inside, u < carry)


def final_rows(
    judged: Judged,
    carry: Tensor | None,
    prefixes: Tensor | None,
    layout: Layout,
    requests: RowSlots,
    draft_token_ids: Tensor,
    *,
    vocab_size: int,
    by_draft: bool,
) -> Final:
    """The final row of each request ``[N]``: how many drafts are accepted, and the inputs of the last token's draw.

    Args:
        judged: the test of each draft.
        carry: float64 ``[R]``, from ``carried_ratio``; None for 1.
        prefixes: bool ``[R]``, from ``judge_prefixes``; None for the rule ``rejection``.
        layout: the request, the position and the draft of each row ``[R]``.
        requests: ``[N]``, at the positions of the first tokens to draw.
        draft_token_ids: int64 ``[N, K]``.
        vocab_size: V.
        by_draft: whether the target's law has one entry per draft instead of one per row.
    """
    width = draft_token_ids.shape[1]
    num_accepted, num_matching = leading(judged.accepted, layout.first_drafts, layout, width)
    if prefixes is not None:
        passed, _ = window(prefixes, layout.first_rows, layout, width)
        steps = torch.arange(width + 1, device=passed.device)
        num_accepted = torch.where(passed & (steps <= layout.num_drafts[:, None]), steps, 0).amax(-1)
    index = in_range(layout.first_rows + num_accepted, layout.slots)
    rejected, proposals = layout.drafts[index], layout.first_drafts + num_accepted
    is_proposed = judged.is_proposed[in_range(proposals, judged.is_proposed)]
    stream = torch.where((rejected >= 0) & is_proposed, RESIDUAL, TARGET)
    flags, exists = window(judged.law.status, layout.first_drafts if by_draft else layout.first_rows, layout, width)
    if by_draft:  # a row without a draft has no law; its flags come with the last token
        flags = torch.where(exists, flags, 0)
    last = requests._replace(positions=requests.positions + num_accepted)
    return Final(
        row_ids=index,
        num_accepted=num_accepted,
        num_matching=num_matching,
        drafts=rejected,
        proposals=proposals,
        rows=gather_rows(last, stream=stream),
        law=take(judged.law, in_range(proposals, judged.law.total) if by_draft else index),
        proposed=proposed_of(judged.proposed, proposals),
        carry=take(carry, index),
        status=status_of(flags, num_accepted, layout, draft_token_ids, vocab_size),
    )


def status_of(flags: Tensor, num_accepted: Tensor, layout: Layout, draft_token_ids: Tensor, vocab_size: int) -> Tensor:
    """``RowStatus`` flags, int64 ``[N]``: ``flags`` ``[N, K+1]`` of the emitted rows, and of drafts out of range."""
    steps = torch.arange(flags.shape[1], device=flags.device)
    exists = steps < layout.num_drafts[:, None]
    drafts = F.pad(draft_token_ids, (0, 1))
    strange = exists & ((drafts < 0) | (drafts >= vocab_size))
    status = strange.sum(-1).clamp(max=1) * int(RowStatus.DRAFT_OUT_OF_RANGE)
    emitted = torch.where(steps <= num_accepted[:, None], flags, 0)
    for flag in (RowStatus.NAN_SEEN, RowStatus.POSITIVE_INFINITY):
        status = status | (emitted & int(flag)).amax(-1)
    return status


def window(values: Tensor, starts: Tensor, layout: Layout, width: int) -> tuple[Tensor, Tensor]:
    """``values`` at each request's start and the ``width`` after it, ``[N, width + 1]``; and where a draft stands."""
    steps = torch.arange(width + 1, device=values.device)
    return values[in_range(starts[:, None] + steps, values)], steps < layout.num_drafts[:, None]


def leading(accepted: Tensor, starts: Tensor, layout: Layout, width: int) -> tuple[Tensor, Tensor]:
    """The number of drafts accepted before the first rejection, and in all, int64 ``[N]``; arguments as ``window``."""
    each, exists = window(accepted, starts, layout, width)
    steps = torch.arange(width + 1, device=accepted.device)
    good = each & exists
    return torch.where(good, width + 1, steps).amin(-1), good.sum(-1)
