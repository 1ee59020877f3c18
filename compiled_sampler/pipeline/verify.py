"""Verification of drafts: accepted drafts and one more token for every request, as the stages of each rule.

Request n has ``num_drafts[n] + 1`` consecutive rows of logits, one for each token that it may emit.

- ``match``, or any rule in the greedy mode: draw the target's own token in every row, as ``sample_step`` does, and
  accept drafts while they equal it.
- ``rejection`` and ``block``: compute the law, that is the distribution in integers, of the target and of the proposal;
  test each draft by the ratio of the two; then draw one token from the final row of each request: from the residual
  ``relu(p - q)`` if its draft was rejected, else from the target.

Filters and edits are the stages of sampling, so a filter means the same here as there.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from compiled_sampler.batch import DraftTable, SampleOutputs, VerifyInputs, VerifyOutputs
from compiled_sampler.core.noise import TARGET
from compiled_sampler.core.rows import RowSlots
from compiled_sampler.core.stage import Run, call, overlap
from compiled_sampler.modes import Mode
from compiled_sampler.passes.law import AnyLaw, Law, probability_blocks
from compiled_sampler.passes.maxima import order_maxima_of
from compiled_sampler.pipeline.chunks import in_chunks, in_eager_chunks
from compiled_sampler.pipeline.edits import edited_logits
from compiled_sampler.pipeline.law import row_law, unfiltered_law
from compiled_sampler.pipeline.sample import edit_and_draw
from compiled_sampler.pipeline.schedule import Edit, Schedule, schedule_for
from compiled_sampler.speculation.acceptance import (
    Judged,
    Proposal,
    carried_ratio,
    judge_drafts,
    judge_prefixes,
)
from compiled_sampler.speculation.cached_drafts import CachedRows, gathered, rows_of_drafts
from compiled_sampler.speculation.emission import emit_matches
from compiled_sampler.speculation.final_row import Final, final_rows
from compiled_sampler.speculation.residual import (
    Values,
    draw_from_final_blocks,
    emit_from_final_blocks,
    emit_from_final_candidates,
    every_row_final,
    final_winners,
    residual_of_blocks,
    residual_of_candidates,
)
from compiled_sampler.speculation.row_layout import Layout, Trials, proposal_slots, row_layout


class _Schedules(NamedTuple):
    """The schedules for the three batch sizes that a verification reads."""

    rows: Schedule
    """For the R rows of logits."""
    drafts: Schedule
    """For D rows, one per draft: the rows of the target that judge a draft, and the rows of the proposals."""
    requests: Schedule
    """For N rows, the final row of each request."""


class _Target(NamedTuple):
    """The rows of a verification and the law of the target."""

    logits: Tensor
    """``[R, >=V]``: logits after edits, or probabilities."""
    layout: Layout
    """Request, position and draft of each row ``[R]``."""
    law: AnyLaw
    """The target's law of each row ``[R]``, or of each draft ``[D]`` if ``_has_law_by_draft``."""
    ordered: Tensor | None
    """int64 ``[R, C]``, packed keys of the candidates if these hold every token that the filters keep; else None."""


def verify_step(mode: Mode, inputs: VerifyInputs, run: Run = call, edits: tuple[Edit, ...] = ()) -> VerifyOutputs:
    """Token ids ``[N, K+1]``, counts and status ``[N]`` of each request: its accepted drafts, then one more token.

    Args:
        mode: from ``modes.verifying``; it must cover every request, also as the parameters of its draft logits.
        inputs: logits, drafts, the proposals that these were drawn from, positions and the slot table.
        run: how a stage is run; the result does not depend on it.
        edits: stages that edit the logits, in their order; probabilities are not edited.
    """
    slots, drafts = inputs.slots, inputs.draft_token_ids
    schedules, vocab = _schedules(mode, inputs, edits), {"vocab_size": mode.vocab_size}
    if mode.rule == "match" or not mode.draws:  # greedy: any rule accepts only the first token
        layout, draws = _target_draws(schedules, inputs, run)
        return run(emit_matches, draws, layout, slots, drafts, **vocab)
    requests = RowSlots(inputs.table, slots, inputs.positions)
    (logits, layout, law, ordered), proposal = _laws(schedules, inputs, run)
    by_draft, rule = _has_law_by_draft(mode), {"filters_min_p": mode.filters_min_p, "rates": mode.rule == "block"}
    judged = run(judge_drafts, logits, law, proposal, layout, inputs.table, **vocab, **rule, by_draft=by_draft)
    values, carry, prefixes = proposal.values, None, None
    if judged.ratio is not None:
        carry = run(carried_ratio, judged.ratio, layout, drafts)
        sums = _residual_sums(schedules.rows, logits, ordered, values, judged, carry, layout, run)
        prefixes = run(judge_prefixes, sums, carry, judged.is_possible, layout, inputs.table)
    final = run(final_rows, judged, carry, prefixes, layout, requests, drafts, **vocab, by_draft=by_draft)
    if ordered is not None:
        return run(emit_from_final_candidates, ordered, values, final, slots, drafts, **vocab)
    winners = _final_winners(schedules.requests, logits, values, final, run)
    return run(emit_from_final_blocks, *winners, final, slots, drafts)


