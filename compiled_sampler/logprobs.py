"""What logprobs a step returns beside its tokens, and what it returns of them: data alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.scalars import check_choice, checked_int

LAWS = ("raw", "processed", "filtered")
"""Laws that logprobs are of: of the logits before edits at temperature 1, of the edited logits at the temperature of
the request, or of the tokens that its filters keep, which is the law that a token is drawn from. Filters of whole rows
are edits here: what they drop is masked."""

_MOST_TOP = 2**22  # no vocabulary has so many tokens
_FLAGS = ("rank", "entropy", "num_kept", "boundary")


@dataclass(frozen=True, kw_only=True)
class Logprobs:
    """Which logprobs a step returns beside its tokens; it is hashable, so that it can be part of a graph's key.

    Args:
        top: n, tokens of the beginning of the order whose logprobs are returned; 0 returns none. Up to 20 are cheap,
            from the candidates of a row; any number is exact.
        of: one of ``LAWS``.
        token_ids: ids whose logprobs are returned for every row; None returns none.
        rank: return the place of the token in the order, 1 for the first.
        entropy: return the entropy of the law.
        num_kept: return how many tokens the filters keep.
        boundary: return the last token that the filters keep, from which ``replay`` finds the kept set in the logits
            that were sampled; refused for batches with filters of whole rows.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: a field out of range.
    """

    top: int = 0
    of: str = "raw"
    token_ids: tuple[int, ...] | None = None
    rank: bool = False
    entropy: bool = False
    num_kept: bool = False
    boundary: bool = False

    def __post_init__(self) -> None:
        """Check every field, and store the numbers of a caller as Python's."""
        object.__setattr__(self, "top", checked_int("top", self.top))
        if not 0 <= self.top < _MOST_TOP:
            raise ValueError(f"top must be in [0, 2**22), got {self.top}; 0 returns no logprobs of top tokens")
        check_choice("of", self.of, LAWS, "'filtered' is the law that tokens have")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}; True returns it")
        if self.token_ids is not None:
            object.__setattr__(self, "token_ids", _checked_ids(self.token_ids))

    @property
    def reads_filters(self) -> bool:
        """Whether results follow from the tokens that the filters keep."""
        return self.of == "filtered" or self.num_kept or self.boundary

    @property
    def label(self) -> str:
        """What is asked for, in one line; another one for each ``Logprobs`` that is not equal."""
        numbers = {"top": self.top, "token_ids": self.token_ids}
        named = [f"{name} {value}" for name, value in numbers.items() if value]
        flags = [name for name in _FLAGS if getattr(self, name)]
        return f"logprobs({', '.join((self.of, *named, *flags))})"


class LogprobInputs(NamedTuple):
    """What a step with logprobs reads besides its other inputs, and which results it returns."""

    wanted: Logprobs
    """What is asked for, the static part."""
    given_ids: Tensor | None = None
    """int64 ``[R, len(wanted.token_ids)]``, those ids for each row; None where none are asked for."""
    processed_scale: Tensor | None = None
    """float32 ``[S]``, ``log2(e) / temperature`` of each slot for the law "processed", at temperature 1 for a request
    of temperature 0. The slot table does not hold the temperature of a request with ``top_k`` 1: without this tensor
    such requests count as temperature 1."""


class LogprobOutputs(NamedTuple):
    """The logprobs of a step: natural logarithms; a field is None where ``Logprobs`` does not name it.

    Floats are -inf and integers -1 where there is nothing: in padding, at tokens that the law leaves out, and in rows
    that are all masked. "raw" leaves out none that has a logit; so of rows that a mask hides whole, only ``token``,
    ``rank``, ``num_kept`` and ``boundary`` are nothing there, and the other fields are of the logits before edits.
    Under verification a field is ``[N, K+1, ...]``, with nothing behind the last token under each law.
    """

    token: Tensor
    """float32 ``[R]``, the logprob of the row's token."""
    rank: Tensor | None = None
    """int64 ``[R]``, the token's place in the order, from 1; of the raw logits if the law is "raw". Filters do not
    change it: a token is kept exactly if its rank in the edited logits is at most ``num_kept``."""
    top_token_ids: Tensor | None = None
    """int64 ``[R, n]``, the first n tokens of the order, of the kept ones if the law is "filtered"."""
    top: Tensor | None = None
    """float32 ``[R, n]``, the logprobs of ``top_token_ids``."""
    given: Tensor | None = None
    """float32 ``[R, len(token_ids)]``, the logprobs of ``Logprobs.token_ids``, each below V."""
    entropy: Tensor | None = None
    """float32 ``[R]``, the entropy of the law in nats, at least 0."""
    num_kept: Tensor | None = None
    """int64 ``[R]``, the tokens that pass the mask and the filters, at least 1 where there is a token."""
    boundary: Tensor | None = None
    """int64 ``[R]``, the last of these tokens, packed (order key, id); ``KEEP_ALL`` for a request without filters; the
    first token of the order for a greedy one. The key is that of a logit: in other logits it tells another set."""


def layout_of_outputs(wanted: Logprobs) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The dtype of each field of ``LogprobOutputs`` that is returned, and its shape behind ``[R]`` or ``[N, K+1]``."""
    integer, real = torch.int64, torch.float32
    top, given = (wanted.top,), (len(wanted.token_ids or ()),)
    every = {
        "token": (True, real, ()),
        "rank": (wanted.rank, integer, ()),
        "top_token_ids": (wanted.top > 0, integer, top),
        "top": (wanted.top > 0, real, top),
        "given": (wanted.token_ids is not None, real, given),
        "entropy": (wanted.entropy, real, ()),
        "num_kept": (wanted.num_kept, integer, ()),
        "boundary": (wanted.boundary, integer, ()),
    }
    return {name: (dtype, tail) for name, (is_wanted, dtype, tail) in every.items() if is_wanted}


def check_token_ids(wanted: Logprobs, vocab_size: int) -> None:
    """Raise unless every id of ``Logprobs.token_ids`` is below ``vocab_size``.

    Raises:
        ValueError: an id that is no token.
    """
    for token_id in wanted.token_ids or ():
        if token_id >= vocab_size:
            raise ValueError(
                f"token_ids must be in [0, {vocab_size}), got {token_id}; vocab_size is {vocab_size}, and columns "
                "beyond it are padding"
            )


def _checked_ids(token_ids: object) -> tuple[int, ...]:
    """Ids as a tuple of Python ints, none of them negative; an empty one is refused."""
    if not isinstance(token_ids, Iterable) or isinstance(token_ids, str | bytes | Mapping | Set):
        raise TypeError(f"token_ids must be a tuple of ints or None, got {token_ids!r}; None returns none")
    ids = tuple(checked_int("token_ids", token_id) for token_id in token_ids)
    if not ids:
        raise ValueError("token_ids must name a token, got none; pass None to return no logprobs of given tokens")
    if min(ids) < 0:
        raise ValueError(f"token_ids must be >= 0, got {min(ids)}; a token id is a column of the logits")
    return ids
