"""What the edits of a step read: the tables of its edits, by slot, and what comes with the call.

An edit that no request of the batch has is not there. So what a step reads says which edits it makes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from compiled_sampler.edits import EDIT_SPECS
from compiled_sampler.edits.allowed_token_ids import AllowedIds
from compiled_sampler.edits.changes import ListTable
from compiled_sampler.edits.history import AnyHistory, History, HistoryRows, RowPaths
from compiled_sampler.edits.names import Leave
from compiled_sampler.edits.watermark import Watermarks
from compiled_sampler.logit_edit import CustomEdits


class RequestNumbers(NamedTuple):
    """What edits of the user are told of each request."""

    columns: Tensor
    """int64 ``[S, n]``: of each edit 1 for requests that have it, else 0, then its parameters; floats by their bits."""


class RequestState(NamedTuple):
    """What an edit of the user reads of each slot, and an engine writes."""

    values: Tensor  # [S, ...], as its EditState says


class CustomTables(NamedTuple):
    """What edits of the user read that does not differ between steps."""

    numbers: RequestNumbers  # by slot
    tokens: tuple[Tensor, ...]  # [1, V] each, the tables of the edits in their order
    states: tuple[RequestState, ...] = ()  # by slot, the states of the edits in their order


TABLES: tuple[type[Any], ...] = (
    *(History, HistoryRows, RequestNumbers, RequestState),
    *(spec.table for spec in EDIT_SPECS if spec.table is not None),
)
"""Tables that have one size for every batch, like a slot table."""


class RowFilters(NamedTuple):
    """The filters that look at whole rows."""

    scale: Tensor
    """float32 ``[S]``, ``log2(e) / temperature``, also of requests with ``top_k`` 1, whose scale in the slot table is
    1; for all but top-n-sigma and min-k, which no temperature changes."""
    tables: tuple[Any, ...]
    """By slot, of the filters that a request of the batch has, in the order in which they act; one at least."""


class EditTables(NamedTuple):
    """The edits of every request by slot."""

    allowed: AllowedIds | None = None
    lists: tuple[ListTable, ...] = ()  # of the edits that write a few tokens of each row, in the order in which they do
    history: AnyHistory | None = None  # given if another field reads it
    custom: CustomTables | None = None  # for the edits of the user
    filters: RowFilters | None = None  # given if a request has one


class EditInputs(NamedTuple):
    """What the edits of a step read."""

    tables: EditTables
    """By slot."""
    token_bitmask: Tensor | None = None
    """int32 ``[R, >= ceil(V / 32)]``, a bit for each token that the row may draw, lowest first; -1 masks none."""
    leave: Leave = False
    """Leave to write lists into logits of float32, so that they need no copy; ``RESTORE`` if the last stage undoes
    it, to the bit."""
    custom: CustomEdits | None = None
    """The edits of the user that act; None for none."""
    given: tuple[Tensor, ...] = ()
    """The tensors of the call that these read, in the order of the edits and their inputs: ``[R, >= V]`` or ``[R]``."""
    paths: RowPaths | None = None
    """The drafts before each row of trees ``[R]``; None where the history holds all that is before a row."""


class NoiseInputs(NamedTuple):
    """What keys the noise of a step instead of the positions of its rows."""

    watermarks: Watermarks
    history: History
    paths: RowPaths | None = None  # as in EditInputs
