"""What a verification reads: rows, schedules, edits, what drafts were drawn from; and logprobs of what it emits.

Requests are verified in chunks, each a batch of its own, where edited copies of all rows would take too much memory.
How many rows a request has is known on the device alone. So a chunk has a fixed number of requests, and room for as
many rows as these may have: the rows from the first one's on, of which the last may be those of the next chunk. They
are copied where edits copy rows anyway. A request's results are a function of its own rows, so chunks change no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import AnyTable, DraftTable, PickedRows, RequestRows, VerifyInputs, VerifyOutputs
from compiled_sampler.core.rows import RowSlots, take
from compiled_sampler.core.stage import Run
from compiled_sampler.edits.tables import EditInputs, NoiseInputs
from compiled_sampler.logprobs import LogprobOutputs
from compiled_sampler.modes import PROCESSED, Mode, edits_drafts, proposing
from compiled_sampler.passes.law import AnyLaw
from compiled_sampler.passes.maxima import order_maxima_of
from compiled_sampler.pipeline.chunks import in_chunks, in_chunks_to, map_rows, part_of
from compiled_sampler.pipeline.edits import drawing_schedule, edited_logits, makes_copy
from compiled_sampler.pipeline.law import chunked_row_law, probability_law, row_law, unfiltered_law
from compiled_sampler.pipeline.logprobs import logprobs_of
from compiled_sampler.pipeline.schedule import Schedule, StepRun, request_ends, schedule_for
from compiled_sampler.speculation.acceptance import Proposal
from compiled_sampler.speculation.emission import by_request, emitted_rows
from compiled_sampler.speculation.row_layout import (
    CachedRows,
    Layout,
    Starts,
    Trials,
    gathered,
    proposal_slots,
    request_starts,
    row_layout,
    rows_of_drafts,
    rows_of_requests,
    with_padding,
)
from compiled_sampler.speculation.trees import Tree, first_ways, row_paths, tree_of, tree_rows, tree_trials


class VerifyRun(StepRun):
    """How a verification runs its stages: its own schedule is for N rows, the final row of each request."""

    def __init__(self, run: Run, requests: Schedule, rows: Schedule, drafts: Schedule) -> None:
        super().__init__(run, requests)
        self.rows = StepRun(run, rows)
        """For the R rows of logits."""
        self.drafts = StepRun(run, drafts)
        """For D rows, one per draft: of the proposals, and in a mode without filters the target's that judge."""


class VerifyRows(NamedTuple):
    """The rows of a verification, and what edits and noise read for them."""

    layout: Layout
    """Request, position and draft of each row ``[R]``."""
    tree: Tree | None
    """The trees that drafts are; None for chains."""
    edits: EditInputs | None
    """Those of the inputs, with a text for each row of trees; so is the noise."""
    noise: NoiseInputs | None


def in_request_chunks(
    mode: Mode, inputs: VerifyInputs, run: Run, verify: Callable[[VerifyInputs], VerifyOutputs]
) -> VerifyOutputs:
    """``verify(inputs)``, for no more requests at once than an edited copy has room for the rows of."""
    ends = _ends(mode, inputs)
    if len(ends) == 1:
        return verify(inputs)
    values = proposed(mode, inputs)
    by_row = values if isinstance(values, Tensor) else None

    def verified_chunk(
        slots: Tensor, positions: Tensor, num_drafts: Tensor, drafts: Tensor, parents: Tensor | None, starts: Starts
    ) -> VerifyOutputs:
        rows = run(rows_of_requests, starts, drafts, inputs.logits, by_row)
        chunk = _of_rows(mode, inputs, rows, run)
        chunk = chunk._replace(slots=slots, positions=positions, num_drafts=num_drafts, draft_token_ids=drafts)
        return verify(chunk._replace(parents=parents))

    searched = verify_run(mode, inputs, run).schedule.searches_requests
    starts = run(request_starts, inputs.num_drafts, searched=searched)
    requests = inputs.slots, inputs.positions, inputs.num_drafts, inputs.draft_token_ids, inputs.parents
    return in_chunks_to(ends, verified_chunk, *requests, starts)


