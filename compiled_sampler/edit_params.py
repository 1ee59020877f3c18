"""Checks of the parameters of one request that edit logits or end the request."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NamedTuple

import numpy as np

from compiled_sampler.scalars import check_choice, checked_float, checked_int

_MOST_BIAS = float(np.finfo(np.float32).max)
MAX_TOKEN_ID = 2**31 - 2
MOST_WATERMARK_TOKENS = 8
MOST_REPEATED = 50
"""Tokens of a repetition that DRY tells apart; longer ones are penalized like these."""
MOST_XTC_THRESHOLD = 0.5
"""Above it no two tokens can both be top choices."""
SCOPES = ("all", "output")
"""The tokens that a parameter looks at: those of the prompt and those that were drawn, or the latter alone."""


def checked_token_ids(name: str, values: object) -> tuple[int, ...]:
    """Token ids as a tuple of Python ints, each once, in the order in which they came.

    Args:
        name: of the parameter.
        values: from the caller; None for none.

    Raises:
        TypeError: no sequence of ints.
        ValueError: a number that is no token id in any vocabulary.
    """
    if values is None:
        return ()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence of ints, got {values!r}; [id, ...]")
    return tuple(dict.fromkeys(checked_token_id(name, each) for each in values))


def checked_token_id(name: str, value: object) -> int:
    """A token id as a Python int.

    Raises:
        TypeError: no int.
        ValueError: a number that is no token id in any vocabulary.
    """
    found = checked_int(name, value, "token ids are Python ints")
    if not 0 <= found <= MAX_TOKEN_ID:
        raise ValueError(f"{name} must be >= 0 and below the vocabulary's size, got {found}; leave it out")
    return found


def checked_bias(values: object) -> tuple[tuple[int, float], ...]:
    """Biases as pairs of a token id and a number that float32 holds, by ascending id.

    Args:
        values: a mapping from token id to bias, as OpenAI's ``logit_bias``, or such pairs; None for none.

    Raises:
        TypeError: something else.
        ValueError: a bias that is not finite in float32 and not -inf; an id twice or out of range.
    """
    if values is None:
        return ()
    pairs = list(values.items()) if isinstance(values, Mapping) else _pairs(values)
    made: dict[int, float] = {}
    for key, value in pairs:
        token = checked_token_id("logit_bias", int(key) if isinstance(key, str) and key.isdecimal() else key)
        bias = checked_float(f"logit_bias of token {token}", value)
        if not (bias == -math.inf or abs(bias) <= _MOST_BIAS):
            raise ValueError(
                f"logit_bias of {token} must be finite in float32 or -inf, got {value}; -inf masks a token"
            )
        if token in made:
            raise ValueError(f"logit_bias must name a token once, got {token} twice; add its biases")
        made[token] = float(np.float32(bias))
    return tuple(sorted(made.items()))


def _pairs(values: object) -> list[tuple[object, object]]:
    if isinstance(values, Iterable) and not isinstance(values, str | bytes):
        found = [tuple(each) if isinstance(each, tuple | list) else () for each in values]
        if all(len(each) == 2 for each in found):
            return [(each[0], each[1]) for each in found]
    raise TypeError(f"logit_bias must map token ids to numbers, got {values!r}; {{id: bias}}")


def checked_words(values: object) -> tuple[tuple[int, ...], ...]:
    """Sequences of token ids, none of them empty, each once.

    Raises:
        TypeError: no sequence of sequences of ints.
        ValueError: an empty sequence, or a number that is no token id.
    """
    if values is None:
        return ()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"bad_words_token_ids must be a sequence of sequences of ints, got {values!r}; [[id, ...]]")
    words = []
    for each in values:
        if isinstance(each, str | bytes | Mapping | Set) or not isinstance(each, Iterable):
            raise TypeError(f"each of bad_words_token_ids must be a sequence of ints, got {each!r}; [[id, ...]]")
        words.append(tuple(checked_token_id("bad_words_token_ids", token) for token in each))
        if not words[-1]:
            raise ValueError("each of bad_words_token_ids must have a token, got an empty one; leave it out")
    return tuple(dict.fromkeys(words))


class Range(NamedTuple):
    """The numbers that a parameter may be."""

    text: str
    """As errors have it."""
    holds: Callable[[float], bool]
    way_out: str


_SUBTRACTED = Range("in [-2.0, 2.0]", lambda x: -2.0 <= x <= 2.0, "0 is none")
RANGES = {
    "repetition_penalty": Range("in [2**-20, 2**20]", lambda x: 2.0**-20 <= x <= 2.0**20, "1 is none"),
    "frequency_penalty": _SUBTRACTED,
    "presence_penalty": _SUBTRACTED,
    "dry_multiplier": Range("in [0, 2**20]", lambda x: 0.0 <= x <= 2.0**20, "0 is none"),
    "dry_base": Range("in [1, 2**10]", lambda x: 1.0 <= x <= 2.0**10, "1 penalizes every length alike"),
    "top_n_sigma": Range("finite and >= 0", lambda x: 0.0 <= x < math.inf, "0 keeps every token"),
    "min_k_tau": Range("finite and >= 0", lambda x: 0.0 <= x < math.inf, "0 keeps no token behind the cliff"),
    "typical_p": Range("in (0, 1]", lambda x: 0.0 < x <= 1.0, "1.0 keeps every token"),
    "xtc_probability": Range("in [0, 1]", lambda x: 0.0 <= x <= 1.0, "0 excludes nothing"),
    "xtc_threshold": Range("in [0, 1]", lambda x: 0.0 <= x <= 1.0, "above 0.5 it excludes nothing"),
}
"""By parameter that is a float."""
COUNTS = {
    "dry_allowed_length": Range(
        f"in [1, {MOST_REPEATED}]", lambda n: 1 <= n <= MOST_REPEATED, "dry_multiplier=0 penalizes nothing"
    ),
    "dry_range": Range("in [0, 2**31)", lambda n: 0 <= n < 2**31, "0 looks at the whole history"),
    "min_tokens": Range("in [0, 2**31)", lambda n: 0 <= n < 2**31, "0 lets a request end at once"),
    "watermark_tokens": Range(
        f"in [0, {MOST_WATERMARK_TOKENS}]", lambda n: 0 <= n <= MOST_WATERMARK_TOKENS, "0 is no watermark"
    ),
}
"""By parameter that counts tokens."""


def checked_in_range(name: str, value: object) -> float:
    """A parameter of ``RANGES`` as a Python float.

    Raises:
        TypeError: no number.
        ValueError: out of range.
    """
    found = checked_float(name, value)
    _check_holds(name, found, RANGES[name])
    return found


def checked_count(name: str, value: object) -> int:
    """A parameter of ``COUNTS`` as a Python int.

    Raises:
        TypeError: no int.
        ValueError: out of range.
    """
    found = checked_int(name, value)
    _check_holds(name, found, COUNTS[name])
    return found


def _check_holds(name: str, found: float, wanted: Range) -> None:
    if not wanted.holds(found):
        raise ValueError(f"{name} must be {wanted.text}, got {found}; {wanted.way_out}")


def checked_flag(name: str, value: object, way_out: str) -> bool:
    """A bool.

    Raises:
        TypeError: something else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}; {way_out}")
    return value


def check_scope(name: str, value: object) -> None:
    """Raise unless a scope is "all" or "output".

    Raises:
        ValueError: another value.
    """
    check_choice(name, value, SCOPES, "'all' looks at the prompt too")


def checked_extra_args(values: object) -> tuple[tuple[str, Any], ...]:
    """What a request sets for edits of the user, as pairs by name: a dataclass as it is, or pairs of the parameters.

    Args:
        values: a mapping from the name of an edit to its parameters, a mapping or a frozen dataclass; such pairs; None.

    Raises:
        TypeError: something else.
    """
    way_out = "{name: {parameter: number}}"
    pairs = values.items() if isinstance(values, Mapping) else () if values is None else values
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise TypeError(f"extra_args must map names of edits to parameters, got {values!r}; {way_out}")
    made = dict[str, Any]()
    for pair in pairs:
        name, given = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (None, None)
        if not isinstance(name, str) or name in made:
            raise TypeError(f"extra_args must map each name of an edit to parameters, got {values!r}; {way_out}")
        made[name] = _checked_args(name, given)
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
