"""Checks of what a sampler is made with: rule, value, way out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from compiled_sampler.edits.names import CONSUMES, EDITS, HISTORY_EDITS, LEAVES, RESTORES, reading, writes_lists
from compiled_sampler.logprobs import Logprobs, check_token_ids
from compiled_sampler.modes import CACHE, MAX_VOCAB_SIZE, MOST_DRAFTS, TOP_P_BASES, Verification
from compiled_sampler.scalars import check_choice, checked_int
from compiled_sampler.shard import VocabularyShard, check_shard

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


def checked_verifications(verifications: Iterable[Verification]) -> list[Verification]:
    """The verifications as a list."""
    ways = list(verifications) if isinstance(verifications, Iterable) else [verifications]
    wrong = [way for way in ways if not isinstance(way, Verification)]
    if wrong or not isinstance(verifications, Iterable):
        value = wrong[0] if wrong else verifications
        raise TypeError(f"verifications must be a list of Verification, got {value!r}; [Verification('match', 3)]")
    return ways


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
    known: Sequence[str] = EDITS,
    expanded: Callable[[Sequence[str]], tuple[str, ...]] = tuple,
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
    asked = list(captured) if isinstance(captured, Iterable) else [captured]
    wrong = [logprobs for logprobs in asked if not isinstance(logprobs, Logprobs)]
    if wrong or not isinstance(captured, Iterable):
        value = wrong[0] if wrong else captured
        raise TypeError(f"captured_logprobs must be a list of Logprobs, got {value!r}; [Logprobs(top=5)]")
    for logprobs in asked:
        check_token_ids(logprobs, vocab_size)
    return list(dict.fromkeys(asked))