def padded_to_two(inputs: VerifyInputs, run: Run, verify: Callable[[VerifyInputs], VerifyOutputs]) -> VerifyOutputs:
    """The results of a verification, of compiled stages for two requests and two rows at least."""
    # Stages for one would be a third of the kernels. So a single request gets one of padding, and a single row too.
    if not run.fuses:
        return verify(inputs)
    requests = inputs.slots, inputs.positions, inputs.num_drafts, inputs.draft_token_ids, inputs.parents
    if is_single := inputs.slots.shape[0] == 1:
        slots, positions, num_drafts, drafts, parents = run(with_padding, *requests)
        inputs = inputs._replace(slots=slots, positions=positions, num_drafts=num_drafts)
        inputs = inputs._replace(draft_token_ids=drafts, parents=parents)
    logprobs = inputs.logprobs
    if logprobs is not None:  # whose scale is by slot
        logprobs = logprobs._replace(given_ids=map_rows(_two_rows, logprobs.given_ids))
    rows = inputs.logits, inputs.proposals, inputs.edits, inputs.rows
    logits, proposals, edits, rows_of_chunk = map_rows(_two_rows, rows)
    inputs = inputs._replace(logits=logits, proposals=proposals, edits=edits, rows=rows_of_chunk, logprobs=logprobs)
    return part_of(verify(inputs), 0, 1) if is_single else verify(inputs)


def _two_rows(values: Tensor) -> Tensor:
    """At least two rows, the new ones 0."""
    missing = max(2 - values.shape[0], 0)
    return F.pad(values, (*(0, 0) * (values.dim() - 1), 0, missing)) if missing else values


def _ends(mode: Mode, inputs: VerifyInputs) -> list[int]:
    """Where chunks of requests end; one of all requests where no edit copies rows."""
    (requests, width), edits = inputs.draft_token_ids.shape, inputs.edits
    copies_drafts = edits_drafts(mode) and proposed(mode, inputs) is not None
    if edits is None or not (copies_drafts or makes_copy(inputs.logits, edits)):
        return [requests]
    return request_ends(mode, requests, inputs.logits.shape[0], width + 1)


def _of_rows(mode: Mode, inputs: VerifyInputs, rows: RequestRows, run: Run) -> VerifyInputs:
    """The inputs with tensors by row of these rows alone, but for logits that are edited, which stay where they are."""
    edits, logprobs, proposals = inputs.edits, inputs.logprobs, inputs.proposals
    if rows.proposal_ids is not None and not edits_drafts(mode):
        proposals = run(gathered, proposed(mode, inputs), rows.proposal_ids)
    if logprobs is not None and logprobs.given_ids is not None:
        logprobs = logprobs._replace(given_ids=logprobs.given_ids[rows.row_ids])
    edits = None if edits is None else edits_of_rows(edits, rows.row_ids)
    return inputs._replace(edits=edits, logprobs=logprobs, proposals=proposals, rows=rows)


def verify_run(mode: Mode, inputs: VerifyInputs, run: Run) -> VerifyRun:
    """How a verification of N requests with R rows and D drafts runs its stages."""
    logits, device, is_edited = inputs.logits, inputs.logits.device, inputs.edits is not None

    def schedule_of(mode: Mode, rows: int) -> Schedule:
        return schedule_for(mode, rows, device, is_edited=is_edited)

    if mode.matches_drafts:
        rows = drawing_schedule(mode, logits, inputs.edits, inputs.logprobs)
    else:
        rows = schedule_of(mode, rows_like(inputs).shape[0])
    drafts = schedule_of(proposing(mode), num_trials(mode, inputs))
    return VerifyRun(run, schedule_of(mode, inputs.slots.shape[0]), rows, drafts)


def rows_like(inputs: VerifyInputs) -> Tensor:
    """A tensor ``[R, ...]`` of as many rows as the requests have; what it holds is not for use."""
    return inputs.logits if inputs.rows is None else inputs.rows.row_ids


def target_logits(inputs: VerifyInputs) -> Tensor | PickedRows:
    """The target's logits ``[R, >=V]``, of a chunk where they stand among those of the batch."""
    return inputs.logits if inputs.rows is None else PickedRows(inputs.logits, inputs.rows.row_ids)


