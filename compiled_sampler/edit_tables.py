"""What edits of logits read: named tuples of tensors by slot; each field's docstring gives dtype, shape and unit.

A field that is None is an edit that no request of the batch has. So what a step reads says which edits it makes.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from compiled_sampler.edit_names import Leave
from compiled_sampler.logit_edit import CustomEdits

UNWRITTEN = -1
"""The token of a position that holds none."""
NO_SUCCESSOR = 2**31 - 1
"""The successor of a position behind which the same token does not stand."""
NO_TOKEN = 2**31 - 1
"""What stands behind the last token of an ascending list."""

TOKEN, ORDINAL, SUCCESSOR = range(3)
"""The numbers of a position in ``History.entries``."""


class History(NamedTuple):
    """The tokens of every request by position, and what is known of each when it is written.

    Entries depend on earlier positions alone, so a step that is run again, or a draft that is rejected, leaves nothing
    behind: what stands at or after a row's own position is not read, and is written again before it is.
    """

    entries: Tensor
    """int32 ``[S + 1, 3, L]``; slot S takes what padding writes. By position: the token, ``UNWRITTEN`` for none; how
    many times it was drawn up to there; the next position that holds it too, ``NO_SUCCESSOR`` for none."""
    prompt_lens: Tensor
    """int32 ``[S]``, the positions of the prompt; the others were drawn."""
    is_read: Tensor
    """int32 ``[S]``, 1 for requests with an edit that reads it."""


class HistoryRows(NamedTuple):
    """All numbers of ``History.entries`` in one row, int32 ``[1, n]``: four times the same memory.

    A record writes four numbers of a token. What is written into one argument is written one behind the other, each in
    a kernel of its own; what is written into four is written at once.
    """

    token: Tensor
    """For the tokens."""
    ordinal: Tensor
    """For how many times they were drawn."""
    successor: Tensor
    """For the positions that hold them next."""
    before: Tensor
    """For the successors of the positions that held them last."""


class AllowedIds(NamedTuple):
    """The tokens that may be drawn."""

    words: Tensor
    """int32 ``[S, ceil(V / 32)]``, a bit for each token, lowest first; -1 in all words allows every token."""


class BiasLists(NamedTuple):
    """What is added to logits."""

    counts: Tensor
    """int32 ``[S]``, entries of each request."""
    token_ids: Tensor
    """int32 ``[S, B]``, ascending, each id once, then ``NO_TOKEN``."""
    biases: Tensor
    """float32 ``[S, B]``, finite or -inf."""


class StopLists(NamedTuple):
    """Tokens that end a request, and how many tokens must come before one."""

    prompt_lens: Tensor
    """int32 ``[S]``, as in ``History``."""
    min_tokens: Tensor
    """int32 ``[S]``, tokens drawn before one that ends the request can be."""
    counts: Tensor
    """int32 ``[S]``, tokens that end each request."""
    token_ids: Tensor
    """int32 ``[S, T]``, each id once."""


class Penalties(NamedTuple):
    """Penalties of tokens that the history holds."""

    repetition: Tensor
    """float32 ``[S]``, in [2**-20, 2**20]; what negative logits are multiplied by, 1 for no penalty."""
    inverse: Tensor
    """float32 ``[S]``, ``1 / repetition`` rounded once; what positive logits are multiplied by."""
    frequency: Tensor
    """float32 ``[S]``, in [-2, 2]; subtracted for each time that the token was drawn."""
    presence: Tensor
    """float32 ``[S]``, in [-2, 2]; subtracted once if the token was drawn."""
    of_output: Tensor
    """int32 ``[S]``, 1 if ``repetition`` is of tokens that were drawn alone, 0 if of those of the prompt too."""


class Dry(NamedTuple):
    """Penalties of tokens that would prolong a repetition."""

    ranges: Tensor
    """int32 ``[S]``, tokens before a row that are looked at; 0 for all."""
    penalties: Tensor
    """float32 ``[S, n + 1]``, what is subtracted by the length of the repetition, at most n tokens; 0 for none."""
    num_breakers: Tensor
    """int32 ``[S]``, sequence breakers of each request."""
    breakers: Tensor
    """int32 ``[S, K]``, tokens that no repetition holds, each id once."""


class BadWords(NamedTuple):
    """Sequences of tokens that must not be completed."""

    counts: Tensor
    """int32 ``[S]``, words of each request."""
    token_ids: Tensor
    """int32 ``[S, W, M]``, each word at the end of its row, behind ``UNWRITTEN``."""
    prompt_lens: Tensor
    """int32 ``[S]``, as in ``History``; 0 where words may begin in the prompt."""


class Watermarks(NamedTuple):
    """What the noise of requests is keyed by."""

    num_tokens: Tensor
    """int32 ``[S]``, tokens before a row whose hash takes the place of the position; 0 for the position itself."""


class TopNSigma(NamedTuple):
    """Requests that keep tokens within so many standard deviations of the largest logit."""

    number: Tensor
    """float64 ``[S]``, deviations; 0 keeps every token."""


class MinK(NamedTuple):
    """Requests that keep tokens before the cliff of their logits."""

    tau: Tensor
    """float64 ``[S]``, ranks times the range of logits that are kept behind it too; -1 keeps every token."""


class PLess(NamedTuple):
    """Requests that keep tokens as likely as a token is to be drawn twice."""

    is_on: Tensor
    """int32 ``[S]``, 0 keeps every token."""


class TypicalP(NamedTuple):
    """Requests that keep tokens of about as much surprise as the law has in the mean."""

    share: Tensor
    """float64 ``[S]``, of the mass; 1 keeps every token."""


class Xtc(NamedTuple):
    """Requests that exclude their top choices from some draws."""

    threshold: Tensor
    """float64 ``[S]``, the least probability of a top choice."""
    probability: Tensor
    """float64 ``[S]``, of an exclusion; 0 for none."""


class RequestNumbers(NamedTuple):
    """What edits of the user are told of each request."""

    columns: Tensor
    """int64 ``[S, n]``: of each edit 1 for requests that have it, else 0, then its parameters; floats by their bits."""


class RequestState(NamedTuple):
    """What an edit of the user reads of each slot, and an engine writes."""

    values: Tensor
    """``[S, ...]``, as its ``EditState`` says."""


class CustomTables(NamedTuple):
    """What edits of the user read that does not differ between steps."""

    numbers: RequestNumbers
    """By slot."""
    tokens: tuple[Tensor, ...]
    """``[1, V]`` each, the tables of the edits in their order."""
    states: tuple[RequestState, ...] = ()
    """By slot, the states of the edits in their order."""


TABLES = (
    *(History, HistoryRows, AllowedIds, BiasLists, StopLists, Penalties, Dry, BadWords, Watermarks),
    *(RequestNumbers, RequestState, TopNSigma, MinK, PLess, TypicalP, Xtc),
)
"""Tables that have one size for every batch, like a slot table."""


class RowFilters(NamedTuple):
    """The filters that look at whole rows, by slot; None for one that no request of the batch has."""

    scale: Tensor
    """float32 ``[S]``, ``log2(e) / temperature``, also of requests with ``top_k`` 1, whose scale in the slot table is
    1; for all but top-n-sigma and min-k, which no temperature changes."""
    top_n_sigma: TopNSigma | None = None
    min_k: MinK | None = None
    p_less: PLess | None = None
    typical_p: TypicalP | None = None
    xtc: Xtc | None = None


class EditTables(NamedTuple):
    """The edits of every request by slot."""

    allowed: AllowedIds | None = None
    bias: BiasLists | None = None
    stops: StopLists | None = None
    """For ``min_tokens``, and for the end of a request."""
    penalties: Penalties | None = None
    dry: Dry | None = None
    words: BadWords | None = None
    history: History | None = None
    """Given if another field reads it."""
    custom: CustomTables | None = None
    """For the edits of the user."""
    filters: RowFilters | None = None
    """Given if one of them is."""


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


class NoiseInputs(NamedTuple):
    """What keys the noise of a step instead of the positions of its rows."""

    watermarks: Watermarks
    history: History
