"""Which drafts are accepted: three rules, in integers and exactly rounded float64.

- ``match``: a draft is accepted while it equals the target's own draw, so the stream is the one without drafts.
- ``rejection`` (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): with probability ``min(1, p / q)``.
- ``block`` (Sun et al., arXiv 2403.10444): the same law, judged for whole prefixes, and more drafts accepted.

With a weight w of W for the target and m of M for the draft, ``u < p / q`` is ``u * (m * W) < w * M``, strict and with
u > 0: w = 0 is never accepted, and ``p >= q`` always is, because u is at most ``1 - 2**-33`` while the products are
rounded by ``2**-53``. Uniform numbers are keyed by the position of the block's first token and the offset in it: every
call has numbers of its own, which ``block`` needs, since it looks at numbers beyond the tokens that it emits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import (
    Entries,
    Final,
    Law,
    Layout,
    Proposal,
    RowStatus,
    SampleOutputs,
    SlotTable,
    Verdicts,
    VerifyOutputs,
)
from compiled_sampler.blocks import gather_logits
from compiled_sampler.law import law_of, reciprocal, weight_units
from compiled_sampler.noise import ACCEPT, RESIDUAL, TARGET, noise_keys, uniform
from compiled_sampler.rows import expand_to, gather_rows, take

UNIT = 2.0**50
"""Fixed-point unit of residual sums: cutting V terms to it loses less than ``V * 2**-50`` of the mass."""

_LARGEST_RATIO = 2.0**60  # stands for infinity, and keeps 0 times it 0


def proposal_law(law: Law | None, drafts: Tensor) -> Law:
    """The law that each draft was drawn from; a row without mass counts as a one-hot draft.

    Args:
        law: of the proposals, one row a draft; None for one-hot drafts.
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
        law: of the proposals ``[R]``, before ``proposal_law``; None for one-hot drafts.
    """
    drafts = drafts.to(torch.int32)
    if law is None or values is None:
        return (ids == drafts).to(torch.float32)
    one_hot = torch.where(expand_to(law.total, values) > 0, -1, drafts)  # where there is mass, no token
    return torch.where(ids == one_hot, 1.0, weight_units(values, ids, law.cut))


def proposal_rows(proposal: Proposal, index: Tensor) -> tuple[Tensor, Law | None]:
    """The rows of the proposals that rows name by ``index``, int64 ``[R]``, brought into range, and the laws there."""
    if proposal.values is None:
        return index, None
    index = index.clamp(0, proposal.values.shape[0] - 1)
    return index, take(proposal.law, index)


def proposed_at(proposal: Proposal, index: Tensor, ids: Tensor, vocab_size: int) -> Tensor | None:
    """The proposals' logits or probabilities in the named rows at token ids ``[R, n]``; None for one-hot drafts."""
    return None if proposal.values is None else gather_logits(proposal.values[index], ids, vocab_size)


def accept_number(table: SlotTable, layout: Layout, back: int) -> Tensor:
    """The uniform number that the draft ``back`` rows before each row is tested with: float64 ``[R]``."""
    seeds = table.seeds[layout.slots.clamp(min=0)]
    return uniform(noise_keys(seeds, layout.positions - back, ACCEPT, layout.offsets - back))


def judge_drafts(
    logits: Tensor, law: Law, proposal: Proposal, layout: Layout, table: SlotTable, *, vocab_size: int
) -> Verdicts:
    """Test every draft against the row that judges it, by the ratio of the two laws at that token.

    Args:
        logits: ``[R, >=V]``, or probabilities.
        law: of the target ``[R]``.
        proposal: ``[D]``.
        layout: of the rows.
        table: per-slot parameters.
        vocab_size: V.
    """
    law, draft = law_of(law), layout.drafts.clamp(min=0)[:, None]
    ids = draft.to(torch.int32)
    w = weight_units(gather_logits(logits, draft, vocab_size), ids, law.cut)[:, 0]
    index, proposed = proposal_rows(proposal, layout.proposals)
    m = proposal_weight(proposed_at(proposal, index, draft, vocab_size), ids, draft, proposed)[:, 0]
    q = proposal_law(proposed, layout.drafts)
    mine = w.to(torch.float64) * q.total.to(torch.float64)
    theirs = m.to(torch.float64) * law.total.to(torch.float64)
    exists = (layout.drafts >= 0) & (mine > 0.0)
    ratio = torch.where(theirs > 0.0, mine * reciprocal(theirs), _LARGEST_RATIO).clamp(max=_LARGEST_RATIO)
    ratio = torch.where(mine >= theirs, ratio.clamp(min=1.0), ratio)
    passed = accept_number(table, layout, 0) * theirs < mine
    return Verdicts(exists & passed, torch.where(exists, ratio, 0.0))


