"""The whole algorithm: sampling, probabilities and verification as lists of stages, for each mode.

Every ``run(stage, ...)`` is a point where results are written to memory. Eager code calls the stage;
``lowering.CompiledStages`` compiles each stage apart; a CUDA graph then records all of them. The list, and so the
result, is the same. Sampling, drafting and verification share it: what a filter is in one, it is in the others.
"""

from __future__ import annotations

from torch import Tensor

from compiled_sampler.batch import (
    Entries,
    Law,
    Layout,
    ProbabilityOutputs,
    Proposal,
    SampleInputs,
    SampleOutputs,
    VerifyInputs,
    VerifyOutputs,
)
from compiled_sampler.blocks import order_maxima, order_maxima_of
from compiled_sampler.drawing import ORDER_BLOCK, candidates, cut_for, draw, first, search, threshold_of
from compiled_sampler.law import (
    block_law,
    candidate_law,
    probabilities,
    probability_blocks,
    searched_cut,
    weight_blocks,
    weight_blocks_of,
    whole_cut,
)
from compiled_sampler.layout import proposal_slots, row_layout
from compiled_sampler.modes import Mode, row_class
from compiled_sampler.noise import DRAFT, TARGET
from compiled_sampler.residual import (
    FINAL_BLOCK,
    draw_from_final_blocks,
    draw_from_final_candidates,
    emit_from_final_blocks,
    every_row,
    final_maxima,
    residual_of_blocks,
    residual_of_candidates,
)
from compiled_sampler.stage import Run, both, call
from compiled_sampler.verification import carried_ratio, emit_final, emit_matches, judge_drafts, judge_prefixes, settle


def sample_step(mode: Mode, inputs: SampleInputs, run: Run = call) -> SampleOutputs:
    """Draw one token for every row.

    Args:
        mode: what the step can do; it must cover the parameters of every row (``modes.uncovered``).
        inputs: logits, slots, positions and the slot table; with offsets it draws drafts on a stream of their own.
        run: how a stage is run; the result does not depend on it.

    Returns:
        Tokens and status ``[R]``.
    """
    logits, slots = inputs.logits, inputs.slots
    if not mode.draws:
        return first(mode, logits, slots, run)
    entries = Entries(inputs.table, slots, inputs.positions, inputs.offsets)
    return draw(mode, logits, entries, TARGET if inputs.offsets is None else DRAFT, run)


def probability_step(mode: Mode, inputs: SampleInputs, run: Run = call) -> ProbabilityOutputs:
    """The distribution that ``sample_step`` draws from, float32 ``[R, V]``; arguments as there."""
    law, _ = _law(mode, inputs.logits, Entries(inputs.table, inputs.slots, inputs.positions), run)
    return run(probabilities, inputs.logits, law, inputs.slots, vocab_size=mode.vocab_size)


def verify_step(mode: Mode, inputs: VerifyInputs, run: Run = call) -> VerifyOutputs:
    """Accept the drafts of every request as far as the mode's rule does, and draw one token more.

    Args:
        mode: from ``modes.verifying``; it must cover every request, also as the parameters of its draft logits.
        inputs: logits, drafts, what these were drawn from, positions and the slot table.
        run: how a stage is run; the result does not depend on it.

    Returns:
        Tokens, counts and status of each request.
    """
    logits, slots, drafts = inputs.logits, inputs.slots, inputs.draft_token_ids
    cut = {"vocab_size": mode.vocab_size}
    layout = run(row_layout, logits, slots, inputs.positions, inputs.num_drafts, drafts, **cut)
    if mode.rule == "match" or not mode.draws:  # greedy: whatever the rule, a draft is the first token or it is not
        draws = _target_draws(mode, inputs, layout, run)
        return run(emit_matches, draws, layout, slots, drafts, **cut)
    (law, ordered), proposal = _laws(mode, inputs, layout, run)
    tests = run(judge_drafts, logits, law, proposal, layout, inputs.table, **cut)
    carry, prefixes = None, None
    if mode.rule == "block":
        carry = run(carried_ratio, tests.ratio, layout, drafts)
        sums = _residual_sums(mode, logits, ordered, law, proposal, carry, layout, run)
        prefixes = run(judge_prefixes, sums, carry, layout, inputs.table)
    final = run(settle, tests, prefixes, layout, inputs.table, drafts)
    if ordered is not None:
        last = run(draw_from_final_candidates, ordered, law, proposal, carry, final, **cut)
        return run(emit_final, last, law, final, layout, slots, drafts, **cut)
    blocked = cut_for(mode, final.row_ids, FINAL_BLOCK)
    maxima = run(final_maxima, logits, law, proposal, carry, final, **blocked)
    return run(emit_from_final_blocks, logits, maxima, law, proposal, carry, final, layout, slots, drafts, **blocked)


