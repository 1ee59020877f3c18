"""Modes: what a compiled variant can do, which requests it covers, and which one a batch needs.

A mode is static: it is part of every key, log line and test id. The table runs from the cheapest mode to ``full``,
which covers everything; a batch takes the first mode that covers each of its requests. Whatever covers a request gives
it the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from compiled_sampler.params import SamplingParams

TOP_P_BASES = ("top_k", "all")
RULES = ("match", "rejection", "block")
PROPOSALS = ("one_hot", "probabilities", "logits")
MAX_VOCAB_SIZE = 2**22 - 1
"""V at most, so that the sum of a row's weights fits into an int64."""

MOST_DRAFTS = 64
"""Drafts of a request, at most."""

CAPACITIES = (64,)
"""Candidate counts of the ``top_k_top_p`` modes."""

SMALL_ROWS, LARGE_ROWS = 32, 128
"""Batches for which kernels are shaped and tuned, besides the single row: one for 2 to 32 rows, one for more."""

FEW_ROWS = 16
"""Rows up to which keys are ranked by counting, on a GPU: more are chosen and sorted."""

MOST_SCORED = 2**23
"""Logits up to which a race of more than ``SMALL_ROWS`` rows scores each, on a GPU: of more, bounds rule most out."""

MOST_READ_TWICE = 2**21
"""The same of a race with min_p of more than ``FEW_ROWS`` rows: by bounds it is one pass instead of two."""

SHORT_ROW = 2**16
"""Tokens up to which a row takes ways of its own on a GPU, where passes over it are short."""

MANY_ROWS = 256
"""Rows from which levels of narrowing a short row take one kernel each in all modes."""


def row_class(rows: int, device: torch.device) -> int:
    """The batch whose kernels serve ``rows`` rows: 1, ``SMALL_ROWS`` or ``LARGE_ROWS``; on the CPU 1 or the last."""
    if rows == 1:
        return 1
    return SMALL_ROWS if rows <= SMALL_ROWS and device.type == "cuda" else LARGE_ROWS


def are_few(rows: int, device: torch.device) -> bool:
    """Whether keys of so many rows are ranked by counting."""
    return rows <= FEW_ROWS and device.type == "cuda"


def are_bounded(rows: int, vocab_size: int, *, filters_min_p: bool) -> bool:
    """Whether a GPU races over so many rows by bounds, which takes three kernels more and fewer instructions a logit.

    Args:
        rows: R.
        vocab_size: V.
        filters_min_p: whether min_p is applied.
    """
    fewest, most = (FEW_ROWS, MOST_READ_TWICE) if filters_min_p else (SMALL_ROWS, MOST_SCORED)
    return rows > fewest and rows * vocab_size > most


def are_chosen_at_once(rows: int, vocab_size: int, *, beside_a_pass: bool) -> bool:
    """Whether a GPU finds the blocks of a level of narrowing and chooses among them in one kernel.

    Beside a pass over rows it takes longer: p .9 of 128 rows 76 us instead of 71, of 256 rows 133 instead of 119. Not
    so where rows are short and many: 512 of 32,768 tokens 70 instead of 79.

    Args:
        rows: R, not a few.
        vocab_size: V.
        beside_a_pass: whether the mode weighs rows meanwhile.
    """
    return not beside_a_pass or (rows >= MANY_ROWS and vocab_size <= SHORT_ROW)


KernelClass = tuple[int, bool, bool, bool, bool]


def kernel_class(rows: int, vocab_size: int, device: torch.device) -> KernelClass:
    """All that decides which kernels serve so many rows."""
    on_gpu = device.type == "cuda"
    plain, with_min_p = (on_gpu and are_bounded(rows, vocab_size, filters_min_p=asked) for asked in (False, True))
    at_once = on_gpu and are_chosen_at_once(rows, vocab_size, beside_a_pass=True)
    return row_class(rows, device), are_few(rows, device), plain, with_min_p, at_once


def batches(sizes: Iterable[int], times: int, vocab_size: int, device: torch.device) -> list[tuple[int, int]]:
    """Batches that between them use the kernels of all batches: entries and rows, one for every pair of classes.

    Where it can be, the batch is the one that stands for its class, because the first call decides the tuning.

    Args:
        sizes: entries of the batches that will come.
        times: rows that an entry has at most; each has at least one.
        vocab_size: V.
        device: where they run.
    """
    typical = sorted({row_class(size, device) for size in (*sizes, 2)})
    found: dict[tuple[KernelClass, ...], tuple[int, int]] = {}
    for size in (*typical, *sorted(sizes)):
        for rows in (size * times, size):
            found.setdefault(tuple(kernel_class(n, vocab_size, device) for n in (size, rows)), (size, rows))
    return list(found.values())


