"""Requests of a verification in chunks, each a batch of its own; and a batch of one, padded to two.

How many rows a request has is known on the device alone. So a chunk has a fixed number of requests, and room for as
many rows as these may have: the rows from the first one's on, of which the last may be those of the next chunk. They
are copied where edits copy rows anyway. A request's results are a function of its own rows, so chunks change no bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import RequestRows, VerifyInputs, VerifyOutputs
from compiled_sampler.core.stage import Run, fuses
from compiled_sampler.modes import Mode, edits_drafts
from compiled_sampler.pipeline.chunks import in_chunks_to, map_rows, part_of
from compiled_sampler.pipeline.edits import makes_copy
from compiled_sampler.pipeline.schedule import request_ends
from compiled_sampler.pipeline.verify_rows import edits_of_rows, proposed, verify_schedules
from compiled_sampler.speculation.row_layout import Starts, gathered, request_starts, rows_of_requests, with_padding


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

    searched = verify_schedules(mode, inputs).requests.searches_requests
    starts = run(request_starts, inputs.num_drafts, searched=searched)
    requests = inputs.slots, inputs.positions, inputs.num_drafts, inputs.draft_token_ids, inputs.parents
    return in_chunks_to(ends, verified_chunk, *requests, starts)


def padded_to_two(inputs: VerifyInputs, run: Run, verify: Callable[[VerifyInputs], VerifyOutputs]) -> VerifyOutputs:
    """The results of a verification, of compiled stages for two requests and two rows at least."""
    # Stages for one would be a third of the kernels. So a single request gets one of padding, and a single row too.
    if not fuses(run):
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
    if edits is None or not (makes_copy(inputs.logits, edits) or _copies_drafts(mode, inputs)):
        return [requests]
    return request_ends(mode, requests, inputs.logits.shape[0], width + 1)


def _copies_drafts(mode: Mode, inputs: VerifyInputs) -> bool:
    return edits_drafts(mode) and proposed(mode, inputs) is not None


def _of_rows(mode: Mode, inputs: VerifyInputs, rows: RequestRows, run: Run) -> VerifyInputs:
    """The inputs with tensors by row of these rows alone, but for logits that are edited, which stay where they are."""
    edits, logprobs, proposals = inputs.edits, inputs.logprobs, inputs.proposals
    if rows.proposal_ids is not None and not edits_drafts(mode):
        proposals = run(gathered, proposed(mode, inputs), rows.proposal_ids)
    if logprobs is not None and logprobs.given_ids is not None:
        logprobs = logprobs._replace(given_ids=logprobs.given_ids[rows.row_ids])
    edits = None if edits is None else edits_of_rows(edits, rows.row_ids)
    return inputs._replace(edits=edits, logprobs=logprobs, proposals=proposals, rows=rows)
