"""Requests of a verification in chunks, each a batch of its own; and batches that are too small to be compiled for.

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
from compiled_sampler.logprobs import mapped
from compiled_sampler.modes import Mode, edits_drafts
from compiled_sampler.pipeline.chunks import in_chunks_to
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


def for_several(inputs: VerifyInputs, run: Run, verify: Callable[[VerifyInputs], VerifyOutputs]) -> VerifyOutputs:
    """The results of a verification, of compiled stages for two requests and two rows at least."""
    # Stages for one would be a third of the kernels. So a single request gets one of padding, and a single row too.
    if not fuses(run):
        return verify(inputs)
    if inputs.slots.shape[0] > 1:
        return verify(_with_two_rows(inputs))
    requests = inputs.slots, inputs.positions, inputs.num_drafts, inputs.draft_token_ids, inputs.parents
    slots, positions, num_drafts, drafts, parents = run(with_padding, *requests)
    padded = inputs._replace(slots=slots, positions=positions, num_drafts=num_drafts)
    padded = padded._replace(draft_token_ids=drafts, parents=parents)
    return _first_request(verify(_with_two_rows(padded)))


def _with_two_rows(inputs: VerifyInputs) -> VerifyInputs:
    """The inputs with two rows at least in every tensor by row."""
    edits, logprobs, rows = inputs.edits, inputs.logprobs, inputs.rows
    if isinstance(inputs.proposals, Tensor):
        inputs = inputs._replace(proposals=_two_rows(inputs.proposals))
    if edits is not None:
        mask = None if edits.token_bitmask is None else _two_rows(edits.token_bitmask)
        custom_tensors = tuple(map(_two_rows, edits.given))
        inputs = inputs._replace(edits=edits._replace(token_bitmask=mask, given=custom_tensors))
    if logprobs is not None and logprobs.given_ids is not None:
        inputs = inputs._replace(logprobs=logprobs._replace(given_ids=_two_rows(logprobs.given_ids)))
    if rows is not None:
        proposal_ids = None if rows.proposal_ids is None else _two_rows(rows.proposal_ids)
        inputs = inputs._replace(rows=RequestRows(_two_rows(rows.row_ids), proposal_ids))
    return inputs._replace(logits=_two_rows(inputs.logits))


def _first_request(outputs_of_two: VerifyOutputs) -> VerifyOutputs:
    outputs = {name: each[:1] for name, each in outputs_of_two._asdict().items() if isinstance(each, Tensor)}
    logprobs = outputs_of_two.logprobs
    return VerifyOutputs(**outputs, logprobs=None if logprobs is None else mapped(logprobs, lambda each: each[:1]))


def _two_rows(values: Tensor) -> Tensor:
    """At least two rows, the new ones 0."""
    if values.shape[0] > 1:
        return values
    return F.pad(values, (*(0, 0) * (values.dim() - 1), 0, 2 - values.shape[0]))