def carried_ratio(ratio: Tensor, layout: Layout, draft_token_ids: Tensor) -> Tensor:
    """The share of a block's law that all drafts before a row carry: ``p = min(1, p * ratio)``, float64 ``[R]``.

    Args:
        ratio: float64 ``[R]``, of each draft.
        layout: of the rows.
        draft_token_ids: ``[N, K]``; only K is used.
    """
    row = torch.arange(ratio.shape[0], device=ratio.device)
    carry = torch.ones_like(ratio)
    for offset in range(draft_token_ids.shape[1]):
        earlier = (row - layout.offsets + offset).clamp(0, ratio.shape[0] - 1)
        carry = torch.where(layout.offsets > offset, (carry * ratio[earlier]).clamp(max=1.0), carry)
    return carry


def judge_prefixes(sums: Tensor, carry: Tensor, layout: Layout, table: SlotTable) -> Tensor:
    """Whether ``block`` accepts all drafts before a row, if it accepts no longer prefix: bool ``[R]``.

    The probability is ``S / (S + 1 - p)`` with the residual sum ``S = sum(relu(p * target - proposal))`` of the row,
    and p behind the last draft.

    Args:
        sums: int64 ``[R, n]``, parts of the residual sum of each row in units of ``1 / UNIT``.
        carry: float64 ``[R]``, p.
        layout: of the rows.
        table: per-slot parameters.
    """
    u = accept_number(table, layout, 1)
    residual = sums.sum(-1).to(torch.float64)
    inside = u * (residual + (1.0 - carry) * UNIT) < residual
    return (carry >= 1.0) | torch.where(layout.drafts >= 0, inside, u < carry)


def settle(
    tests: Verdicts, prefixes: Tensor | None, layout: Layout, table: SlotTable, draft_token_ids: Tensor
) -> Final:
    """How many drafts of each request are accepted, and the row that its last token is drawn from.

    Args:
        tests: of each draft ``[R]``.
        prefixes: bool ``[R]``, from ``judge_prefixes``; None for the rule ``rejection``.
        layout: of the rows.
        table: per-slot parameters.
        draft_token_ids: ``[N, K]``; only K is used.
    """
    width = draft_token_ids.shape[1]
    num_accepted, num_matching = _leading(tests.accepted, layout, width)
    if prefixes is not None:
        passed, _ = window(prefixes, layout, width)
        steps = torch.arange(width + 1, device=passed.device)
        num_accepted = torch.where(passed & (steps <= layout.num_drafts[:, None]), steps, 0).amax(-1)
    index = (layout.first_rows + num_accepted).clamp(max=tests.accepted.shape[0] - 1)
    rejected = layout.drafts[index]
    stream = torch.where(rejected >= 0, RESIDUAL, TARGET)
    return Final(
        row_ids=index,
        num_accepted=num_accepted,
        num_matching=num_matching,
        drafts=rejected,
        proposals=layout.proposals[index],
        rows=gather_rows(Entries(table, layout.slots[index], layout.positions[index]), stream=stream),
    )


