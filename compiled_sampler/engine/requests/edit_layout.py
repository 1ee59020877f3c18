"""Where the edits of a request stand in its row of an int32 matrix, so that one copy brings all of them to a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from compiled_sampler.core.mass import FLOAT_MAX
from compiled_sampler.edit_names import reading
from compiled_sampler.edit_params import MOST_REPEATED
from compiled_sampler.edit_tables import NO_TOKEN, UNWRITTEN
from compiled_sampler.params import SamplingParams
from compiled_sampler.scalars import checked_int

_ALIGNED = 16  # words; kernels clone what is not aligned
NUMBERS = (
    "prompt_len",
    "min_tokens",
    "num_biases",
    "num_stops",
    "num_words",
    "first_word_position",
    "of_output",
    "watermark_tokens",
    "reads_history",
    "p_less",
    "dry_range",
    "num_breakers",
)
"""The int32 numbers that a row begins with."""
FLOATS = ("repetition", "inverse", "frequency", "presence")
"""The float32 numbers behind them."""
DOUBLES = ("top_n_sigma", "min_k_tau", "typical_p", "xtc_threshold", "xtc_probability")
"""The float64 numbers behind these."""
FIRST_DOUBLE = len(NUMBERS) + len(FLOATS)  # words; an even number, since kernels align what they read
_HEADER = FIRST_DOUBLE + 2 * len(DOUBLES)


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


def checked_sizes(sizes: EditSizes | None) -> EditSizes:
    """The sizes that a caller gave, or the default.

    Raises:
        TypeError: something else.
    """
    if sizes is not None and not isinstance(sizes, EditSizes):
        raise TypeError(f"edit_sizes must be EditSizes, got {type(sizes).__name__}; EditSizes(biases=...)")
    return sizes or EditSizes()


class Columns(NamedTuple):
    """The first word of each part of a row, and of the next row."""

    biased: int
    biases: int
    stops: int
    words: int
    dry: int
    breakers: int
    allowed: int
    end: int


def columns_of(sizes: EditSizes, vocab_size: int) -> Columns:
    """The parts of a row, each aligned."""
    lengths = (_HEADER, sizes.biases, sizes.biases, sizes.stops, sizes.bad_words * sizes.bad_word_len)
    starts, start = list[int](), 0
    for length in (*lengths, MOST_REPEATED + 1, sizes.breakers, -(-vocab_size // 32)):
        start += -(-length // _ALIGNED) * _ALIGNED
        starts.append(start)
    return Columns(*starts)


def check_fits(params: SamplingParams, sizes: EditSizes, vocab_size: int) -> None:
    """Raise unless the edits of a request have room in a row, and ask nothing of ids that the vocabulary lacks.

    Raises:
        ValueError: too many entries, a token id that the vocabulary does not have, or no allowed one that it has.
    """
    bias, stops, words, breakers, allowed = _lists(params)
    counts = {"biases": len(bias), "stops": len(stops), "bad_words": len(words), "breakers": len(breakers)}
    counts["bad_word_len"] = max(map(len, words), default=0)
    for name, count in counts.items():
        if count > getattr(sizes, name):
            most, way_out = getattr(sizes, name), f"Sampler(edit_sizes=EditSizes({name}={count}))"
            raise ValueError(f"{name} of a request must be at most {most}, got {count}; {way_out}")
    lists: dict[str, Sequence[int]] = {
        "logit_bias": [token for token, _ in bias],
        "eos_token_id": [token for token in stops if token == params.eos_token_id],
        "stop_token_ids": stops,
        "bad_words_token_ids": [token for word in words for token in word],
        "dry_sequence_breakers": breakers,
    }
    for name, ids in lists.items():
        if max(ids, default=0) >= vocab_size:
            raise ValueError(f"{name} must be below vocab_size {vocab_size}, got {max(ids)}; leave it out")
    if allowed and min(allowed) >= vocab_size:
        rule = f"allowed_token_ids must have a token below vocab_size {vocab_size}"
        raise ValueError(f"{rule}, got {min(allowed)} and above; None allows all")


def row_of(params: SamplingParams, prompt_len: int, sizes: EditSizes, vocab_size: int) -> np.ndarray:
    """The row of a request, int32 ``[columns.end]``; arguments as ``check_fits``, which it passed.

    Args:
        params: of the request.
        prompt_len: tokens of its prompt.
        sizes: of the sampler.
        vocab_size: V.
    """
    columns = columns_of(sizes, vocab_size)
    row = np.zeros(columns.end, np.int32)
    bias, stops, words, breakers, allowed = _lists(params)
    first = 0 if params.bad_words_scope == "all" else prompt_len
    of_output = int(params.repetition_scope == "output")
    counts = len(bias), len(stops), len(words)
    reads = bool(reading(params.edits))
    numbers = (
        prompt_len,
        params.min_tokens,
        *counts,
        first,
        of_output,
        params.watermark_tokens,
        reads,
        "p_less" in params.edits,
        params.dry_range,
        len(breakers),
    )
    row[: len(NUMBERS)] = numbers
    repetition = np.float32(params.repetition_penalty)
    subtracted = (_normal(each) for each in (params.frequency_penalty, params.presence_penalty))
    floats = repetition, 1.0 / np.float64(repetition), *subtracted
    row[len(NUMBERS) : FIRST_DOUBLE] = np.array(floats, np.float32).view(np.int32)
    row[FIRST_DOUBLE:_HEADER] = np.array(_doubles(params), np.float64).view(np.int32)
    row[columns.biased : columns.biases] = NO_TOKEN
    row[columns.biased : columns.biased + len(bias)] = [token for token, _ in bias]
    biases = np.array([_normal(each) for _, each in bias], np.float32)
    row[columns.biases : columns.biases + len(bias)] = biases.view(np.int32)
    row[columns.stops : columns.stops + len(stops)] = stops
    place = row[columns.words : columns.words + sizes.bad_words * sizes.bad_word_len].reshape(sizes.bad_words, -1)
    place[:] = UNWRITTEN
    for entry, word in zip(place, words, strict=False):
        entry[-len(word) :] = word
    row[columns.dry : columns.dry + MOST_REPEATED + 1] = _dry_penalties(params).view(np.int32)
    row[columns.breakers : columns.breakers + len(breakers)] = breakers
    allowed = None if allowed is None else [token for token in allowed if token < vocab_size]
    row[columns.allowed :] = _bitmask(allowed, columns.end - columns.allowed)
    return row


def _doubles(params: SamplingParams) -> tuple[float, ...]:
    """The float64 numbers of a request; those of filters that it does not have keep every token."""
    filters = params.edits
    sigma = params.top_n_sigma if "top_n_sigma" in filters else 0.0
    tau = params.min_k_tau if "min_k" in filters else -1.0
    probability = params.xtc_probability if "xtc" in filters else 0.0
    typical_p = params.typical_p if "typical_p" in filters else 1.0
    return sigma, tau, typical_p, params.xtc_threshold, probability


def _dry_penalties(params: SamplingParams) -> np.ndarray:
    """What DRY subtracts by the length of a repetition, float32 ``[MOST_REPEATED + 1]``; 0 for one that is allowed.

    Powers are exact fractions of ints, rounded to float64 and then to float32, at most the largest number of float32.
    """
    made, least = np.zeros(MOST_REPEATED + 1, np.float32), params.dry_allowed_length
    if params.dry_multiplier > 0.0:
        (above, below), (base, scale) = params.dry_multiplier.as_integer_ratio(), params.dry_base.as_integer_ratio()
        for length in range(least, MOST_REPEATED + 1):
            made[length] = _normal(min(above / below, FLOAT_MAX))  # Python rounds a quotient of ints once
            above, below = above * base, below * scale
    return made


def _normal(value: float) -> np.float32:
    """A number in float32, 0 for a denormal, which some modes of a CPU take for 0."""
    rounded = np.float32(value)
    return rounded if abs(rounded) >= np.finfo(np.float32).tiny else np.float32(0.0)


class _Lists(NamedTuple):
    """The lists of a request, in the form in which its parameters store them."""

    bias: Sequence[tuple[int, float]]
    """By ascending id."""
    stops: Sequence[int]
    words: Sequence[Sequence[int]]
    breakers: Sequence[int]
    allowed: Sequence[int] | None


def _lists(params: SamplingParams) -> _Lists:
    stored: Any = params
    breakers = stored.dry_sequence_breakers if stored.dry_multiplier > 0.0 else ()  # of no use without DRY
    lists = stored.logit_bias, stored.all_stop_token_ids, stored.bad_words_token_ids
    return _Lists(*lists, breakers, stored.allowed_token_ids)


def _bitmask(token_ids: Sequence[int] | None, words: int) -> np.ndarray:
    """A bit for each token, int32 ``[words]``; all ones for None."""
    if token_ids is None:
        return np.full(words, -1, np.int32)
    ids, made = np.array(token_ids, np.int64), np.zeros(words, np.uint32)
    np.bitwise_or.at(made, ids >> 5, np.left_shift(np.uint32(1), (ids & 31).astype(np.uint32)))
    return made.view(np.int32)
