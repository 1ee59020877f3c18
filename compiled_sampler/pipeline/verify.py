"""Verification of drafts: accepted drafts and one more token for every request, as the stages of each rule.

Request n has ``num_drafts[n] + 1`` consecutive rows of logits, one for each token that it may emit.

- ``match``, or any rule in the greedy mode: draw the target's own token in every row, as ``sample_step`` does, and
  accept drafts while they equal it.
- ``rejection`` and ``block``: compute the law, that is the distribution in integers, of the target and of the proposal;
  test each draft by the ratio of the two; then draw one token from the final row of each request: from the residual
  ``relu(p - q)`` if its draft was rejected, else from the target.
- A tree of drafts (``speculation/trees.py``): ``match`` follows the tokens that were drawn, ``rejection`` tests one
  child after the other; what is accepted is a path, which then takes the place of the drafts.

Filters and edits are the stages of sampling, so a filter means the same here as there. Logprobs are those of the rows,
in the places of the tokens that these emit.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

from torch import Tensor

from compiled_sampler.batch import SampleInputs, VerifyInputs, VerifyOutputs
from compiled_sampler.core.rows import RowSlots
from compiled_sampler.core.stage import Run, call
from compiled_sampler.edits.recording import cut_at_stop
from compiled_sampler.logprobs import LogprobOutputs
from compiled_sampler.modes import Mode
from compiled_sampler.passes.law import AnyLaw
from compiled_sampler.passes.maxima import order_maxima_of
from compiled_sampler.pipeline.chunks import in_chunks
from compiled_sampler.pipeline.edits import edited_logits
from compiled_sampler.pipeline.law import chunked_row_law, probability_law, summed, unfiltered_law
from compiled_sampler.pipeline.sample import Draw, edit_and_draw
from compiled_sampler.pipeline.schedule import StepRun
from compiled_sampler.pipeline.verify_rows import (
    VerifyRows,
    VerifyRun,
    emitted_logprobs,
    in_request_chunks,
    padded_to_two,
    proposal_of,
    proposed,
    rows_of,
    slots_of,
    target_logits,
    verify_run,
    with_logprobs,
)
from compiled_sampler.speculation.acceptance import Judged, Proposal, carried_ratio, judge_drafts, judge_prefixes
from compiled_sampler.speculation.emission import Final, emit_matches, final_rows
from compiled_sampler.speculation.residual import (
    Values,
    draw_from_final_blocks,
    emit_from_final_blocks,
    emit_from_final_candidates,
    every_row_final,
    final_winners,
    residual_of_blocks,
    residual_of_candidates,
    residual_of_walked_blocks,
    residual_of_walked_candidates,
)
from compiled_sampler.speculation.row_layout import Layout
from compiled_sampler.speculation.trees import Tree, emit_path, final_of_walk, judge_nodes, walk_on


class _Target(NamedTuple):
    """The rows of a verification and the law of the target."""

    logits: Tensor
    """``[R, >=V]``: logits after edits, or probabilities."""
    law: AnyLaw
    """The target's law of each row ``[R]``, or of each draft ``[D]`` if ``_has_law_by_draft``."""
    ordered: Tensor | None
    """int64 ``[R, C]``, packed keys of the candidates if these hold every token that the filters keep; else None."""


def verify_step(mode: Mode, inputs: VerifyInputs, run: Run = call, draw: Draw = edit_and_draw) -> VerifyOutputs:
    """Token ids ``[N, K+1]``, counts and status ``[N]`` of each request: its accepted drafts, then one more token."""

    def verified_chunk(inputs: VerifyInputs) -> VerifyOutputs:
        return padded_to_two(inputs, run, lambda inputs: _verify(mode, inputs, run, draw))

    return in_request_chunks(mode, inputs, run, verified_chunk)