def _law(
    mode: Mode, logits: Tensor, entries: Entries, run: Run, row_ids: Tensor | None = None
) -> tuple[Law, Tensor | None]:
    """The law of every row, and its candidates where these hold all that the filters keep.

    Args:
        mode: what it applies.
        logits: ``[R, >=V]``.
        entries: ``[R]``.
        run: how a stage is run.
        row_ids: int64 ``[n]``, the rows whose law is asked for, in a mode without filters; None for all.
    """
    if mode.searches:
        searched = search(mode, logits, entries, TARGET, run)
        magnitudes: Tensor = searched.magnitudes
        threshold = threshold_of(mode, logits, searched, run)
        cut = searched_cut(threshold, searched.row_max, searched.rows)  # no stage: it computes nothing
    elif mode.capacity:
        found = candidates(mode, logits, entries, mode.base_is_row, run)
        return run(candidate_law, found.ordered, found.magnitude, entries, found.masses), found.ordered
    else:
        ordered_by = cut_for(mode, logits, ORDER_BLOCK)
        if row_ids is None:
            blocks = run(order_maxima, logits, **ordered_by)
        else:
            blocks = run(order_maxima_of, logits, row_ids, **ordered_by)
        static = {**ordered_by, "filters_min_p": mode.filters_min_p}
        cut, magnitudes = run(whole_cut, logits, row_ids, blocks, entries, **static)
    blocked = cut_for(mode, logits)
    if row_ids is None:
        weights = run(weight_blocks, logits, cut, **blocked)
    else:
        weights = run(weight_blocks_of, logits, row_ids, cut, **blocked)
    return run(block_law, weights, magnitudes, cut), None


def _probability_law(mode: Mode, values: Tensor, looks: bool, run: Run) -> Law:
    """The law of rows that hold probabilities; its status is of use only where somebody looks."""
    weights, magnitudes = run(probability_blocks, values, **cut_for(mode, values), looks=looks)
    return run(block_law, weights, magnitudes, None)


def _laws(mode: Mode, inputs: VerifyInputs, layout: Layout, run: Run) -> tuple[tuple[Law, Tensor | None], Proposal]:
    """The law of the target, with its candidates, and the proposal; neither needs the other, so they may overlap."""

    def target() -> tuple[Law, Tensor | None]:
        return _target_law(mode, inputs, layout, run)

    def proposal() -> Proposal:
        return _proposal(mode, inputs, run)

    if not _has_proposals(mode, inputs):
        return target(), Proposal(None, None)
    return both(run, inputs.logits.device, target, proposal)


def _target_law(mode: Mode, inputs: VerifyInputs, layout: Layout, run: Run) -> tuple[Law, Tensor | None]:
    """The law of the rows, but where a rule and a mode ask no more, only of those that judge a draft."""
    if mode.from_probabilities:
        return _probability_law(mode, inputs.logits, True, run), None
    entries = Entries(inputs.table, layout.slots, layout.positions)
    if not _judges_alone(mode):
        return _law(mode, inputs.logits, entries, run)
    law, _ = _law(mode, inputs.logits, entries, run, layout.judges[: _most_judges(inputs)])
    return law._replace(entry_ids=layout.proposals), None


def _judges_alone(mode: Mode) -> bool:
    """Whether a row without a draft needs no law: its token is then the target's own draw, which no filter touches."""
    return mode.rule == "rejection" and not (mode.filters_min_p or mode.capacity or mode.searches)


def _most_judges(inputs: VerifyInputs) -> int:
    """Rows that may have a draft, at most; all rows where fewer were of another class, whose kernels differ."""
    rows, device = inputs.logits.shape[0], inputs.logits.device
    most = max(min(rows, inputs.draft_token_ids.numel()), 1)
    return most if row_class(most, device) == row_class(rows, device) else rows


def _proposal(mode: Mode, inputs: VerifyInputs, run: Run) -> Proposal:
    """What the drafts were drawn from: draft logits go through the filters that the target goes through."""
    values = inputs.proposals
    if values is None or not _has_proposals(mode, inputs):
        return Proposal(None, None)
    if mode.drafts == "probabilities":
        return Proposal(values, _probability_law(mode, values, False, run))
    slots = run(proposal_slots, values, inputs.slots, inputs.num_drafts)
    entries = Entries(inputs.table, slots, slots)  # positions matter to noise alone
    return Proposal(values, _law(mode, values, entries, run)[0])


def _has_proposals(mode: Mode, inputs: VerifyInputs) -> bool:
    return mode.drafts != "one_hot" and inputs.proposals is not None and inputs.proposals.shape[0] > 0


def _target_draws(mode: Mode, inputs: VerifyInputs, layout: Layout, run: Run) -> SampleOutputs:
    """The target's own token of every row, as the sampler draws it."""
    if not mode.from_probabilities:
        sampled = SampleInputs(inputs.logits, layout.slots, layout.positions, inputs.table)
        return sample_step(mode, sampled, run)
    law, _ = _target_law(mode, inputs, layout, run)
    final = run(every_row, layout, inputs.table)
    blocked = cut_for(mode, final.row_ids, FINAL_BLOCK)
    race = (law, Proposal(None, None), None, final)
    maxima = run(final_maxima, inputs.logits, *race, **blocked)
    draws = run(draw_from_final_blocks, inputs.logits, maxima, *race, **blocked)
    return SampleOutputs(draws.token_ids, draws.status | law.status)


def _residual_sums(
    mode: Mode,
    logits: Tensor,
    ordered: Tensor | None,
    law: Law,
    proposal: Proposal,
    carry: Tensor,
    layout: Layout,
    run: Run,
) -> Tensor:
    """Parts of the residual sum of every row."""
    if ordered is not None:
        return run(residual_of_candidates, ordered, law, proposal, carry, layout, vocab_size=mode.vocab_size)
    return run(residual_of_blocks, logits, law, proposal, carry, layout, **cut_for(mode, logits))