def _schedules(mode: Mode, inputs: VerifyInputs, edits: tuple[Edit, ...]) -> _Schedules:
    """The schedules for R rows, D drafts and N requests."""
    sizes = inputs.logits.shape[0], _num_trials(mode, inputs), inputs.slots.shape[0]
    return _Schedules(*(schedule_for(mode, size, inputs.logits.device, edits) for size in sizes))


def _num_trials(mode: Mode, inputs: VerifyInputs) -> int:
    """D: the number of rows of the proposals or, for one-hot drafts, of entries ``N * K``, at least one.

    A draft table has rows for all slots; of those read there are no more than entries, nor than rows of logits.
    """
    values = _proposed(mode, inputs)
    if isinstance(values, Tensor):
        return values.shape[0]
    entries = max(inputs.draft_token_ids.numel(), 1)
    return entries if values is None else min(entries, inputs.logits.shape[0])


def _laws(schedules: _Schedules, inputs: VerifyInputs, run: Run) -> tuple[_Target, Proposal]:
    """The target and the proposal, each with its law; the two are independent and may overlap on two streams."""
    mode = schedules.rows.mode
    target = _judging_target if _has_law_by_draft(mode) else _target
    values = _proposed(mode, inputs)
    if values is None:
        return target(schedules, inputs, run), Proposal(None, None)
    chains = (
        lambda: target(schedules, inputs, run),
        lambda: _proposal(schedules, inputs, values, run),
    )
    return overlap(run, inputs.logits.device, *chains)


def _has_law_by_draft(mode: Mode) -> bool:
    """Whether only the rows that judge a draft need a law: under the rule ``rejection``, on logits without filters.

    The row after all drafts of a request is then drawn from by a race over its logits, which needs no total.
    """
    unfiltered = not (mode.from_probabilities or mode.searches or mode.capacity or mode.filters_min_p)
    return mode.rule == "rejection" and unfiltered


def _target(schedules: _Schedules, inputs: VerifyInputs, run: Run) -> _Target:
    """The target's law of every row ``[R]``, from probabilities or from filtered logits."""
    schedule, layout = schedules.rows, _layout(schedules, inputs, run)
    if schedule.mode.from_probabilities:
        return _Target(inputs.logits, layout, _probability_law(schedule, inputs.logits, run, looks=True), None)
    row_slots = _entries(layout, inputs)
    logits = edited_logits(schedule, inputs.logits, row_slots, run)
    return _Target(logits, layout, *_row_law(schedule, logits, row_slots, run))


def _row_law(schedule: Schedule, logits: Tensor, row_slots: RowSlots, run: Run) -> tuple[AnyLaw, Tensor | None]:
    """``row_law``, in chunks of rows where there are many."""

    def of_chunk(logits: Tensor, row_slots: RowSlots) -> tuple[AnyLaw, Tensor | None]:
        return row_law(schedule, logits, row_slots, run)

    return in_chunks(schedule, run, of_chunk, logits, row_slots)


def _probability_law(schedule: Schedule, values: Tensor, run: Run, *, looks: bool) -> AnyLaw:
    """The law of rows of probabilities; ``looks`` as ``probability_blocks``."""
    static = {**schedule.order.blocks_by_bits, "looks": looks}
    return in_eager_chunks(schedule, run, lambda values: run(probability_blocks, values, **static), values)


def _judging_target(schedules: _Schedules, inputs: VerifyInputs, run: Run) -> _Target:
    """The target's law of the rows that judge a draft, ``[D]``, without filters."""
    schedule, layout = schedules.drafts, _layout(schedules, inputs, run)
    logits = edited_logits(schedules.rows, inputs.logits, _entries(layout, inputs), run)
    trials = layout.trials
    judging = RowSlots(inputs.table, trials.slots, trials.positions)

    def of_chunk(row_ids: Tensor, judging: RowSlots) -> AnyLaw:
        blocks = run(order_maxima_of, logits, row_ids, **schedule.order.reduction)
        return unfiltered_law(schedule, logits, blocks, judging, row_ids, run)

    return _Target(logits, layout, in_chunks(schedule, run, of_chunk, trials.row_ids, judging), None)


def _layout(schedules: _Schedules, inputs: VerifyInputs, run: Run) -> Layout:
    """Request, position and draft of each row ``[R]``, and the trials cut to the D drafts that there can be."""
    logits, slots, positions, num_drafts, drafts, *_ = inputs
    mode, searched = schedules.requests.mode, schedules.requests.searches_requests
    static = {"vocab_size": mode.vocab_size, "searched": searched}
    layout = run(row_layout, logits, slots, positions, num_drafts, drafts, **static)
    count = _num_trials(mode, inputs)
    return layout._replace(trials=Trials(*(each[:count] for each in layout.trials)))


def _entries(layout: Layout, inputs: VerifyInputs) -> RowSlots:
    """The slot and the position of each row ``[R]``."""
    return RowSlots(inputs.table, layout.slots, layout.positions)