def num_trials(mode: Mode, inputs: VerifyInputs) -> int:
    """D: the number of rows of the proposals or, for one-hot drafts, of entries ``N * K``, at least one."""
    # A draft table has rows for all slots; of those read there are no more than entries, nor than rows of logits.
    values = proposed(mode, inputs)
    if isinstance(values, Tensor):
        return values.shape[0]
    if isinstance(values, PickedRows):
        return values.row_ids.shape[0]
    entries = max(inputs.draft_token_ids.numel(), 1)
    return entries if values is None else min(entries, rows_like(inputs).shape[0])


def rows_of(run: VerifyRun, inputs: VerifyInputs) -> VerifyRows:
    """The rows of a verification, its trials cut to the D drafts that there can be."""
    slots, positions, num_drafts, drafts = inputs.slots, inputs.positions, inputs.num_drafts, inputs.draft_token_ids
    edits, noise = inputs.edits, inputs.noise
    mode, searched, tree = run.mode, run.schedule.searches_requests, None
    layout = run(row_layout, rows_like(inputs), slots, positions, num_drafts, drafts, **run.vocab, searched=searched)
    if inputs.parents is not None and drafts.shape[1]:
        by_node = inputs.parents, num_drafts
        tree = run(tree_of, run(first_ways, *by_node), *by_node)
        if not mode.matches_drafts:
            layout = layout._replace(trials=run(tree_trials, layout, tree, slots, positions))
        row_slots, row_positions = run(tree_rows, layout, tree, positions)
        layout = layout._replace(slots=row_slots, positions=row_positions)
    count = num_trials(mode, inputs)
    layout = layout._replace(trials=Trials(*(field[:count] for field in layout.trials)))
    if tree is not None and (noise is not None or (edits is not None and edits.tables.history is not None)):
        paths = run(row_paths, layout, tree, positions, drafts, **run.vocab)
        edits = None if edits is None else edits._replace(paths=paths)
        noise = None if noise is None else noise._replace(paths=paths)
    return VerifyRows(layout, tree, edits, noise)


def slots_of(table: AnyTable, owned: Layout | Trials | VerifyInputs) -> RowSlots:
    """The slot and the position of each row ``[R]``, of the row that judges each draft ``[D]``, or of each request."""
    return RowSlots(table, owned.slots, owned.positions)


def edits_of_drafts(layout: Layout, edits: EditInputs) -> EditInputs:
    """What edits of the drafts' logits read: a draft has the mask and the tensors of the row ``[D]`` that judges it."""
    return edits_of_rows(edits, layout.trials.row_ids)


def edits_of_rows(edits: EditInputs, row_ids: Tensor) -> EditInputs:
    """What edits of a copy of some rows read, int64 ``[n]`` of those that the edits have tensors for."""
    mask = edits.token_bitmask
    rows = None if mask is None else mask[row_ids]
    given, paths = tuple(values[row_ids] for values in edits.given), take(edits.paths, row_ids)
    return EditInputs(edits.tables, rows, custom=edits.custom, given=given, paths=paths)


def proposed(mode: Mode, inputs: VerifyInputs) -> Tensor | PickedRows | DraftTable | None:
    """The proposals ``[D, >=V]`` that drafts were drawn from, or the table with them; None for one-hot drafts."""
    # There are no more drafts than rows of logits, so rows of the proposals beyond R belong to no draft and are cut.
    # In a chunk, logits to edit stay where they are among those of the batch.
    values = inputs.proposals
    if not isinstance(values, Tensor):
        return values
    if mode.drafts == "one_hot" or not values.shape[0]:
        return None
    if edits_drafts(mode) and inputs.rows is not None and inputs.rows.proposal_ids is not None:
        return PickedRows(values, inputs.rows.proposal_ids)
    return values[: inputs.logits.shape[0]]


