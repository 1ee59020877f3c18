"""A verification of a single request or a single row, padded so that stages compiled for more serve it."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import RequestRows, VerifyInputs, VerifyOutputs
from compiled_sampler.core.stage import Run, fuses
from compiled_sampler.logprobs import mapped
from compiled_sampler.speculation.row_layout import with_padding


def padded_to_two(inputs: VerifyInputs, run: Run, verify: Callable[[VerifyInputs], VerifyOutputs]) -> VerifyOutputs:
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
