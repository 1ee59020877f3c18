"""Checks of what a sampler is made with, of a call's arguments that are no tensors, and of calls inside a capture.

Each names the rule, the value and the way out. None of them waits for a device.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import countOf
from typing import TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.edits.names import CONSUMES, HISTORY_EDITS, LEAVES, RESTORES, reading, writes_lists
from compiled_sampler.logprobs import Logprobs, check_token_ids
from compiled_sampler.modes import CACHE, MAX_VOCAB_SIZE, MOST_DRAFTS, MOST_DRAWS, TOP_P_BASES, Verification
from compiled_sampler.params import SamplingParams
from compiled_sampler.scalars import check_choice, checked_int
from compiled_sampler.shard import VocabularyShard, check_shard

Item = TypeVar("Item")

BACKENDS = ("auto", "reference", "eager", "compiled", "graph")
DEVICES = ("cpu", "cuda")
LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def checked_sizes(vocab_size: int, max_num_requests: int) -> tuple[int, int]:
    """The sizes of a sampler, V and S, as Python ints."""
    sizes = checked_int("vocab_size", vocab_size), checked_int("max_num_requests", max_num_requests)
    for name, value in zip(("vocab_size", "max_num_requests"), sizes, strict=True):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}; count the tokens of the model or the requests at once")
    if sizes[0] > MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be <= {MAX_VOCAB_SIZE}, got {sizes[0]}; the mass of a row must fit 62 bits")
    return sizes


def checked_columns(shard: VocabularyShard | None, check_plans: bool, vocab_size: int) -> int:
    """The columns that logits have: V without a shard, else those of its tokens."""
    if shard is not None:
        check_shard(shard, vocab_size)
    if not isinstance(check_plans, bool):
        raise TypeError(f"check_plans must be a bool, got {check_plans!r}; True compares the plans of the ranks")
    if check_plans and shard is None:
        raise ValueError("check_plans must be False without a shard, got True; one rank has nobody to compare with")
    return vocab_size if shard is None else shard.width(vocab_size)


def checked_device(device: torch.device | str) -> torch.device:
    """A device that torch can compute on here."""
    if not isinstance(device, str | torch.device):
        way_out = f"'cuda:{device}' is one by its index" if type(device) is int else "'cpu' or 'cuda'"
        raise TypeError(f"device must be a str or a torch.device, got {device!r}; {way_out}")
    try:
        checked = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be one of {DEVICES}, got {device!r}; move the logits there") from None
    if checked.type not in DEVICES:
        raise ValueError(f"device must be one of {DEVICES}, got {device}; move the logits there")
    count = torch.cuda.device_count() if checked.type == "cuda" and torch.cuda.is_available() else 0
    if checked.type == "cuda" and (checked.index or 0) >= count:
        raise ValueError(
            f"device must be one that torch finds here, got {device} of {count} CUDA devices; device='cpu' needs none"
        )
    return checked


def check_choices(logits_dtype: torch.dtype, backend: str, base: str, probabilities: bool) -> None:
    """Raise unless the arguments of ``Sampler`` that choose among a few things name one of them."""
    if logits_dtype not in LOGITS_DTYPES:
        raise ValueError(f"logits_dtype must be one of {LOGITS_DTYPES}, got {logits_dtype}; convert the logits")
    check_choice("backend", backend, BACKENDS, "'auto' suits every device")
    check_choice("top_p_base", base, TOP_P_BASES, "'top_k' is what most engines do")
    if not isinstance(probabilities, bool):
        raise TypeError(f"probabilities must be a bool, got {probabilities!r}; True lets warmup() prepare probs()")


def check_generator(generator: object) -> None:
    """Raise unless ``generator`` is None or a ``torch.Generator`` of the CPU."""
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        kind, way_out = type(generator).__name__, "torch.Generator().manual_seed(seed) makes one"
        raise TypeError(f"default_generator must be a torch.Generator, got {kind}; {way_out}")
    if generator.device.type != "cpu":
        raise ValueError(
            f"default_generator must be of the CPU, where seeds are drawn, got one of {generator.device}; "
            "torch.default_generator is the one that torch.manual_seed sets"
        )


def all_of(kind: type[Item], name: str, values: Iterable[Item], example: str) -> list[Item]:
    """An argument that must be a list of one kind, as a list."""
    items = list(values) if isinstance(values, Iterable) else [values]
    wrong = [item for item in items if not isinstance(item, kind)]
    if wrong or not isinstance(values, Iterable):
        value = wrong[0] if wrong else values
        raise TypeError(f"{name} must be a list of {kind.__name__}, got {value!r}; [{example}]")
    return items


def checked_cache_len(length: int, verifications: Sequence[Verification]) -> int:
    """The drafts of a slot in the draft cache as a Python int; 0 for no cache."""
    drafts = checked_int("draft_cache_len", length, "0 for no draft cache")
    if not 0 <= drafts <= MOST_DRAFTS:
        raise ValueError(f"draft_cache_len must be in [0, {MOST_DRAFTS}], got {drafts}; it counts drafts of a request")
    if not drafts and any(way.drafts == CACHE for way in verifications):
        raise ValueError(
            f"drafts of a Verification must not be {CACHE!r} without a cache; Sampler(draft_cache_len=...)"
        )
    return drafts


def checked_history_len(length: int) -> int:
    """The positions of a request's history as a Python int; 0 for no history."""
    positions = checked_int("history_len", length, "0 for no history")
    if not 0 <= positions < 2**24:
        raise ValueError(f"history_len must be in [0, 2**24), got {positions}; it counts tokens of a request")
    return positions