def _verify(mode: Mode, inputs: VerifyInputs, run: Run, draw: Draw) -> VerifyOutputs:
    """``verify_step`` of all requests at once."""
    run = verify_run(mode, inputs, run)
    rows = rows_of(run, inputs)
    if mode.matches_drafts:
        outputs, row_logprobs = _matched(run, inputs, rows, draw)
    else:
        with ExitStack() as undo:
            target, proposal = _laws(run, inputs, rows, undo)
            outputs, row_logprobs = _judged(run, inputs, rows, target, proposal)
    if inputs.parents is not None and outputs.node_ids is None:  # no request has a draft
        outputs = outputs._replace(node_ids=inputs.parents)
    if inputs.stops is not None:
        outputs = run(cut_at_stop, outputs, inputs.slots, inputs.stops)
    return outputs if row_logprobs is None else with_logprobs(outputs, row_logprobs, inputs, run)


def _matched(
    run: VerifyRun, inputs: VerifyInputs, rows: VerifyRows, draw: Draw
) -> tuple[VerifyOutputs, LogprobOutputs | None]:
    """The outputs of the rule ``match``, and logprobs of rows ``[R]`` if asked for."""
    mode, slots, drafts = run.mode, inputs.slots, inputs.draft_token_ids
    layout, tree, edits, noise = rows
    if mode.from_probabilities:
        law = probability_law(run.rows, inputs.logits, looks=True)
        final = run(every_row_final, law, layout, inputs.table)
        winners = run(final_winners, inputs.logits, None, final, **run.rows.schedule.final.blocks_by_bits)
        draws = run(draw_from_final_blocks, *winners, final)
    else:
        sampled = SampleInputs(inputs.logits, layout.slots, layout.positions, inputs.table)
        draws = draw(run.rows, sampled._replace(edits=edits, logprobs=inputs.logprobs, noise=noise))
    tokens = draws._replace(logprobs=None)
    if tree is not None:
        return run(emit_path, tokens, layout, tree, slots, drafts, **run.vocab), draws.logprobs
    return run(emit_matches, tokens, layout, slots, drafts, **run.vocab), draws.logprobs


def _judged(
    run: VerifyRun, inputs: VerifyInputs, rows: VerifyRows, target: _Target, proposal: Proposal
) -> tuple[VerifyOutputs, LogprobOutputs | None]:
    """The outputs of a rule that compares laws, and logprobs of rows ``[R]`` if asked for."""
    slots, drafts, node_ids, values = inputs.slots, inputs.draft_token_ids, None, proposal.values
    if rows.tree is None:
        final = _final_of_chains(run, inputs, rows.layout, target, proposal)
    else:
        final, node_ids, drafts = _final_of_trees(run, inputs, rows.layout, rows.tree, target, proposal)
    if target.ordered is not None:
        outputs = run(emit_from_final_candidates, target.ordered, values, final, slots, drafts, **run.vocab)
    else:
        winners = run(final_winners, target.logits, values, final, **run.schedule.final.blocks_by_bits)
        outputs = run(emit_from_final_blocks, *winners, final, slots, drafts)
    outputs = outputs._replace(node_ids=node_ids)
    return outputs, emitted_logprobs(run.rows, target.logits, inputs, outputs)


def _final_of_chains(
    run: VerifyRun, inputs: VerifyInputs, layout: Layout, target: _Target, proposal: Proposal
) -> Final:
    """The final row of each request, whose drafts are a chain."""
    mode, drafts, values, (logits, law, ordered) = run.mode, inputs.draft_token_ids, proposal.values, target
    requests = slots_of(inputs.table, inputs)
    by_draft, rule = _has_law_by_draft(mode), {"filters_min_p": mode.filters_min_p, "rates": mode.rule == "block"}
    judged = run(judge_drafts, logits, law, proposal, layout, inputs.table, **run.vocab, **rule, by_draft=by_draft)
    carry = prefixes = None
    if judged.ratio is not None:  # the rule block, which tests whole prefixes by what they leave of the target's law
        carry = run(carried_ratio, judged.ratio, layout, drafts)
        sums = _residual_sums(run.rows, logits, ordered, values, judged, carry, layout)
        prefixes = run(judge_prefixes, sums, carry, judged.is_possible, layout, inputs.table)
    return run(final_rows, judged, carry, prefixes, layout, requests, drafts, **run.vocab, by_draft=by_draft)


