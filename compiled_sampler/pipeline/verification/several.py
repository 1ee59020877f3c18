"""Verifications of two requests and two rows at least, so that all stages are compiled for several alone."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import RequestRows, VerifyInputs, VerifyOutputs
from compiled_sampler.core.stage import Run, fuses
from compiled_sampler.logprobs import mapped
from compiled_sampler.speculation.row_layout import with_padding


def for_several(inputs: VerifyInputs, run: Run, verify: Callable[[VerifyInputs], VerifyOutputs]) -> VerifyOutputs:
    """The results of a verification, of compiled stages for two requests and two rows at least.

    A single request gets another of padding, and single rows too: a third of the kernels.

    Args:
        inputs: of the step.
        run: how a stage is run.
        verify: the step.
    """
    if not fuses(run):
        return verify(inputs)
    if inputs.slots.shape[0] > 1:
        return verify(_with_two_rows(inputs))
    requests = inputs.slots, inputs.positions, inputs.num_drafts, inputs.draft_token_ids
    slots, positions, num_drafts, drafts = run(with_padding, *requests)
    padded = inputs._replace(slots=slots, positions=positions, num_drafts=num_drafts, draft_token_ids=drafts)
    return _first_request(verify(_with_two_rows(padded)))


def _with_two_rows(inputs: VerifyInputs) -> VerifyInputs:
    """The inputs with two rows at least in every tensor by row."""
    edits, logprobs, rows = inputs.edits, inputs.logprobs, inputs.rows
    if isinstance(inputs.proposals, Tensor):
        inputs = inputs._replace(proposals=_two_rows(inputs.proposals))
    if edits is not None:
        mask = None if edits.token_bitmask is None else _two_rows(edits.token_bitmask)
        given = tuple(map(_two_rows, edits.given))
        inputs = inputs._replace(edits=edits._replace(token_bitmask=mask, given=given))
    if logprobs is not None and logprobs.given_ids is not None:
        inputs = inputs._replace(logprobs=logprobs._replace(given_ids=_two_rows(logprobs.given_ids)))
    if rows is not None:
        proposal_ids = None if rows.proposal_ids is None else _two_rows(rows.proposal_ids)
        inputs = inputs._replace(rows=RequestRows(_two_rows(rows.row_ids), proposal_ids))
    return inputs._replace(logits=_two_rows(inputs.logits))


def _first_request(made: VerifyOutputs) -> VerifyOutputs:
    """The results of the first request alone."""
    outputs = {name: each[:1] for name, each in made._asdict().items() if isinstance(each, Tensor)}
    found = made.logprobs
    return VerifyOutputs(**outputs, logprobs=None if found is None else mapped(found, lambda each: each[:1]))


def _two_rows(values: Tensor) -> Tensor:
    """At least two rows, the new ones 0."""
    if values.shape[0] > 1:
        return values
    return F.pad(values, (*(0, 0) * (values.dim() - 1), 0, 2 - values.shape[0]))