@dataclass(frozen=True)
class Mode:
    """The static part of a sampling step."""

    name: str
    vocab_size: int
    draws: bool = True
    """False: every request is greedy and no noise is computed."""
    filters_min_p: bool = False
    """min_p is applied."""
    capacity: int = 0
    """Candidates that top-k and top-p look at; 0 applies no top-p."""
    wide: bool = False
    """Rows whose filters keep more tokens than ``capacity`` are exact too, by a search over the row."""
    base_is_row: bool = False
    """top-p is a share of the whole row's mass instead of the mass after top-k."""
    rule: str = ""
    """How drafts are verified, one of ``RULES``; empty where there are none."""
    drafts: str = "one_hot"
    """What the drafts were drawn from, one of ``PROPOSALS``."""
    from_probabilities: bool = False
    """Rows hold the target's probabilities instead of logits, and no filter is applied."""

    @property
    def samples_as(self) -> str:
        """The name in the mode table, also of a mode that verifies drafts."""
        return self.name.rpartition(", ")[2]

    @property
    def searches(self) -> bool:
        """Whether a row's filters may end beyond the candidates."""
        return self.wide and self.capacity < self.vocab_size


@dataclass(frozen=True)
class Verification:
    """One way of verifying drafts, for ``Sampler(verifications=...)``: what is compiled and captured ahead."""

    rule: str = "match"
    """One of ``RULES``."""
    width: int = 1
    """K, drafts a request at most."""
    drafts: str = "one_hot"
    """What the drafts were drawn from, one of ``PROPOSALS``; the rule ``match`` does not ask."""

    def __post_init__(self) -> None:
        """Raises ValueError for values out of range."""
        if self.rule not in RULES:
            raise ValueError(f"rule must be one of {RULES}, got {self.rule!r}; 'match' keeps the sampler's stream")
        if self.drafts not in PROPOSALS:
            raise ValueError(f"drafts must be one of {PROPOSALS}, got {self.drafts!r}; 'one_hot' knows only the tokens")
        if isinstance(self.width, bool) or not isinstance(self.width, int) or not 1 <= self.width <= MOST_DRAFTS:
            raise ValueError(f"width must be an int in [1, {MOST_DRAFTS}], got {self.width!r}; it counts drafts")
        if self.rule == "match" and self.drafts != "one_hot":
            raise ValueError(f"rule 'match' never looks at what drafts were drawn from, got drafts={self.drafts!r}")


def verifying(mode: Mode, rule: str, drafts: str = "one_hot") -> Mode:
    """The mode that verifies drafts of the requests that ``mode`` samples for."""
    return replace(mode, name=f"{rule}, {drafts}, {mode.name}", rule=rule, drafts=drafts)


def probabilities_mode(vocab_size: int) -> Mode:
    """The mode for rows that hold probabilities."""
    return Mode("probabilities", vocab_size, from_probabilities=True)


def mode_table(vocab_size: int, top_p_base: str) -> tuple[Mode, ...]:
    """All modes of a sampler, cheapest first."""
    base_is_row = top_p_base == "all"
    narrow = tuple(Mode(f"top_k_top_p[{c}]", vocab_size, True, True, c, False, base_is_row) for c in CAPACITIES)
    return (
        Mode("greedy", vocab_size, draws=False),
        Mode("no_filter", vocab_size),
        Mode("min_p", vocab_size, filters_min_p=True),
        *narrow,
        Mode("top_k", vocab_size, True, True, 0, True, base_is_row),
        Mode("full", vocab_size, True, True, CAPACITIES[-1], True, base_is_row),
    )


def uncovered(mode: Mode, params: SamplingParams) -> str | None:
    """Why a mode cannot serve a request, or None where it can."""
    if params.is_greedy:
        return None
    if not mode.draws:
        return f"temperature {params.temperature} draws"
    if params.min_p > 0.0 and not mode.filters_min_p:
        return f"min_p {params.min_p} is applied"
    covers_row = mode.wide or mode.capacity >= mode.vocab_size
    keeps_all_k = params.top_k == 0 or params.top_k >= mode.vocab_size
    if keeps_all_k and params.top_p >= 1.0:
        return None if covers_row or not mode.capacity else "top_k is off, so candidates alone cannot hold the row"
    if not mode.capacity and (params.top_p < 1.0 or not mode.wide):
        return f"top_k {params.top_k}, top_p {params.top_p} are applied"
    if covers_row or params.top_k in range(1, mode.capacity + 1):
        return None
    return f"top_k {params.top_k or 'off'} exceeds the capacity of {mode.capacity}"


def includes(mode: Mode, other: Mode) -> bool:
    """Whether a mode covers every request that another covers."""
    if not other.draws or (mode.wide and mode.capacity):
        return True
    if not mode.draws or (mode.wide and other.capacity):
        return False
    if mode.wide or other.wide:
        return mode.wide
    if bool(other.capacity) != bool(mode.capacity):
        return False
    return mode.capacity >= other.capacity and mode.filters_min_p >= other.filters_min_p