def checked_edits(
    captured: Iterable[Collection[str]],
    history_len: int,
    known: Sequence[str],
    expanded: Callable[[Sequence[str]], tuple[str, ...]],
) -> list[tuple[str, ...]]:
    """The edits of batches as tuples of names in their order, each set once."""
    if isinstance(captured, str | Mapping) or not isinstance(captured, Iterable):
        raise TypeError(f"captured_edits must be a list of lists of names, got {captured!r}; [['penalties', 'stops']]")
    batches = list[tuple[str, ...]]()
    for names in captured:
        if isinstance(names, str) or not isinstance(names, Collection):
            raise TypeError(f"each of captured_edits must be a list of names, got {names!r}; [['penalties', 'stops']]")
        for name in names or ("none",):
            check_choice("captured_edits", name, known, "[] is captured without being named")
        if not history_len and reading(tuple(names)):
            raise ValueError(
                f"captured_edits must not be of {HISTORY_EDITS} without a history; Sampler(history_len=...)"
            )
        leaves = [name for name in LEAVES if name in names]
        if len(leaves) > 1 or (leaves and not writes_lists(tuple(names))):
            raise ValueError(
                f"captured_edits must have {CONSUMES!r} or {RESTORES!r} beside lists of tokens, got {tuple(names)}; "
                "have one of them, and none where no list writes into the logits"
            )
        batches.append(expanded([name for name in known if name in names]))
    return list(dict.fromkeys(batches))


def checked_logprobs(captured: Iterable[Logprobs], vocab_size: int) -> list[Logprobs]:
    """The logprobs that steps are captured with, each once."""
    asked = all_of(Logprobs, "captured_logprobs", captured, "Logprobs(top=5)")
    for logprobs in asked:
        check_token_ids(logprobs, vocab_size)
    return list(dict.fromkeys(asked))


FEW = 128  # numbers of a batch that a loop of Python looks at in less time than calls of numpy take between other code


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
    """The numbers of drafts of a batch as ``words_of``."""
    try:
        return words_of(num_drafts)
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


def words_of(numbers: Sequence[int]) -> bytes:
    """Ints as int64 words of the machine, which are sent as they are; ``struct.error`` beyond 64 bits."""
    return struct.pack(f"{len(numbers)}q", *numbers)  # half the time of an array, and hashed once as a key


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


def checked_siblings(width: int) -> int:
    """The number of siblings that ``draft`` is asked for as a Python int."""
    count = checked_int("width", width, "None for one draft")
    if not 1 <= count <= MOST_DRAFTS:
        raise ValueError(f"width must be in [1, {MOST_DRAFTS}], got {count}; it counts siblings of a tree")
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
