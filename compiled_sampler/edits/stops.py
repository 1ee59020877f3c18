"""The end of a request: tokens that stop it, of a sampled row and of a verification."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.batch import RowStatus, SampleOutputs, VerifyOutputs
from compiled_sampler.edits.min_tokens import StopLists


def with_finished(drawn: SampleOutputs, slots: Tensor, stops: StopLists) -> SampleOutputs:
    """The draws of a step, with ``finished``: bool ``[R]``, whether a row's token ends its request."""
    return SampleOutputs(drawn.token_ids, drawn.status, are_ends(drawn.token_ids, drawn.status, slots, stops))


def are_ends(token_ids: Tensor, status: Tensor, slots: Tensor, stops: StopLists, *, num_places: int = 0) -> Tensor:
    """Whether the tokens of rows end their requests, bool ``[R]``."""
    return _is_stop(token_ids[:, None], slots, stops, num_places)[:, 0] | _is_all_masked(status)


def cut_at_stop(made: VerifyOutputs, slots: Tensor, stops: StopLists) -> VerifyOutputs:
    """The tokens of a verification up to the first that ends its request, with ``finished``, bool ``[N]``."""
    ends = _is_stop(made.token_ids, slots, stops)
    place = torch.arange(ends.shape[1], device=ends.device)
    length = torch.where(ends, place + 1, ends.shape[1]).amin(-1)
    emitted = torch.minimum(made.num_emitted, length)
    is_masked = _is_all_masked(made.status) & (made.num_emitted == emitted)
    return VerifyOutputs(
        token_ids=torch.where(place < length[:, None], made.token_ids, -1),
        num_emitted=emitted,
        num_accepted=torch.minimum(made.num_accepted, length),
        num_matching=made.num_matching,
        status=made.status,
        finished=ends.any(-1) | is_masked,
        node_ids=None if made.node_ids is None else torch.where(place[:-1] < length[:, None], made.node_ids, -1),
    )


def _is_stop(token_ids: Tensor, slots: Tensor, stops: StopLists, num_places: int = 0) -> Tensor:
    """Whether tokens end their request: bool ``[N, K]``; -1 never does."""
    slot, width = slots.clamp(min=0), stops.token_ids.shape[1]
    # also places that no list has, up to ``num_places``: one kernel may look at a longer list there
    place = torch.arange(max(width, num_places), device=slots.device)
    is_entry = (place < stops.counts[slot][:, None]) & (slots >= 0)[:, None]
    entries = torch.where(is_entry, stops.token_ids[slot[:, None], place.clamp(max=width - 1)].to(torch.int64), -2)
    return (token_ids[:, :, None] == entries[:, None, :]).any(-1)


def _is_all_masked(status: Tensor) -> Tensor:
    """Whether a row has no token, which ends its request too; false for padding, whose status is -1."""
    return (status >= 0) & ((status & int(RowStatus.ALL_MASKED)) != 0)
