"""The whole algorithm: sampling, probabilities and verification as lists of stages, for each mode.

Every ``run(stage, ...)`` is a point where results are written to memory. Eager code calls the stage;
``lowering.CompiledStages`` compiles each stage apart; a CUDA graph then records all of them. The list, and so the
result, is the same. Sampling, drafting and verification share it: what a filter is in one, it is in the others.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from compiled_sampler.batch import ProbabilityOutputs, SampleInputs, SampleOutputs, VerifyInputs, VerifyOutputs
from compiled_sampler.core.noise import DRAFT, TARGET
from compiled_sampler.core.order import is_on_gpu
from compiled_sampler.core.rows import Entries
from compiled_sampler.core.stage import Run, both, call
from compiled_sampler.modes import LARGE_ROWS, Mode, row_class
from compiled_sampler.passes.law import (
    AnyLaw,
    Law,
    LawBlocks,
    WholeLaw,
    candidate_law,
    probabilities,
    probability_blocks,
    searched_cut,
    summed,
    weight_blocks,
    whole_weights,
)
from compiled_sampler.passes.maxima import BlockMaxima, coarser_keys, order_maxima_of
from compiled_sampler.pipeline.sample import (
    ORDER_BLOCKS,
    candidates,
    cut_for,
    draw,
    first,
    first_pass,
    search,
    threshold_of,
)
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
    FINAL_BLOCKS,
    draw_from_final_blocks,
    emit_from_final_blocks,
    emit_from_final_candidates,
    every_row,
    final_winners,
    residual_of_blocks,
    residual_of_candidates,
)
from compiled_sampler.speculation.row_layout import Layout, Trials, proposal_slots, row_layout


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
    law = law if isinstance(law, Law) else run(summed, law, filters_min_p=mode.filters_min_p)
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
    if mode.rule == "match" or not mode.draws:  # greedy: whatever the rule, a draft is the first token or it is not
        layout, draws = _target_draws(mode, inputs, run)
        return run(emit_matches, draws, layout, slots, drafts, **cut)
    requests = Entries(inputs.table, slots, inputs.positions)
    (layout, law, ordered), proposal = _laws(mode, inputs, run)
    by_draft, asked = _by_draft(mode), {"filters_min_p": mode.filters_min_p, "rates": mode.rule == "block"}
    judged = run(judge_drafts, logits, law, proposal, layout, inputs.table, **cut, **asked, by_draft=by_draft)
    values, carry, prefixes = proposal.values, None, None
    if judged.ratio is not None:
        carry = run(carried_ratio, judged.ratio, layout, drafts)
        sums = _residual_sums(mode, logits, ordered, values, judged, carry, layout, run)
        prefixes = run(judge_prefixes, sums, carry, layout, inputs.table)
    final = run(settle, judged, carry, prefixes, layout, requests, drafts, **cut, by_draft=by_draft)
    if ordered is not None:
        return run(emit_from_final_candidates, ordered, values, final, slots, drafts, **cut)
    winners = run(final_winners, logits, values, final, **cut_for(mode, final.row_ids, FINAL_BLOCKS))
    return run(emit_from_final_blocks, *winners, final, slots, drafts)


class _Target(NamedTuple):
    """The rows of a verification step and what their tokens would follow."""

    layout: Layout
    law: AnyLaw
    ordered: Tensor | None
    """The candidates of every row, where these hold all that the filters keep."""


def _laws(mode: Mode, inputs: VerifyInputs, run: Run) -> tuple[_Target, Proposal]:
    """The law of the target and the proposal; neither needs the other, so they may overlap."""
    target = _judging_target if _by_draft(mode) else _target
    values = _proposed(mode, inputs)
    if values is None:
        return target(mode, inputs, run), Proposal(None, None)
    chains = (lambda: target(mode, inputs, run), lambda: _proposal(mode, inputs, values, run))
    return both(run, inputs.logits.device, *chains)


def _leaves_whole(mode: Mode) -> bool:
    """Whether rows are logits that neither top-k nor top-p cuts, so that their law is a ``WholeLaw``."""
    return not (mode.from_probabilities or mode.searches or mode.capacity)


def _by_draft(mode: Mode) -> bool:
    """Whether only rows that judge a draft need a law: the last row of a request is then drawn from as it is."""
    return mode.rule == "rejection" and _leaves_whole(mode) and not mode.filters_min_p


def _target(mode: Mode, inputs: VerifyInputs, run: Run) -> _Target:
    """The law of every row, of probabilities or behind top-k and top-p."""
    layout = _layout(mode, inputs, run)
    if mode.from_probabilities:
        blocked = cut_for(mode, inputs.logits, ORDER_BLOCKS)
        return _Target(layout, run(probability_blocks, inputs.logits, **blocked, looks=True), None)
    return _Target(layout, *_law(mode, inputs.logits, _entries(layout, inputs), run))


def _judging_target(mode: Mode, inputs: VerifyInputs, run: Run) -> _Target:
    """The law of the rows that judge a draft, without filters."""
    logits, layout = inputs.logits, _layout(mode, inputs, run)
    trials = layout.trials
    judging = Entries(inputs.table, trials.slots, trials.positions)
    blocks = run(order_maxima_of, logits, trials.row_ids, **cut_for(mode, trials.row_ids, ORDER_BLOCKS))
    return _Target(layout, _whole_law(mode, logits, blocks, judging, trials.row_ids, run), None)


def _layout(mode: Mode, inputs: VerifyInputs, run: Run) -> Layout:
    logits, slots, positions, num_drafts, drafts, *_ = inputs
    layout = run(row_layout, logits, slots, positions, num_drafts, drafts, vocab_size=mode.vocab_size)
    values = _proposed(mode, inputs)
    count = max(drafts.numel(), 1) if values is None else values.shape[0]
    return layout._replace(trials=Trials(*(each[:count] for each in layout.trials)))


def _entries(layout: Layout, inputs: VerifyInputs) -> Entries:
    return Entries(inputs.table, layout.slots, layout.positions)


def _law(mode: Mode, logits: Tensor, entries: Entries, run: Run) -> tuple[AnyLaw, Tensor | None]:
    """The law of every row, and its candidates where these hold all that the filters keep.

    Args:
        mode: what it applies.
        logits: ``[R, >=V]``.
        entries: ``[R]``.
        run: how a stage is run.
    """
    if mode.searches:
        searched = search(mode, logits, entries, TARGET, run)
        threshold = threshold_of(mode, logits, searched, run)
        cut = searched_cut(threshold, searched.row_max, searched.rows)  # no stage: it computes nothing
        weights = run(weight_blocks, logits, cut, **cut_for(mode, logits, ORDER_BLOCKS))
        return LawBlocks(cut, weights, searched.magnitudes), None
    if mode.capacity:
        found = candidates(mode, logits, entries, run)
        return run(candidate_law, found.tokens, found.magnitudes, entries, found.row_mass), found.tokens
    return _whole_law(mode, logits, first_pass(mode, logits, run, names=True), entries, None, run), None


def _whole_law(
    mode: Mode, logits: Tensor, blocks: BlockMaxima, entries: Entries, row_ids: Tensor | None, run: Run
) -> WholeLaw:
    """The law of rows, or of those that ``row_ids`` names, int64 ``[n]``, in a mode without top-k and top-p.

    Blocks and entries are of those rows, ``[n]``. For many rows on a GPU, a kernel of its own for each row's largest
    key takes less than a look at a row's keys in each of its blocks.
    """
    keys = blocks.keys
    static = {**cut_for(mode, keys, ORDER_BLOCKS), "filters_min_p": mode.filters_min_p}
    if is_on_gpu(logits) and row_class(keys.shape[0], keys.device) == LARGE_ROWS:
        keys = run(coarser_keys, keys, ratio=keys.shape[1])
    return WholeLaw(blocks, entries, run(whole_weights, logits, row_ids, keys, entries, **static))


def _proposed(mode: Mode, inputs: VerifyInputs) -> Tensor | None:
    """What the drafts were drawn from ``[D, >=V]``, without rows that no draft can have; None for one-hot drafts."""
    if mode.drafts == "one_hot" or inputs.proposals is None or not inputs.proposals.shape[0]:
        return None
    return inputs.proposals[: inputs.logits.shape[0]]


def _proposal(mode: Mode, inputs: VerifyInputs, values: Tensor, run: Run) -> Proposal:
    """The law of the drafts: draft logits go through the filters that the target goes through."""
    if mode.drafts == "probabilities":
        return Proposal(values, run(probability_blocks, values, **cut_for(mode, values, ORDER_BLOCKS), looks=False))
    slots = run(proposal_slots, values, inputs.slots, inputs.num_drafts)
    entries = Entries(inputs.table, slots, slots)  # positions matter to noise alone
    return Proposal(values, _law(mode, values, entries, run)[0])


def _target_draws(mode: Mode, inputs: VerifyInputs, run: Run) -> tuple[Layout, SampleOutputs]:
    """The target's own token of every row, as the sampler draws it."""
    if not mode.from_probabilities:
        layout = _layout(mode, inputs, run)
        sampled = SampleInputs(inputs.logits, layout.slots, layout.positions, inputs.table)
        return layout, sample_step(mode, sampled, run)
    layout, law, _ = _target(mode, inputs, run)
    final = run(every_row, law, layout, inputs.table)
    winners = run(final_winners, inputs.logits, None, final, **cut_for(mode, final.row_ids, FINAL_BLOCKS))
    return layout, run(draw_from_final_blocks, *winners, final)


def _residual_sums(
    mode: Mode,
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
        return run(residual_of_candidates, ordered, values, judged, carry, layout, vocab_size=mode.vocab_size)
    return run(residual_of_blocks, logits, values, judged, carry, layout, **cut_for(mode, logits))