def emit_matches(
    draws: SampleOutputs, layout: Layout, slots: Tensor, draft_token_ids: Tensor, *, vocab_size: int
) -> VerifyOutputs:
    """The outputs of the rule ``match`` from the target's own draws ``[R]``; arguments as ``emit_final``."""
    accepted = (draws.token_ids == layout.drafts) & (layout.drafts >= 0)
    num_accepted, num_matching = _leading(accepted, layout, draft_token_ids.shape[1])
    index = (layout.first_rows + num_accepted).clamp(max=draws.status.shape[0] - 1)
    last = SampleOutputs(draws.token_ids[index], draws.status[index])
    flags, _ = window(draws.status, layout, draft_token_ids.shape[1])
    return _emit(last, flags, (num_accepted, num_matching), layout, slots, draft_token_ids, vocab_size)


def emit_final(
    last: SampleOutputs,
    law: Law,
    final: Final,
    layout: Layout,
    slots: Tensor,
    draft_token_ids: Tensor,
    *,
    vocab_size: int,
) -> VerifyOutputs:
    """Accepted drafts, then the last token, then -1.

    Args:
        last: the token drawn last and its status ``[N]``.
        law: of the target; its status holds the flags of rows.
        final: counts of each request ``[N]``.
        layout: of the rows.
        slots: int64 ``[N]``; -1 for padding.
        draft_token_ids: int64 ``[N, K]``.
        vocab_size: V.
    """
    flags, exists = window(law_of(law).status, layout, draft_token_ids.shape[1])
    if law.entry_ids is not None:  # a row without a draft has no law: its flags are the last token's
        flags = torch.where(exists, flags, 0)
    counts = (final.num_accepted, final.num_matching)
    return _emit(last, flags, counts, layout, slots, draft_token_ids, vocab_size)


def _emit(
    last: SampleOutputs,
    flags: Tensor,
    counts: tuple[Tensor, Tensor],
    layout: Layout,
    slots: Tensor,
    draft_token_ids: Tensor,
    vocab_size: int,
) -> VerifyOutputs:
    num_accepted, num_matching = counts
    width = draft_token_ids.shape[1]
    steps = torch.arange(width + 1, device=slots.device)
    emitted = steps <= num_accepted[:, None]
    drafts = F.pad(draft_token_ids, (0, 1), value=-1)
    tokens = torch.where(steps == num_accepted[:, None], last.token_ids[:, None], torch.where(emitted, drafts, -1))
    status = last.status | _out_of_range(layout, draft_token_ids, vocab_size)
    for flag in (RowStatus.NAN_SEEN, RowStatus.POSITIVE_INFINITY):
        status = status | torch.where(emitted, flags & int(flag), 0).amax(-1)
    live = slots >= 0
    return VerifyOutputs(
        torch.where(live[:, None], tokens, -1),
        torch.where(live, num_accepted + 1, -1),
        torch.where(live, num_accepted, -1),
        torch.where(live, num_matching, -1),
        torch.where(live, status, -1).to(torch.int32),
    )


def _out_of_range(layout: Layout, draft_token_ids: Tensor, vocab_size: int) -> Tensor:
    """``DRAFT_OUT_OF_RANGE`` where one of a request's drafts is no token id, else 0: int64 ``[N]``."""
    exists = torch.arange(draft_token_ids.shape[1], device=draft_token_ids.device) < layout.num_drafts[:, None]
    strange = exists & ((draft_token_ids < 0) | (draft_token_ids >= vocab_size))
    return strange.sum(-1).clamp(max=1) * int(RowStatus.DRAFT_OUT_OF_RANGE)


def window(values: Tensor, layout: Layout, width: int) -> tuple[Tensor, Tensor]:
    """The values of each request's rows ``[N, width + 1]`` from ``[R]``, and where a draft stands."""
    steps = torch.arange(width + 1, device=values.device)
    index = (layout.first_rows[:, None] + steps).clamp(max=values.shape[0] - 1)
    return values[index], steps < layout.num_drafts[:, None]


def _leading(accepted: Tensor, layout: Layout, width: int) -> tuple[Tensor, Tensor]:
    """Drafts accepted before the first that is not, and in all: int64 ``[N]`` each, from bool ``[R]``."""
    each, exists = window(accepted, layout, width)
    steps = torch.arange(width + 1, device=accepted.device)
    good = each & exists
    return torch.where(good, width + 1, steps).amin(-1), good.sum(-1)