def proposal_of(
    run: VerifyRun, inputs: VerifyInputs, rows: VerifyRows, values: Tensor | PickedRows | DraftTable
) -> Proposal:
    """The proposals and their law ``[D]``; draft logits pass the target's edits and filters, unless processed."""
    mode, searched = run.drafts.mode, run.schedule.searches_requests
    if isinstance(values, DraftTable):
        return _cached_proposal(run, inputs, rows, values)
    if rows.edits is not None and edits_drafts(mode):
        return _edited_proposal(run.drafts, inputs.table, rows.layout, values, rows.edits)
    assert isinstance(values, Tensor)  # rows are picked for edits alone
    if mode.drafts == "probabilities":
        return Proposal(values, probability_law(run.drafts, values, looks=False))
    slots = run(proposal_slots, values, inputs.slots, inputs.num_drafts, searched=searched)
    table = inputs.table if inputs.draft_table is None or mode.drafts != PROCESSED else inputs.draft_table
    row_slots = RowSlots(table, slots, slots)  # any positions: only noise depends on them, and a law has none
    return Proposal(values, chunked_row_law(run.drafts, values, row_slots)[0])


def _edited_proposal(
    run: StepRun, table: AnyTable, layout: Layout, values: Tensor | PickedRows, edits: EditInputs
) -> Proposal:
    """The proposals ``[D, >=V]`` after edits, which read the position and the history of each draft, and their law."""
    row_slots = slots_of(table, layout.trials)
    logits = edited_logits(run, values, row_slots, edits_of_drafts(layout, edits))
    return Proposal(logits, chunked_row_law(run, logits, row_slots)[0])


def _cached_proposal(run: VerifyRun, inputs: VerifyInputs, rows: VerifyRows, table: DraftTable) -> Proposal:
    """The proposals in a draft table, and their law ``[D]``: read in place, but for the passes of top-k and top-p."""
    # The passes of top-k and top-p read all rows of a tensor, so a chunk's rows are copied for them.
    mode, count = run.drafts.mode, num_trials(run.drafts.mode, inputs)
    requests, searched = (inputs.slots, inputs.num_drafts), run.schedule.searches_requests
    slots_and_rows = run(rows_of_drafts, rows_like(inputs), *requests, table, searched=searched)
    slots, row_ids = (values[:count] for values in slots_and_rows)
    if rows.edits is not None and edits_drafts(mode):
        values = run(gathered, table, row_ids)
        return _edited_proposal(run.drafts, inputs.table, rows.layout, values, rows.edits)
    row_slots = RowSlots(inputs.table, slots, slots)  # any positions, as for ``proposal_of``

    def law_of_chunk(row_ids: Tensor, row_slots: RowSlots) -> AnyLaw:
        if mode.searches or mode.capacity:
            return row_law(run.drafts, run(gathered, table, row_ids), row_slots)[0]
        blocks = run(order_maxima_of, table, row_ids, **run.drafts.schedule.order.reduction)
        return unfiltered_law(run.drafts, table, blocks, row_slots, row_ids)

    return Proposal(CachedRows(table, row_ids), in_chunks(run.drafts, law_of_chunk, row_ids, row_slots))


def emitted_logprobs(
    run: StepRun, edited: Tensor, inputs: VerifyInputs, outputs: VerifyOutputs
) -> LogprobOutputs | None:
    """The logprobs of each row of logits ``[R]`` for the token that it emits; None if none are asked for."""
    if inputs.logprobs is None:
        return None
    of_trees = () if outputs.node_ids is None else (outputs.node_ids,)
    rows = run(emitted_rows, rows_like(inputs), inputs.slots, inputs.num_drafts, outputs.token_ids, *of_trees)
    row_slots = RowSlots(inputs.table, rows.slots, rows.token_ids)  # positions are not used
    raw = inputs.logits
    if inputs.rows is not None:
        raw = run(gathered, raw, inputs.rows.row_ids) if inputs.logprobs.wanted.of == "raw" else edited
    return logprobs_of(run, raw, edited, row_slots, rows.token_ids, inputs.logprobs)


def with_logprobs(outputs: VerifyOutputs, rows: LogprobOutputs, inputs: VerifyInputs, run: Run) -> VerifyOutputs:
    """The results of a step with the logprobs of its rows ``[R, ...]`` by request and place, ``[N, K+1, ...]``."""
    # Where nothing is emitted, also behind a token that ends the request, they are -1 and -inf.
    of_trees = () if outputs.node_ids is None else (outputs.node_ids,)
    return outputs._replace(logprobs=run(by_request, rows, inputs.num_drafts, outputs.token_ids, *of_trees))
