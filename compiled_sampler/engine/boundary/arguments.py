"""Checks of a caller's arguments that are no tensors: rule, value, way out. None of them waits for a device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from compiled_sampler.modes import CACHE, MAX_VOCAB_SIZE, MOST_DRAFTS, TOP_P_BASES, Verification
from compiled_sampler.params import SamplingParams
from compiled_sampler.scalars import checked_int

BACKENDS = ("auto", "reference", "eager", "compiled", "graph")
DEVICES = ("cpu", "cuda")
LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def checked_sizes(vocab_size: int, max_num_requests: int) -> tuple[int, int]:
    """The sizes of a sampler, V and S, as Python ints.

    Raises:
        TypeError: no int.
        ValueError: a size out of range.
    """
    sizes = checked_int("vocab_size", vocab_size), checked_int("max_num_requests", max_num_requests)
    for name, value in zip(("vocab_size", "max_num_requests"), sizes, strict=True):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}; count the tokens of the model or the requests at once")
    if sizes[0] > MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be <= {MAX_VOCAB_SIZE}, got {sizes[0]}; the mass of a row must fit 62 bits")
    return sizes


def checked_device(device: torch.device | str) -> torch.device:
    """A device that torch can compute on here.

    Raises:
        TypeError: neither a name nor a ``torch.device``; an index is refused, since it names no kind of device.
        ValueError: another kind of device, or one that this machine does not have.
    """
    if not isinstance(device, str | torch.device):
        way_out = f"'cuda:{device}' is one by its index" if type(device) is int else "'cpu' or 'cuda'"
        raise TypeError(f"device must be a str or a torch.device, got {device!r}; {way_out}")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be one of {DEVICES}, got {device!r}; move the logits there") from None
    if found.type not in DEVICES:
        raise ValueError(f"device must be one of {DEVICES}, got {device}; move the logits there")
    count = torch.cuda.device_count() if found.type == "cuda" and torch.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= count:
        raise ValueError(
            f"device must be one that torch finds here, got {device} of {count} CUDA devices; device='cpu' needs none"
        )
    return found


def check_choices(logits_dtype: torch.dtype, backend: str, base: str, probabilities: bool) -> None:
    """Raise unless the arguments of ``Sampler`` that choose among a few things name one of them.

    Raises:
        TypeError: ``probabilities`` is no bool.
        ValueError: an unknown dtype, backend or base of top-p.
    """
    if logits_dtype not in LOGITS_DTYPES:
        raise ValueError(f"logits_dtype must be one of {LOGITS_DTYPES}, got {logits_dtype}; convert the logits")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}; 'auto' suits every device")
    if base not in TOP_P_BASES:
        raise ValueError(f"top_p_base must be one of {TOP_P_BASES}, got {base!r}; 'top_k' is what most engines do")
    if not isinstance(probabilities, bool):
        raise TypeError(f"probabilities must be a bool, got {probabilities!r}; True lets warmup() prepare probs()")


def check_generator(generator: object) -> None:
    """Raise unless ``generator`` is None or a ``torch.Generator`` of the CPU.

    Raises:
        TypeError: another type.
        ValueError: a generator of another device, which a seed could not be drawn from without a wait.
    """
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        found, way_out = type(generator).__name__, "torch.Generator().manual_seed(seed) makes one"
        raise TypeError(f"default_generator must be a torch.Generator, got {found}; {way_out}")
    if generator.device.type != "cpu":
        raise ValueError(
            f"default_generator must be of the CPU, where seeds are drawn, got one of {generator.device}; "
            "torch.default_generator is the one that torch.manual_seed sets"
        )


def checked_params(params: object) -> tuple[SamplingParams, ...]:
    """The parameters of one request or of several, as a tuple.

    Raises:
        TypeError: anything else.
    """
    if isinstance(params, SamplingParams):
        return (params,)
    way_out = "SamplingParams(**options)"
    if isinstance(params, Mapping) or not _is_ordered(params):
        wrong = type(params).__name__
        raise TypeError(f"params must be SamplingParams or a sequence of them, got {wrong}; {way_out}")
    found = []
    for n, each in enumerate(params):
        if not isinstance(each, SamplingParams):
            raise TypeError(f"params of request {n} must be SamplingParams, got {type(each).__name__}; {way_out}")
        found.append(each)
    return tuple(found)


def checked_verifications(verifications: Iterable[Verification]) -> list[Verification]:
    """The verifications as a list.

    Raises:
        TypeError: no iterable, or an element of another type.
    """
    known = list(verifications) if isinstance(verifications, Iterable) else [verifications]
    wrong = [each for each in known if not isinstance(each, Verification)]
    if wrong or not isinstance(verifications, Iterable):
        found = wrong[0] if wrong else verifications
        raise TypeError(f"verifications must be a list of Verification, got {found!r}; [Verification('match', 3)]")
    return known


def checked_cache_len(length: int, verifications: Sequence[Verification]) -> int:
    """The drafts of a slot in the draft cache as a Python int; 0 for no cache.

    Raises:
        TypeError: no int.
        ValueError: a number out of range, or a verification that reads a cache where there is none.
    """
    found = checked_int("draft_cache_len", length, "0 for no draft cache")
    if not 0 <= found <= MOST_DRAFTS:
        raise ValueError(f"draft_cache_len must be in [0, {MOST_DRAFTS}], got {found}; it counts drafts of a request")
    if not found and any(each.drafts == CACHE for each in verifications):
        raise ValueError(
            f"drafts of a Verification must not be {CACHE!r} without a cache; Sampler(draft_cache_len=...)"
        )
    return found


def check_modes(names: Collection[str] | None, known: Sequence[str]) -> None:
    """Raise unless every name is the name of a mode; None stands for all modes.

    Raises:
        TypeError: no collection.
        ValueError: an unknown name.
    """
    message = f"modes must be a list of some of {', '.join(known)}, got {names!r}; None prepares all"
    if names is not None and not isinstance(names, Collection):
        raise TypeError(message)
    if isinstance(names, str) or any(name not in known for name in names or ()):
        raise ValueError(message)


def check_progress(progress: object) -> None:
    """Raise unless ``progress`` is None or can be called.

    Raises:
        TypeError: it cannot.
    """
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be callable, got {progress!r}; progress(done, total, label), or None")


def check_mode_name(mode: str | None) -> None:
    """Raise unless ``mode`` is None or a text, which may yet name no mode.

    Raises:
        TypeError: another type.
    """
    if mode is not None and not isinstance(mode, str):
        raise TypeError(f"mode must be a str, got {mode!r}; sampler.modes have the names, None chooses")


def checked_slots(slots: Iterable[int]) -> tuple[int, ...]:
    """The slots of a batch as a tuple of ints.

    Raises:
        TypeError: no iterable in an order, or a slot that is no int.
    """
    if not _is_ordered(slots):
        raise TypeError(f"slots must be a sequence of ints, got {slots!r}; add_request() returns them")
    found = tuple(slots)
    return found if _are_ints(found) else tuple(checked_slot(slot, f"slot of row {n}") for n, slot in enumerate(found))


def checked_slot(slot: object, name: str = "slot") -> int:
    """A slot as an int; integers of numpy are accepted.

    Raises:
        TypeError: no integer. Tensors are refused: their values may change, or need a device sync.
    """
    return checked_int(name, slot, "add_request() returns it")


def checked_counts(num_drafts: Iterable[int]) -> tuple[int, ...]:
    """The numbers of drafts of a batch as a tuple of ints of any size.

    Raises:
        TypeError: no iterable in an order, or a count that is no int.
    """
    if isinstance(num_drafts, Tensor) or not _is_ordered(num_drafts):
        raise TypeError(f"num_drafts must be a sequence of ints, got {num_drafts!r}; one count a slot")
    found = tuple(num_drafts)
    if _are_ints(found):  # True and 1 are the same key of a plan
        return found
    return tuple(checked_int(f"num_drafts of request {n}", count, "pass Python ints") for n, count in enumerate(found))


def check_num_drafts(num_drafts: Sequence[int] | None, requests: int) -> None:
    """Raise unless ``num_drafts`` is None or has one count of drafts for each request.

    Raises:
        ValueError: another number of counts, or a count out of range.
    """
    if num_drafts is None:
        return
    if len(num_drafts) != requests:
        raise ValueError(f"num_drafts must have one count a slot, {requests}, got {len(num_drafts)}; 0 for no drafts")
    if min(num_drafts, default=0) >= 0 and max(num_drafts, default=0) <= MOST_DRAFTS:
        return
    for request, count in enumerate(num_drafts):
        if not 0 <= count <= MOST_DRAFTS:
            raise ValueError(f"num_drafts of request {request} must be in [0, {MOST_DRAFTS}], got {count}; draft fewer")


def check_no_bonus(bonus_token_ids: object) -> None:
    """Raise unless ``bonus_token_ids`` is None: no verification takes the token after the last draft from outside.

    Raises:
        ValueError: anything else; the message says why.
    """
    if bonus_token_ids is not None:
        raise ValueError(
            f"bonus_token_ids must be None, got {type(bonus_token_ids).__name__}; pass k_n + 1 rows of each request "
            "instead: the token after the last draft is drawn from its own row with the noise of its position, and one "
            "from outside would break the stream of 'match' and the law of 'rejection' and 'block'"
        )


def checked_offset(offset: int, coupled: bool) -> int:
    """The index of a draft in its block as a Python int.

    Raises:
        TypeError: the offset is no int, or ``coupled`` no bool.
        ValueError: the offset is out of range.
    """
    if not isinstance(coupled, bool):
        raise TypeError(f"coupled must be a bool, got {coupled!r}; True for the rule 'match', False for the others")
    index = checked_int("offset", offset)
    if not 0 <= index < MOST_DRAFTS:
        raise ValueError(f"offset must be in [0, {MOST_DRAFTS}), got {index}; it counts drafts of the same block")
    return index


def _is_ordered(values: object) -> TypeGuard[Iterable[object]]:
    """Whether values come in an order that the caller chose: no text, no bytes, no set."""
    if type(values) in (list, tuple):
        return True
    return isinstance(values, Iterable) and not isinstance(values, str | bytes | bytearray | set | frozenset)


def _are_ints(numbers: Iterable[object]) -> bool:
    """Whether all numbers are of the type int itself. One set is faster than a check of each number."""
    return set(map(type, numbers)) <= {int}