def _final_of_trees(
    run: VerifyRun, inputs: VerifyInputs, layout: Layout, tree: Tree, target: _Target, proposal: Proposal
) -> tuple[Final, Tensor, Tensor]:
    """The final row of each request, by one test of each at a time from the root on; nodes and drafts of its path."""
    drafts, values, (logits, law, ordered) = inputs.draft_token_ids, proposal.values, target
    requests = slots_of(inputs.table, inputs)
    assert values is not None
    assert proposal.law is not None  # one-hot drafts are refused
    laws = summed(run, law), summed(run, proposal.law)
    nodes, walk = run(judge_nodes, logits, *laws, values, layout, tree, requests, drafts, **run.vocab)
    for _ in range(drafts.shape[1]):
        rows = walk.row_ids, walk.proposals
        if ordered is not None:
            sums = run(residual_of_walked_candidates, ordered, values, *laws, walk.debt, rows, **run.vocab)
        else:
            blocks = run.schedule.mass.blocks
            sums = run(residual_of_walked_blocks, logits, values, *laws, walk.debt, rows, **blocks)
        walk = run(walk_on, walk, sums, nodes, tree, layout)
    return run(final_of_walk, walk, nodes, *laws, layout, tree, requests, drafts, **run.vocab)


def _laws(run: VerifyRun, inputs: VerifyInputs, rows: VerifyRows, undo: ExitStack) -> tuple[_Target, Proposal]:
    """The target and the proposal, each with its law; the two are independent and may overlap on two streams."""
    # In a chunk they do not: what two streams have read is free only when both are done, and no chunk waits for that.
    mode = run.mode
    target = _judging_target if _has_law_by_draft(mode) and inputs.parents is None else _target
    values = proposed(mode, inputs)
    if values is None:
        return target(run, inputs, rows, undo), Proposal(None, None)
    chains = (lambda: target(run, inputs, rows, undo), lambda: proposal_of(run, inputs, rows, values))
    if inputs.rows is not None:
        return chains[0](), chains[1]()
    return run.overlap(inputs.logits.device, *chains)


def _has_law_by_draft(mode: Mode) -> bool:
    """Whether only the rows that judge a draft need a law: under the rule ``rejection``, on logits without filters."""
    # The row after all drafts of a request is then drawn from by a race over its logits, which needs no total.
    unfiltered = not (mode.from_probabilities or mode.searches or mode.capacity or mode.filters_min_p)
    return mode.rule == "rejection" and unfiltered


def _target(run: VerifyRun, inputs: VerifyInputs, rows: VerifyRows, undo: ExitStack) -> _Target:
    """The target's law of every row ``[R]``, from probabilities or from filtered logits."""
    if run.mode.from_probabilities:
        return _Target(inputs.logits, probability_law(run.rows, inputs.logits, looks=True), None)
    row_slots = slots_of(inputs.table, rows.layout)
    logits = edited_logits(run.rows, target_logits(inputs), row_slots, rows.edits, undo)
    return _Target(logits, *chunked_row_law(run.rows, logits, row_slots))


def _judging_target(run: VerifyRun, inputs: VerifyInputs, rows: VerifyRows, undo: ExitStack) -> _Target:
    """The target's law of the rows that judge a draft, ``[D]``, without filters."""
    layout, edits = rows.layout, rows.edits
    row_slots, judging = slots_of(inputs.table, layout), slots_of(inputs.table, layout.trials)
    logits = edited_logits(run.rows, target_logits(inputs), row_slots, edits, undo)

    def law_of_chunk(row_ids: Tensor, judging: RowSlots) -> AnyLaw:
        blocks = run(order_maxima_of, logits, row_ids, **run.drafts.schedule.order.reduction)
        return unfiltered_law(run.drafts, logits, blocks, judging, row_ids)

    return _Target(logits, in_chunks(run.drafts, law_of_chunk, layout.trials.row_ids, judging), None)


def _residual_sums(
    run: StepRun, logits: Tensor, ordered: Tensor | None, values: Values, judged: Judged, carry: Tensor, layout: Layout
) -> Tensor:
    """Parts of the residual sum of every row, int64 ``[R, n]``, in units of ``1 / UNIT``, for the rule ``block``."""
    if ordered is not None:
        return run(residual_of_candidates, ordered, values, judged, carry, layout, **run.vocab)
    rows = logits, judged.law, carry, layout.drafts, layout.proposals
    return run(residual_of_blocks, values, judged.proposed, *rows, **run.schedule.mass.blocks)