def _proposed(mode: Mode, inputs: VerifyInputs) -> Tensor | DraftTable | None:
    """The proposals ``[D, >=V]`` that drafts were drawn from, or the table with them; None for one-hot drafts.

    There are no more drafts than rows of logits, so rows of the proposals beyond R belong to no draft and are cut.
    """
    values = inputs.proposals
    if not isinstance(values, Tensor):
        return values
    if mode.drafts == "one_hot" or not values.shape[0]:
        return None
    return values[: inputs.logits.shape[0]]


def _proposal(schedules: _Schedules, inputs: VerifyInputs, values: Tensor | DraftTable, run: Run) -> Proposal:
    """The proposals and their law ``[D]``; draft logits pass the same edits and filters as the target's logits."""
    schedule, searched = schedules.drafts, schedules.requests.searches_requests
    if isinstance(values, DraftTable):
        return _cached_proposal(schedules, inputs, values, run)
    if schedule.mode.drafts == "probabilities":
        return Proposal(values, _probability_law(schedule, values, run, looks=False))
    slots = run(proposal_slots, values, inputs.slots, inputs.num_drafts, searched=searched)
    row_slots = RowSlots(inputs.table, slots, slots)  # any positions: only noise depends on them, and a law has none
    logits = edited_logits(schedule, values, row_slots, run)
    return Proposal(logits, _row_law(schedule, logits, row_slots, run)[0])


def _cached_proposal(schedules: _Schedules, inputs: VerifyInputs, table: DraftTable, run: Run) -> Proposal:
    """The proposals in a draft table, and their law ``[D]``: read in place, but for the passes of top-k and top-p.

    These read all rows of a tensor, so a chunk's rows are copied for them; edited logits are copied all.
    """
    schedule, mode, count = schedules.drafts, schedules.drafts.mode, _num_trials(schedules.drafts.mode, inputs)
    requests, searched = (inputs.slots, inputs.num_drafts), schedules.requests.searches_requests
    found = run(rows_of_drafts, inputs.logits, *requests, table, searched=searched)
    slots, row_ids = (each[:count] for each in found)
    row_slots = RowSlots(inputs.table, slots, slots)  # any positions, as for ``_proposal``
    if schedule.edits:
        logits = edited_logits(schedule, run(gathered, table, row_ids), row_slots, run)
        return Proposal(logits, _row_law(schedule, logits, row_slots, run)[0])

    def of_chunk(row_ids: Tensor, row_slots: RowSlots) -> AnyLaw:
        if mode.searches or mode.capacity:
            return row_law(schedule, run(gathered, table, row_ids), row_slots, run)[0]
        blocks = run(order_maxima_of, table, row_ids, **schedule.order.reduction)
        return unfiltered_law(schedule, table, blocks, row_slots, row_ids, run)

    return Proposal(CachedRows(table, row_ids), in_chunks(schedule, run, of_chunk, row_ids, row_slots))


def _target_draws(schedules: _Schedules, inputs: VerifyInputs, run: Run) -> tuple[Layout, SampleOutputs]:
    """The layout, and the target's own token of every row ``[R]``, drawn as the sampler draws it."""
    schedule = schedules.rows
    if not schedule.mode.from_probabilities:
        layout = _layout(schedules, inputs, run)
        return layout, edit_and_draw(schedule, inputs.logits, _entries(layout, inputs), TARGET, run)
    probabilities, layout, law, _ = _target(schedules, inputs, run)
    final = run(every_row_final, law, layout, inputs.table)
    return layout, run(draw_from_final_blocks, *_final_winners(schedule, probabilities, None, final, run), final)


def _final_winners(schedule: Schedule, logits: Tensor, values: Values, final: Final, run: Run) -> tuple[Tensor, Tensor]:
    """The ``final_winners`` of the final rows ``[N]``."""
    static = schedule.final.blocks_by_bits
    return in_eager_chunks(schedule, run, lambda final: run(final_winners, logits, values, final, **static), final)


def _residual_sums(
    schedule: Schedule,
    logits: Tensor,
    ordered: Tensor | None,
    values: Values,
    judged: Judged,
    carry: Tensor,
    layout: Layout,
    run: Run,
) -> Tensor:
    """Parts of the residual sum of every row, int64 ``[R, n]``, in units of ``1 / UNIT``, for the rule ``block``."""
    if ordered is not None:
        vocab_size = schedule.mode.vocab_size
        return run(residual_of_candidates, ordered, values, judged, carry, layout, vocab_size=vocab_size)

    def of_chunk(logits: Tensor, law: Law, carry: Tensor, drafts: Tensor, proposals: Tensor) -> Tensor:
        rows = judged._replace(law=law), carry, layout._replace(drafts=drafts, proposals=proposals)
        return run(residual_of_blocks, logits, values, *rows, **schedule.mass.blocks)

    return in_eager_chunks(schedule, run, of_chunk, logits, judged.law, carry, layout.drafts, layout.proposals)
