"""Checks of what a sampler is made with: rule, value, way out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from compiled_sampler.edit_names import CONSUMES, EDITS, HISTORY_EDITS, LEAVES, RESTORES, reading, writes_lists
from compiled_sampler.logprobs import Logprobs, check_token_ids
from compiled_sampler.modes import CACHE, MAX_VOCAB_SIZE, MOST_DRAFTS, TOP_P_BASES, Verification
from compiled_sampler.scalars import check_choice, checked_int

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
    check_choice("backend", backend, BACKENDS, "'auto' suits every device")
    check_choice("top_p_base", base, TOP_P_BASES, "'top_k' is what most engines do")
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


def checked_history_len(length: int) -> int:
    """The positions of a request's history as a Python int; 0 for no history.

    Raises:
        TypeError: no int.
        ValueError: a number out of range.
    """
    found = checked_int("history_len", length, "0 for no history")
    if not 0 <= found < 2**24:
        raise ValueError(f"history_len must be in [0, 2**24), got {found}; it counts tokens of a request")
    return found


def checked_edits(
    captured: Iterable[Collection[str]],
    history_len: int,
    known: Sequence[str] = EDITS,
    expanded: Callable[[Sequence[str]], tuple[str, ...]] = tuple,
) -> list[tuple[str, ...]]:
    """The edits of batches as tuples of names in their order, each set once.

    Args:
        captured: from the caller.
        history_len: of the sampler.
        known: the names of all edits of the sampler, in their order.
        expanded: adds what the edits of a batch need besides.

    Raises:
        TypeError: no iterable of collections of names.
        ValueError: an unknown name, or an edit that reads a history where there is none.
    """
    if isinstance(captured, str | Mapping) or not isinstance(captured, Iterable):
        raise TypeError(f"captured_edits must be a list of lists of names, got {captured!r}; [['penalties', 'stops']]")
    found = list[tuple[str, ...]]()
    for each in captured:
        if isinstance(each, str) or not isinstance(each, Collection):
            raise TypeError(f"each of captured_edits must be a list of names, got {each!r}; [['penalties', 'stops']]")
        for name in each or ("none",):
            check_choice("captured_edits", name, known, "[] is captured without being named")
        if not history_len and reading(tuple(each)):
            raise ValueError(
                f"captured_edits must not be of {HISTORY_EDITS} without a history; Sampler(history_len=...)"
            )
        leaves = [name for name in LEAVES if name in each]
        if len(leaves) > 1 or (leaves and not writes_lists(tuple(each))):
            raise ValueError(
                f"captured_edits must have {CONSUMES!r} or {RESTORES!r} beside lists of tokens, got {tuple(each)}; "
                "have one of them, and none where no list writes into the logits"
            )
        found.append(expanded([name for name in known if name in each]))
    return list(dict.fromkeys(found))


def checked_logprobs(captured: Iterable[Logprobs], vocab_size: int) -> list[Logprobs]:
    """The logprobs that steps are captured with, each once.

    Raises:
        TypeError: no iterable, or an element of another type.
        ValueError: a token id of ``vocab_size`` or more.
    """
    known = list(captured) if isinstance(captured, Iterable) else [captured]
    wrong = [each for each in known if not isinstance(each, Logprobs)]
    if wrong or not isinstance(captured, Iterable):
        found = wrong[0] if wrong else captured
        raise TypeError(f"captured_logprobs must be a list of Logprobs, got {found!r}; [Logprobs(top=5)]")
    for each in known:
        check_token_ids(each, vocab_size)
    return list(dict.fromkeys(known))
