"""Checks of a call: its arguments that are no tensors, and whether it is made inside a capture.

Each names the rule, the value and the way out. None of them waits for a device.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from operator import countOf
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.edits.names import reading
from compiled_sampler.logprobs import Logprobs, check_token_ids
from compiled_sampler.modes import MOST_DRAFTS, MOST_DRAWS
from compiled_sampler.params import SamplingParams
from compiled_sampler.scalars import check_choice, checked_int

FEW = 512
"""Numbers of a batch that a loop of Python looks at in less time than calls of numpy take between other code."""


def checked_params(params: object) -> tuple[SamplingParams, ...]:
    """The parameters of one request or of several, as a tuple."""
    if isinstance(params, SamplingParams):
        return (params,)
    way_out = "SamplingParams(**options)"
    if isinstance(params, Mapping) or not _is_ordered(params):
        wrong = type(params).__name__
        raise TypeError(f"params must be SamplingParams or a sequence of them, got {wrong}; {way_out}")
    requests = []
    for n, request in enumerate(params):
        if not isinstance(request, SamplingParams):
            raise TypeError(f"params of request {n} must be SamplingParams, got {type(request).__name__}; {way_out}")
        requests.append(request)
    return tuple(requests)


def check_modes(names: Collection[str] | None, known: Sequence[str]) -> None:
    """Raise unless every name is the name of a mode; None stands for all modes."""
    if names is None:
        return
    if isinstance(names, str) or not isinstance(names, Collection):
        error = ValueError if isinstance(names, str) else TypeError
        raise error(f"modes must be a list of some of {', '.join(known)}, got {names!r}; None prepares all")
    for name in names:
        check_choice("modes", name, known, "None prepares all")


def check_progress(progress: object) -> None:
    """Raise unless ``progress`` is None or can be called."""
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be callable, got {progress!r}; progress(done, total, label), or None")


def check_mode_name(mode: str | None) -> None:
    """Raise unless ``mode`` is None or a text, which may yet name no mode."""
    if mode is not None and not isinstance(mode, str):
        raise TypeError(f"mode must be a str, got {mode!r}; sampler.modes have the names, None chooses")


def checked_slots(slots: Iterable[int]) -> tuple[int, ...]:
    """The slots of a batch as a tuple of ints."""
    if type(slots) is not list:
        if _is_array_of_ints(slots):
            return tuple(slots.tolist())
        if not _is_ordered(slots):
            raise TypeError(f"slots must be a sequence of ints, got {slots!r}; add_request() returns them")
    ids = tuple(slots)
    if _are_ints(ids):
        return ids
    return tuple(checked_slot(slot, f"slot of row {n}") for n, slot in enumerate(ids))


def checked_slot(slot: object, name: str = "slot") -> int:
    """A slot as an int; integers of numpy are accepted."""
    return checked_int(name, slot, "add_request() returns it")


def checked_tokens(name: str, token_ids: Iterable[int]) -> tuple[int, ...]:
    """Token ids of the host as a tuple of ints; whether the vocabulary has them is not looked at."""
    if type(token_ids) is tuple and not token_ids:
        return token_ids
    if isinstance(token_ids, Tensor) or not _is_ordered(token_ids):
        raise TypeError(f"{name} must be a sequence of ints, got {type(token_ids).__name__}; pass a list of token ids")
    ids = tuple(token_ids)
    if not _are_ints(ids):
        ids = tuple(checked_int(f"{name}[{n}]", token, "pass Python ints") for n, token in enumerate(ids))
    if min(ids, default=0) < 0:
        raise ValueError(f"{name} must be >= 0, got {min(ids)}; leave out what is no token")
    return ids


def checked_counts(num_drafts: Iterable[int]) -> tuple[int, ...]:
    """The numbers of drafts of a batch as a tuple of ints of any size."""
    if type(num_drafts) is not list:
        if _is_array_of_ints(num_drafts):
            return tuple(num_drafts.tolist())
        if isinstance(num_drafts, Tensor) or not _is_ordered(num_drafts):
            raise TypeError(f"num_drafts must be a sequence of ints, got {num_drafts!r}; one count a slot")
    counts = tuple(num_drafts)
    if _are_ints(counts):  # not True, which would be the same key of a plan as 1
        return counts
    return tuple(checked_int(f"num_drafts of request {n}", count, "pass Python ints") for n, count in enumerate(counts))


def words_of_counts(num_drafts: Sequence[int]) -> bytes:
    """The numbers of drafts of a batch by ``packer``."""
    try:
        return packer(len(num_drafts))(*num_drafts)
    except struct.error:
        raise _count_out_of_range(num_drafts) from None


def sum_and_width(words: bytes, num_drafts: Sequence[int], requests: int) -> tuple[int, int]:
    """The sum of the numbers of drafts of a batch, one for each request, and the largest of them."""
    if len(num_drafts) != requests:
        raise ValueError(f"num_drafts must have one count a slot, {requests}, got {len(num_drafts)}; 0 for no drafts")
    if requests <= FEW:
        distinct = {*num_drafts}  # of few numbers: their largest and least take half the time of all numbers'
        total, width, least = sum(num_drafts), max(distinct, default=0), min(distinct, default=0)
    else:
        counts = numbers_of(words)
        # of these a negative number is a large one
        total, width, least = int(np.add.reduce(counts)), int(np.maximum.reduce(counts.view(np.uint64))), 0
    if width > MOST_DRAFTS or least < 0:
        raise _count_out_of_range(num_drafts)
    return total, width


def _count_out_of_range(num_drafts: Sequence[int]) -> ValueError:
    request, count = next(pair for pair in enumerate(num_drafts) if not 0 <= pair[1] <= MOST_DRAFTS)
    return ValueError(f"num_drafts of request {request} must be in [0, {MOST_DRAFTS}], got {count}; draft fewer")


@cache
def packer(count: int) -> Callable[..., bytes]:
    """A function of so many ints that returns them as int64 words of the machine."""
    # Sent as they are, and hashed once as a key: half the time of an array. Beyond 64 bits: ``struct.error``.
    return struct.Struct(f"{count}q").pack


def numbers_of(words: bytes) -> np.ndarray:
    """Int64 words of the machine as an array that must not be written."""
    return np.frombuffer(words, np.int64)


def check_logprobs(logprobs: object, vocab_size: int) -> None:
    """Raise unless ``logprobs`` is None or asks for logprobs of tokens that the vocabulary has."""
    if logprobs is None:
        return
    if not isinstance(logprobs, Logprobs):
        kind = type(logprobs).__name__
        raise TypeError(f"logprobs must be Logprobs or None, got {kind}; Logprobs(top=5) names what is returned")
    check_token_ids(logprobs, vocab_size)


def check_no_logprobs(logprobs: object) -> None:
    """Raise unless ``logprobs`` is None, as rows of probabilities have none."""
    if logprobs is not None:
        raise ValueError(
            f"logprobs must be None in verify_from_probs, got {type(logprobs).__name__}; the caller has the "
            "probabilities, and verify(), which reads logits, returns logprobs"
        )


def are_processed(draft_logits_are: object) -> bool:
    """Whether draft logits were filtered by the drafter."""
    if draft_logits_are not in ("raw", "processed"):
        raise ValueError(
            f"draft_logits_are must be 'raw' or 'processed', got {draft_logits_are!r}; 'processed' is for logits that "
            "the drafter filtered itself"
        )
    return draft_logits_are == "processed"


def check_no_bonus(bonus_token_ids: object) -> None:
    """Raise unless ``bonus_token_ids`` is None: no verification takes the token after the last draft from outside."""
    if bonus_token_ids is not None:
        raise ValueError(
            f"bonus_token_ids must be None, got {type(bonus_token_ids).__name__}; pass k_n + 1 rows of each request "
            "instead: the token after the last draft is drawn from its own row with the noise of its position, and one "
            "from outside would break the stream of 'match' and the law of 'rejection' and 'block'"
        )


def checked_offset(offset: int, coupled: bool) -> int:
    """The index of a draft in its block as a Python int."""
    if not isinstance(coupled, bool):
        raise TypeError(f"coupled must be a bool, got {coupled!r}; True for the rule 'match', False for the others")
    index = checked_int("offset", offset)
    if not 0 <= index < MOST_DRAFTS:
        raise ValueError(f"offset must be in [0, {MOST_DRAFTS}), got {index}; it counts drafts of the same block")
    return index


def checked_draw_index(value: object) -> int:
    """The index of a draw of its position as a Python int."""
    index = checked_int("draw_index", value, "pass a Python int, or an int64 tensor with one a row")
    if not 0 <= index < MOST_DRAWS:
        raise ValueError(f"draw_index must be in [0, 2**24), got {index}; it counts draws of one position")
    return index


def checked_siblings(width: int, coupled: bool) -> int:
    """The number of siblings that ``draft`` is asked for as a Python int."""
    count = checked_int("width", width, "None for one draft")
    if not 1 <= count <= MOST_DRAFTS:
        raise ValueError(f"width must be in [1, {MOST_DRAFTS}], got {count}; it counts siblings of a tree")
    if not coupled:
        raise ValueError(
            "width must be None with coupled=False: rules that need noise of the drafts' own judge one chain; "
            "coupled=True"
        )
    return count


def check_draws_apart(edits: Sequence[str]) -> None:
    """Raise if an edit reads the history, which has one token a position."""
    if reads := reading(edits):
        raise ValueError(
            f"draw_index must be 0 for requests with {reads[0]}, as the history has one token a position; give the "
            "further draws of a position to requests without edits of the history"
        )


def _is_ordered(values: object) -> TypeGuard[Iterable[object]]:
    """Whether values come in an order that the caller chose: no text, bytes or views of them, no set, no mapping."""
    if type(values) in (list, tuple):
        return True
    # an array without dimensions has no values
    return (
        isinstance(values, Iterable)
        and not isinstance(values, str | bytes | bytearray | memoryview | set | frozenset | Mapping)
        and getattr(values, "ndim", 1) != 0
    )


def _is_array_of_ints(numbers: object) -> TypeGuard[np.ndarray]:
    """Whether numbers are an array of numpy in one dimension whose entries are ints, which none has to be asked for."""
    return type(numbers) is np.ndarray and numbers.ndim == 1 and numbers.dtype.kind in "iu"


def _are_ints(numbers: Sequence[object]) -> bool:
    """Whether all numbers are of the type int itself. A count of types is faster than a check of each number."""
    return countOf(map(type, numbers), int) == len(numbers)


def check_not_capturing(device: torch.device, message: str) -> None:
    """Raise if the current stream of a CUDA device is being captured."""
    if is_capturing(device):
        raise RuntimeError(message)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a CUDA device is being captured; false of a CPU."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def capture_check(device: torch.device) -> Callable[[], bool]:
    """A function like ``is_capturing`` of one device, for what every step asks: no frame of ours runs."""
    return torch.cuda.is_current_stream_capturing if device.type == "cuda" else bool  # bool() is False
