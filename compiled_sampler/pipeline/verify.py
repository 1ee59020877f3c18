"""Verification of drafts: its stages for each rule, and for each kind of proposal.

It shares the stages of sampling: what a filter is there, it is here.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from compiled_sampler.batch import SampleOutputs, VerifyInputs, VerifyOutputs
from compiled_sampler.core.noise import TARGET
from compiled_sampler.core.rows import Entries
from compiled_sampler.core.stage import Run, both, call
from compiled_sampler.modes import Mode
from compiled_sampler.passes.law import AnyLaw, probability_blocks
from compiled_sampler.passes.maxima import order_maxima_of
from compiled_sampler.pipeline.edits import edited_logits
from compiled_sampler.pipeline.law import row_law, unfiltered_law
from compiled_sampler.pipeline.sample import draw_tokens
from compiled_sampler.pipeline.schedule import Edit, Schedule, schedule_for
from compiled_sampler.speculation.acceptance import (
    Judged,
    Proposal,
    carried_ratio,
    judge_drafts,
    judge_prefixes,
    settle,
)
from compiled_sampler.speculation.emission import emit_matches
from compiled_sampler.speculation.residual import (
    draw_from_final_blocks,
    emit_from_final_blocks,
    emit_from_final_candidates,
    every_row,
    final_winners,
    residual_of_blocks,
    residual_of_candidates,
)
from compiled_sampler.speculation.row_layout import Layout, Trials, proposal_slots, row_layout


class _Schedules(NamedTuple):
    """The schedules of the three sizes of batches that a verification reads."""

    rows: Schedule
    """Of the logits' rows R."""
    drafts: Schedule
    """Of as many rows as there are drafts, D: those that judge one, and those that the drafts were drawn from."""
    requests: Schedule
    """Of the final rows, N."""


class _Target(NamedTuple):
    """The rows of a verification and the law that their tokens follow."""

    logits: Tensor
    """``[R, >=V]`` after edits, or probabilities."""
    layout: Layout
    law: AnyLaw
    ordered: Tensor | None
    """int64 ``[R, C]``, the candidates where these hold all tokens that the filters keep; else None."""


def verify_step(mode: Mode, inputs: VerifyInputs, run: Run = call, edits: tuple[Edit, ...] = ()) -> VerifyOutputs:
    """Tokens, counts and status of each request: its drafts as far as the mode's rule accepts them, and one token more.

    Args:
        mode: from ``modes.verifying``; it must cover every request, also as the parameters of its draft logits.
        inputs: logits, drafts, what these were drawn from, positions and the slot table.
        run: how a stage is run; the result does not depend on it.
        edits: of the logits, in their order; not of probabilities.
    """
    slots, drafts = inputs.slots, inputs.draft_token_ids
    schedules, vocab = _schedules(mode, inputs, edits), {"vocab_size": mode.vocab_size}
    if mode.rule == "match" or not mode.draws:  # greedy: whatever the rule, a draft is the first token or it is not
        layout, draws = _target_draws(schedules, inputs, run)
        return run(emit_matches, draws, layout, slots, drafts, **vocab)
    requests = Entries(inputs.table, slots, inputs.positions)
    (logits, layout, law, ordered), proposal = _laws(schedules, inputs, run)
    by_draft, rule = _has_law_by_draft(mode), {"filters_min_p": mode.filters_min_p, "rates": mode.rule == "block"}
    judged = run(judge_drafts, logits, law, proposal, layout, inputs.table, **vocab, **rule, by_draft=by_draft)
    values, carry, prefixes = proposal.values, None, None
    if judged.ratio is not None:
        carry = run(carried_ratio, judged.ratio, layout, drafts)
        sums = _residual_sums(schedules.rows, logits, ordered, values, judged, carry, layout, run)
        prefixes = run(judge_prefixes, sums, carry, layout, inputs.table)
    final = run(settle, judged, carry, prefixes, layout, requests, drafts, **vocab, by_draft=by_draft)
    if ordered is not None:
        return run(emit_from_final_candidates, ordered, values, final, slots, drafts, **vocab)
    winners = run(final_winners, logits, values, final, **_final_pass(schedules.requests))
    return run(emit_from_final_blocks, *winners, final, slots, drafts)


def _schedules(mode: Mode, inputs: VerifyInputs, edits: tuple[Edit, ...]) -> _Schedules:
    sizes = inputs.logits.shape[0], _num_trials(mode, inputs), inputs.slots.shape[0]
    return _Schedules(*(schedule_for(mode, size, inputs.logits.device, edits) for size in sizes))


def _num_trials(mode: Mode, inputs: VerifyInputs) -> int:
    """D: rows of the proposals or, for one-hot drafts, as many as could be there, at least one."""
    values = _proposed(mode, inputs)
    return max(inputs.draft_token_ids.numel(), 1) if values is None else values.shape[0]


def _final_pass(schedule: Schedule) -> dict[str, int]:
    return {**schedule.final.blocks, "by_bits": schedule.final.by_bits}


