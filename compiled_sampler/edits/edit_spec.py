"""What one edit or one filter of whole rows declares: parameters, room in a slot's row, table, and who else names it.

A file of this folder has the declaration, the table and the stage of one edit; the list of all stands in the folder's
``__init__``. These files stand below ``SamplingParams``, which is made of what they declare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from compiled_sampler.scalars import checked_int

Params = Any
"""``SamplingParams``, which are checked and stand above."""
Kind = Literal["mask", "list", "noise", "history", "end", "filter"]
"""A mask of tokens; a list of a few tokens that are written into each row; what keys the noise; reading the history;
the end of a request; a filter of whole rows. Noise, history and end change no logit."""


@dataclass(frozen=True)
class EditSizes:
    """How many entries the edits of a request may have; memory of a slot grows with them, and work of a step a little.

    Raises:
        TypeError: a size that is no int.
        ValueError: a size below 1.
    """

    biases: int = 512
    """Tokens of ``logit_bias``."""
    stops: int = 32
    """Tokens that end a request."""
    bad_words: int = 32
    """Sequences of ``bad_words_token_ids``."""
    bad_word_len: int = 8
    """Tokens of such a sequence."""
    breakers: int = 32
    """Tokens of ``dry_sequence_breakers``."""

    def __post_init__(self) -> None:
        """Check every size."""
        for name in ("biases", "stops", "bad_words", "bad_word_len", "breakers"):
            value = checked_int(name, getattr(self, name))
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}; it counts entries of a request")
            object.__setattr__(self, name, value)


class SlotRow(NamedTuple):
    """What the numbers in a slot's row depend on besides the parameters of its request."""

    prompt_len: int
    reads_history: bool
    """Whether an edit of the request does, also one of the user."""
    sizes: EditSizes
    vocab_size: int


def _one_number(sizes: EditSizes, vocab_size: int) -> tuple[int, ...]:
    return ()


@dataclass(frozen=True, eq=False)
class Column:
    """Numbers of a request in its slot's row, which a table reads; the same column may be in several tables."""

    value: Callable[[Params, SlotRow], Any]
    """Of a request that has the edit: a number, or as many as the shape has, or the first of them."""
    off: float | None = 0
    """Each number of a request without the edit, and behind the last one of a list; None where ``value`` is of every
    request."""
    dtype: torch.dtype = torch.int32
    """Of 4 or 8 bytes."""
    shape: Callable[[EditSizes, int], tuple[int, ...]] = _one_number
    """From the sizes and V."""


PROMPT_LEN = Column(lambda params, row: row.prompt_len, off=None)
"""Positions of the prompt; those behind were drawn."""


@dataclass(frozen=True)
class Parameter:
    """A field of ``SamplingParams`` that belongs to an edit."""

    check: Callable[[str, Any], Any]
    """From the field's name and what a caller gave to what is stored; raises TypeError or ValueError."""
    in_vllm: bool = False
    """Whether vLLM's own parameters say it; for others its ``extra_args`` do."""
    in_generate: bool = False
    """Whether a GenerationConfig of transformers has it under the same name."""
    in_openai: bool = True
    """Whether a request body of OpenAI's API may have it under the same name; it does unless an edit says otherwise."""
    off_at_minus_1: bool = False
    """Whether -1 in a request body means 0."""
    aliases: Mapping[str, Callable[[Any], dict[str, Any]]] = field(default_factory=lambda: MappingProxyType({}))
    """Other names in request bodies, each with what a value means as fields of ``SamplingParams``."""


def _nothing_to_check(*values: Any) -> None:
    return None


@dataclass(frozen=True, eq=False, kw_only=True)
class EditSpec:
    """One edit of logits, one filter of whole rows, or what else a request may carry besides its law."""

    name: str
    """In ``SamplingParams.edits``, ``captured_edits`` and logs."""
    kind: Kind
    effect: str
    """What it does, in a line of a table for users."""
    parameters: Mapping[str, Parameter] = field(default_factory=lambda: MappingProxyType({}))
    """The fields of ``SamplingParams`` that are its own."""
    wanted: Callable[[Params], bool] = lambda params: False
    """Whether a request has the edit; a greedy one, which has no law, has no filter either."""
    check_request: Callable[[Params], None] = _nothing_to_check
    """Raises ValueError where parameters contradict each other."""
    check_fits: Callable[[Params, EditSizes, int], None] = _nothing_to_check
    """Raises ValueError where a request has too many entries, or asks something of a token id of V or more."""
    table: type[Any] | None = None
    """The named tuple that its stage reads; one of kind "list" is a ``ListTable``."""
    columns: Mapping[str, Column] = field(default_factory=lambda: MappingProxyType({}))
    """By field of the table."""
    reads_history: bool = False
    reads_positions: bool = False
    """Whether the position of a row matters besides the history that stands before it."""


def check_count(name: str, count: int, sizes: EditSizes) -> None:
    """Raise unless a row has room for the entries of a request; ``name`` is that of the size."""
    most = getattr(sizes, name)
    if count > most:
        way_out = f"Sampler(edit_sizes=EditSizes({name}={count}))"
        raise ValueError(f"{name} of a request must be at most {most}, got {count}; {way_out}")


def check_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise unless the vocabulary has the tokens of a parameter."""
    if max(token_ids, default=0) >= vocab_size:
        raise ValueError(f"{name} must be below vocab_size {vocab_size}, got {max(token_ids)}; leave it out")


def normal(value: float) -> np.float32:
    """A number in float32, 0 for a denormal, which some modes of a CPU take for 0."""
    rounded = np.float32(value)
    return rounded if abs(rounded) >= np.finfo(np.float32).tiny else np.float32(0.0)
