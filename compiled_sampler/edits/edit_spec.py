"""What one edit or one filter of whole rows declares: parameters, room in a slot's row, table, and who else names it.

A file of this folder has the declaration, the table and the stage of one edit; the list of all stands in the folder's
``__init__``. These files stand below ``SamplingParams``, which is made of what they declare. Behind the declarations
stand the checks that several parameters have, each from what a caller gave to what is stored; and that of
``extra_args``.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from compiled_sampler.scalars import check_choice, checked_float, checked_int

Params = Any  # ``SamplingParams``, which are checked and stand above
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
        for size in dataclasses.fields(self):
            value = checked_int(size.name, getattr(self, size.name))
            if value < 1:
                raise ValueError(f"{size.name} must be >= 1, got {value}; it counts entries of a request")
            object.__setattr__(self, size.name, value)


class SlotRow(NamedTuple):
    """What the numbers in a slot's row depend on besides the parameters of its request."""

    prompt_len: int
    reads_history: bool  # whether an edit of the request does, also one of the user
    sizes: EditSizes
    vocab_size: int


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
    shape: Callable[[EditSizes, int], tuple[int, ...]] = lambda sizes, vocab_size: ()
    """From the sizes and V."""


PROMPT_LEN = Column(lambda params, row: row.prompt_len, off=None)  # positions of the prompt; those behind were drawn


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
    parameters: Mapping[str, Parameter] = field(default_factory=lambda: MappingProxyType({}))
    """The fields of ``SamplingParams`` that are its own."""
    wanted: Callable[[Params], bool] = lambda params: False
    """Whether a request has the edit; a greedy one, which has no law, has no filter either."""
    check_request: Callable[[Params], None] = _nothing_to_check
    """Raises ValueError where parameters contradict each other."""
    entries: Mapping[str, Callable[[Params], int]] = field(default_factory=lambda: MappingProxyType({}))
    """How many entries of its row a request takes, by field of ``EditSizes``."""
    named_ids: Mapping[str, Callable[[Params], Sequence[int]]] = field(default_factory=lambda: MappingProxyType({}))
    """The token ids of which a request asks something, by parameter: the vocabulary must have them."""
    check_vocabulary: Callable[[Params, int], None] = _nothing_to_check
    """Raises ValueError where a request fits no vocabulary of V tokens for another reason."""
    table: type[Any] | None = None
    """The named tuple that its stage reads; one of kind "list" is a ``ListTable``."""
    columns: Mapping[str, Column] = field(default_factory=lambda: MappingProxyType({}))
    """By field of the table."""
    reads_history: bool = False
    reads_positions: bool = False
    """Whether the position of a row matters besides the history that stands before it."""

    def check_fits(self, params: Params, sizes: EditSizes, vocab_size: int) -> None:
        """Raise unless a row has room for the entries of a request, and the vocabulary has the tokens that it names."""
        for name, count_of in self.entries.items():
            count, most = count_of(params), getattr(sizes, name)
            if count > most:
                way_out = f"Sampler(edit_sizes=EditSizes({name}={count}))"
                raise ValueError(f"{name} of a request must be at most {most}, got {count}; {way_out}")
        for name, ids_of in self.named_ids.items():
            largest = max(ids_of(params), default=0)
            if largest >= vocab_size:
                raise ValueError(f"{name} must be below vocab_size {vocab_size}, got {largest}; leave it out")
        self.check_vocabulary(params, vocab_size)


_LEAST_NORMAL = np.finfo(np.float32).tiny


def normal(value: float) -> np.float32:
    """A number in float32, 0 for a denormal, which some modes of a CPU take for 0."""
    rounded = np.float32(value)
    return rounded if abs(rounded) >= _LEAST_NORMAL else np.float32(0.0)


MAX_TOKEN_ID = 2**31 - 2
SCOPES = ("all", "output")
"""The tokens that a parameter looks at: those of the prompt and those that were drawn, or the latter alone."""


def checked_token_ids(name: str, values: object) -> tuple[int, ...]:
    """Token ids as a tuple of Python ints, each once, in the order in which they came."""
    if values is None:
        return ()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence of ints, got {values!r}; [id, ...]")
    return tuple(dict.fromkeys(checked_token_id(name, each) for each in values))


def checked_token_id(name: str, value: object) -> int:
    """A token id as a Python int."""
    found = checked_int(name, value, "token ids are Python ints")
    if not 0 <= found <= MAX_TOKEN_ID:
        raise ValueError(f"{name} must be >= 0 and below the vocabulary's size, got {found}; leave it out")
    return found


def in_range(
    text: str, holds: Callable[[float], bool], way_out: str, number_of: Callable[[str, object], float] = checked_float
) -> Callable[[str, object], float]:
    """A check of a parameter that is a number, stored as one of Python; ``text`` is the range as errors have it."""

    def check(name: str, value: object) -> float:
        number = number_of(name, value)
        if not holds(number):
            raise ValueError(f"{name} must be {text}, got {number}; {way_out}")
        return number

    return check


count_in_range = functools.partial(in_range, number_of=checked_int)


def checked_flag(name: str, value: object, way_out: str) -> bool:
    """A bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}; {way_out}")
    return value


def check_scope(name: str, value: object) -> object:
    """A scope, which is "all" or "output"."""
    check_choice(name, value, SCOPES, "'all' looks at the prompt too")
    return value


def checked_extra_args(name: str, values: object) -> tuple[tuple[str, Any], ...]:
    """What a request sets for edits of the user, as pairs by name: a dataclass as it is, or pairs of the parameters."""
    way_out = "{name: {parameter: number}}"
    pairs = values.items() if isinstance(values, Mapping) else () if values is None else values
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise TypeError(f"{name} must map names of edits to parameters, got {values!r}; {way_out}")
    made = dict[str, Any]()
    for pair in pairs:
        edit, given = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (None, None)
        if not isinstance(edit, str) or edit in made:
            raise TypeError(f"{name} must map each name of an edit to parameters, got {values!r}; {way_out}")
        made[edit] = _checked_args(edit, given)
    return tuple(sorted(made.items(), key=lambda pair: pair[0]))


def _checked_args(name: str, given: object) -> Any:
    """Parameters of one edit in a form that has a hash."""
    if dataclasses.is_dataclass(given) and not isinstance(given, type) and type(given).__hash__ is not None:
        return given
    if isinstance(given, Mapping):
        given = tuple(given.items())
    if not isinstance(given, tuple) or not all(isinstance(each, tuple) and len(each) == 2 for each in given):
        raise TypeError(
            f"extra_args of {name} must be a mapping or a frozen dataclass, got {given!r}; {{}} if it has no parameters"
        )
    keys = [key for key, _ in given]
    for key, value in given:
        if not isinstance(key, str) or keys.count(key) > 1:
            raise TypeError(f"extra_args of {name} must name each parameter once, by a str, got {key!r}")
        if not isinstance(value, numbers.Real | np.bool_):
            raise TypeError(f"{key} of {name} must be a number, got {value!r}; a float, an int or a bool")
    return tuple(sorted(given))