def _laws(schedules: _Schedules, inputs: VerifyInputs, run: Run) -> tuple[_Target, Proposal]:
    """The law of the target and the proposal; neither needs the other, so they may overlap."""
    mode = schedules.rows.mode
    target = _judging_target if _has_law_by_draft(mode) else _target
    values = _proposed(mode, inputs)
    if values is None:
        return target(schedules, inputs, run), Proposal(None, None)
    chains = (
        lambda: target(schedules, inputs, run),
        lambda: _proposal(schedules.drafts, inputs, values, run),
    )
    return both(run, inputs.logits.device, *chains)


def _has_law_by_draft(mode: Mode) -> bool:
    """Whether only rows that judge a draft need a law: the last row of a request is then drawn from as it is."""
    unfiltered = not (mode.from_probabilities or mode.searches or mode.capacity or mode.filters_min_p)
    return mode.rule == "rejection" and unfiltered


def _target(schedules: _Schedules, inputs: VerifyInputs, run: Run) -> _Target:
    """The law of every row, of probabilities or behind top-k and top-p."""
    schedule, layout = schedules.rows, _layout(schedules.rows.mode, inputs, run)
    if schedule.mode.from_probabilities:
        order = schedule.order
        law = run(probability_blocks, inputs.logits, **order.blocks, looks=True, by_bits=order.by_bits)
        return _Target(inputs.logits, layout, law, None)
    entries = _entries(layout, inputs)
    logits = edited_logits(schedule, inputs.logits, entries, run)
    return _Target(logits, layout, *row_law(schedule, logits, entries, run))


def _judging_target(schedules: _Schedules, inputs: VerifyInputs, run: Run) -> _Target:
    """The law of the rows that judge a draft, without filters."""
    schedule, layout = schedules.drafts, _layout(schedules.rows.mode, inputs, run)
    logits = edited_logits(schedules.rows, inputs.logits, _entries(layout, inputs), run)
    trials = layout.trials
    judging = Entries(inputs.table, trials.slots, trials.positions)
    blocks = run(order_maxima_of, logits, trials.row_ids, **schedule.order.reduction)
    law = unfiltered_law(schedule, logits, blocks, judging, trials.row_ids, run)
    return _Target(logits, layout, law, None)


def _layout(mode: Mode, inputs: VerifyInputs, run: Run) -> Layout:
    logits, slots, positions, num_drafts, drafts, *_ = inputs
    layout = run(row_layout, logits, slots, positions, num_drafts, drafts, vocab_size=mode.vocab_size)
    count = _num_trials(mode, inputs)
    return layout._replace(trials=Trials(*(each[:count] for each in layout.trials)))


def _entries(layout: Layout, inputs: VerifyInputs) -> Entries:
    return Entries(inputs.table, layout.slots, layout.positions)


def _proposed(mode: Mode, inputs: VerifyInputs) -> Tensor | None:
    """What the drafts were drawn from ``[D, >=V]``, without rows that no draft can have; None for one-hot drafts."""
    if mode.drafts == "one_hot" or inputs.proposals is None or not inputs.proposals.shape[0]:
        return None
    return inputs.proposals[: inputs.logits.shape[0]]


def _proposal(schedule: Schedule, inputs: VerifyInputs, values: Tensor, run: Run) -> Proposal:
    """The law of the drafts: draft logits go through the edits and filters that the target goes through."""
    mode, order = schedule.mode, schedule.order
    if mode.drafts == "probabilities":
        return Proposal(values, run(probability_blocks, values, **order.blocks, looks=False, by_bits=order.by_bits))
    slots = run(proposal_slots, values, inputs.slots, inputs.num_drafts)
    entries = Entries(inputs.table, slots, slots)  # positions matter to noise alone
    logits = edited_logits(schedule, values, entries, run)
    return Proposal(logits, row_law(schedule, logits, entries, run)[0])


def _target_draws(schedules: _Schedules, inputs: VerifyInputs, run: Run) -> tuple[Layout, SampleOutputs]:
    """The target's own token of every row, as the sampler draws it."""
    schedule = schedules.rows
    if not schedule.mode.from_probabilities:
        layout = _layout(schedule.mode, inputs, run)
        entries = _entries(layout, inputs)
        logits = edited_logits(schedule, inputs.logits, entries, run)
        return layout, draw_tokens(schedule, logits, entries, TARGET, run)
    probabilities, layout, law, _ = _target(schedules, inputs, run)
    final = run(every_row, law, layout, inputs.table)
    winners = run(final_winners, probabilities, None, final, **_final_pass(schedule))
    return layout, run(draw_from_final_blocks, *winners, final)


def _residual_sums(
    schedule: Schedule,
    logits: Tensor,
    ordered: Tensor | None,
    values: Tensor | None,
    judged: Judged,
    carry: Tensor,
    layout: Layout,
    run: Run,
) -> Tensor:
    """Parts of the residual sum of every row."""
    if ordered is not None:
        vocab_size = schedule.mode.vocab_size
        return run(residual_of_candidates, ordered, values, judged, carry, layout, vocab_size=vocab_size)
    return run(residual_of_blocks, logits, values, judged, carry, layout, **schedule.mass.blocks)
