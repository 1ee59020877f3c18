"""Modes: the static part of a sampling step, which requests each mode covers, and the table that a sampler uses.

A mode is known at compile time: it is part of every cache key, log line and test id. The mode table is ordered from the
cheapest mode to ``full``, which covers every request; a batch is served by the first mode that covers each of its
requests. Every mode that covers a request draws the same token for it, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from compiled_sampler.params import SamplingParams
from compiled_sampler.scalars import check_choice, is_int

TOP_P_BASES = ("top_k", "all")
"""The mass that top_p is a share of: the mass after top-k, or the mass of the whole row."""

RULES = ("match", "rejection", "block")
"""Acceptance rules of drafts. A greedy batch takes ``match`` whatever its rule: see ``Mode.matches_drafts``."""

_RULES_ELSEWHERE = {"strict": "match", "probabilistic": "rejection"}  # the names of vLLM and TensorRT-LLM

PROPOSALS = ("one_hot", "probabilities", "logits")
"""Forms in which the distribution that drafts were drawn from is given to a verification."""

CACHE = "cache"
"""The form of proposals that a verification reads in the sampler's draft cache, where handles left them."""

PROCESSED = "processed"
"""The form of draft logits that the drafter edited and filtered itself: their law is their softmax, nothing else."""

MAX_VOCAB_SIZE = 2**22 - 1
"""Largest V, so that the sum of a row's weights fits into an int64."""

MOST_DRAFTS = 64
"""Largest number of drafts of one request."""
MOST_DRAWS = 2**24
"""Largest number of draws of one position."""

PROBABILITIES = "probabilities"
"""The name of the mode of rows that hold probabilities, to which no filter applies."""

CAPACITIES = (64,)
"""Numbers of candidates C of the ``top_k_top_p`` modes."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """The static part of a sampling step: which stages run. Only ``name`` and ``vocab_size`` may be positional."""

    name: str = field(kw_only=False)
    """Unique among the modes of a sampler."""
    vocab_size: int = field(kw_only=False)
    """V."""
    draws: bool = True
    """Whether noise is computed; False serves greedy requests alone."""
    filters_min_p: bool = False
    """Whether min_p is applied."""
    capacity: int = 0
    """C, candidates among which top-k and top-p are applied; 0 applies no top-p."""
    beyond_candidates: bool = False
    """Whether rows whose filters keep more than ``capacity`` tokens are served too, by a search over the row."""
    base_is_row: bool = False
    """Whether top-p is a share of the mass of the whole row instead of the mass after top-k."""
    rule: str = ""
    """Acceptance rule of drafts, one of ``RULES``; empty in a mode that samples."""
    drafts: str = "one_hot"
    """Form of the distribution that drafts were drawn from, one of ``PROPOSALS``, ``CACHE`` or ``PROCESSED``."""
    from_probabilities: bool = False
    """Whether rows hold the target's probabilities instead of logits; no filter is applied to them."""
    family: str = field(default="", repr=False)  # like the next field not shown: ``name`` says both
    """The name shared by modes that differ in ``capacity`` alone, which ``forced_mode`` takes too; empty for others."""
    rows_mode: str = field(default="", repr=False)
    """In a mode that verifies drafts the name of the mode that samples for its requests; else empty."""

    @property
    def samples_as(self) -> str:
        """The name of the mode of the mode table that this mode samples like, also where it verifies drafts."""
        return self.rows_mode or self.name

    @property
    def matches_drafts(self) -> bool:
        """Whether drafts are compared with what every row draws: by ``match``, and in the greedy mode by any rule.

        Of a greedy row's law, all in one token, each rule accepts just that token.
        """
        return self.rule == "match" or not self.draws

    @property
    def searches(self) -> bool:
        """Whether the filters of a row may keep more tokens than the candidates, so that a search is compiled."""
        return self.beyond_candidates and self.capacity < self.vocab_size


@dataclass(frozen=True)
class Verification:
    """A way of verifying drafts that ``warmup`` compiles and captures, for ``Sampler(verifications=...)``.

    Raises:
        ValueError: a value out of range.
    """

    rule: str = "match"
    """Acceptance rule, one of ``RULES``."""
    width: int = 1
    """K, the largest number of drafts of one request."""
    drafts: str = "one_hot"
    """Form of the distribution that drafts were drawn from, one of ``PROPOSALS``; "one_hot" for the rule "match".

    "cache" for handles of a sampler with a draft cache; those of a sampler without are "logits". "processed" for
    ``verify(draft_logits_are="processed")``.
    """
    trees: bool = False
    """Whether drafts are trees, ``verify(parents=...)``, of ``width`` nodes at most."""
    siblings: int = 0
    """w, where ``draft(width=w)`` is prepared too: on the target's noise for "match", with ``coupled=False`` for
    "rejection"; 0 prepares none."""

    def __post_init__(self) -> None:
        """Check every field."""
        check_rule(self.rule)
        known = (*PROPOSALS, CACHE, PROCESSED)
        check_choice("drafts", self.drafts, known, "'one_hot' knows only the tokens")
        if not is_int(self.width) or not 1 <= self.width <= MOST_DRAFTS:
            raise ValueError(f"width must be an int in [1, {MOST_DRAFTS}], got {self.width!r}; it counts drafts")
        object.__setattr__(self, "width", int(self.width))
        if not is_int(self.siblings) or not 0 <= self.siblings <= (self.width if self.trees else 0):
            most = f"an int in [0, {self.width}]" if self.trees else "0 without trees=True"
            raise ValueError(f"siblings must be {most}, got {self.siblings!r}; it counts children of a node")
        object.__setattr__(self, "siblings", int(self.siblings))
        if not isinstance(self.trees, bool):
            raise TypeError(f"trees must be a bool, got {self.trees!r}; True prepares verify(parents=...)")
        if self.trees:
            check_tree_rule(self.rule, self.drafts)
        if self.rule == "match" and self.drafts != "one_hot":
            raise ValueError(f"rule 'match' never looks at what drafts were drawn from, got drafts={self.drafts!r}")


def check_rule(rule: str) -> None:
    """Raise unless ``rule`` is one of ``RULES``.

    Raises:
        ValueError: an unknown rule; the message names the rule that other libraries call so.
    """
    known = _RULES_ELSEWHERE.get(rule) if isinstance(rule, str) else None
    way_out = "'match' keeps the sampler's stream" if known is None else f"it is called {known!r} here"
    check_choice("rule", rule, RULES, way_out)


def check_tree_rule(rule: str, drafts: str) -> None:
    """Raise unless a rule verifies trees of drafts, of proposals in the form ``drafts``."""
    if rule == "block":
        raise ValueError(
            "rule must be 'match' or 'rejection' for trees of drafts, got 'block', which judges one chain; or drafts "
            "without parents"
        )
    if rule == "rejection" and drafts == "one_hot":
        raise ValueError(
            "rule 'rejection' needs draft_logits or draft_probs for trees of drafts, got one-hot drafts; rule='match' "
            "accepts such drafts as often and keeps the stream"
        )


def verifying(mode: Mode, rule: str, drafts: str = "one_hot") -> Mode:
    """The mode that verifies drafts of the requests that ``mode`` samples for.

    Args:
        mode: of the mode table, or ``probabilities_mode``.
        rule: one of ``RULES``.
        drafts: one of ``PROPOSALS``, ``CACHE`` or ``PROCESSED``.
    """
    name = f"{rule}, {drafts}, {mode.name}"
    return replace(mode, name=name, rule=rule, drafts=drafts, rows_mode=mode.samples_as)


def proposing(mode: Mode) -> Mode:
    """The mode for the law of the proposals in a mode that verifies: without top-k and top-p if they are processed."""
    return replace(mode, capacity=0, beyond_candidates=False) if mode.drafts == PROCESSED else mode


def edits_drafts(mode: Mode) -> bool:
    """Whether edits act on what drafts were drawn from: on logits that the drafter has not processed."""
    return mode.drafts in ("logits", CACHE)


def probabilities_mode(vocab_size: int) -> Mode:
    """The mode of rows that hold probabilities instead of logits; it is not part of the mode table."""
    return Mode(PROBABILITIES, vocab_size, from_probabilities=True)


def mode_table(vocab_size: int, top_p_base: str) -> tuple[Mode, ...]:
    """All modes of a sampler, cheapest first.

    Args:
        vocab_size: V.
        top_p_base: one of ``TOP_P_BASES``.
    """
    filtering = Mode("", vocab_size, filters_min_p=True, base_is_row=top_p_base == "all")
    among_candidates = replace(filtering, family="top_k_top_p")
    return (
        Mode("greedy", vocab_size, draws=False),
        Mode("no_filter", vocab_size),
        Mode("min_p", vocab_size, filters_min_p=True),
        *(replace(among_candidates, name=f"top_k_top_p[{capacity}]", capacity=capacity) for capacity in CAPACITIES),
        replace(filtering, name="top_k", beyond_candidates=True),
        replace(filtering, name="full", beyond_candidates=True, capacity=CAPACITIES[-1]),
    )


def narrow_mode(most_top_k: int | None) -> str | None:
    """The name of the mode whose candidates hold so large a top_k; None where none does, or a row has no top_k.

    For callers whose parameters are on the device, and who know a bound of top_k on the host.
    """
    fitting = [capacity for capacity in CAPACITIES if most_top_k is not None and most_top_k <= capacity]
    return f"top_k_top_p[{min(fitting)}]" if fitting else None


def uncovered(mode: Mode, params: SamplingParams) -> str | None:
    """The reason why a mode cannot serve a request, or None if it covers the request."""
    if params.is_greedy:
        return None
    if not mode.draws:
        return f"temperature {params.temperature} draws"
    if params.min_p > 0.0 and not mode.filters_min_p:
        return f"min_p {params.min_p} is applied"
    # functional/row_table.py decides the same of tensors, in _prefix_is_covered: change both.
    covers_row = mode.beyond_candidates or mode.capacity >= mode.vocab_size
    keeps_all_k = params.top_k == 0 or params.top_k >= mode.vocab_size
    if keeps_all_k and params.top_p >= 1.0:
        return None if covers_row or not mode.capacity else "top_k is off, so candidates alone cannot hold the row"
    if not mode.capacity and (params.top_p < 1.0 or not mode.beyond_candidates):
        return f"top_k {params.top_k}, top_p {params.top_p} are applied"
    if covers_row or params.top_k in range(1, mode.capacity + 1):
        return None
    return f"top_k {params.top_k or 'off'} exceeds the capacity of {mode.capacity}"


def top_k_limits(vocab_size: int, capacities: Collection[int]) -> list[int]:
    """Numbers for top_k on both sides of each limit that ``uncovered`` compares it with, ascending."""
    return sorted({0, 2, vocab_size - 1, vocab_size, *capacities, *(capacity + 1 for capacity in capacities)})


def covering_mode(modes: Sequence[Mode], needs: int) -> Mode:
    """The cheapest mode of a table, whose last one covers every batch; bit i of needs is set if mode i does not."""
    return next(mode for i, mode in enumerate(modes) if not needs >> i & 1)


def forced_mode(
    modes: Sequence[Mode], name: str, needs: int, slots: Sequence[int], params: Sequence[SamplingParams | None]
) -> Mode:
    """The mode of a name, or the cheapest covering mode of a family (``top_k_top_p`` for ``top_k_top_p[64]``).

    Args:
        modes: the mode table, cheapest first.
        name: of a mode or a family.
        needs: bit i is set if mode i does not cover the batch.
        slots: the slot of each row; -1 is padding.
        params: by slot.

    Raises:
        ValueError: an unknown name, or a mode that does not cover a row; the message names the row and the reason.
    """
    family = [i for i, mode in enumerate(modes) if name in (mode.name, mode.family or mode.name)]
    if not family:
        check_choice("mode", name, [mode.name for mode in modes], "None chooses")
    for i in family:
        if not needs >> i & 1:
            return modes[i]
    mode = modes[family[-1]]
    for row, slot in enumerate(slots):
        request = params[slot] if slot >= 0 else None
        reason = uncovered(mode, request) if request else None
        if reason:
            raise ValueError(f"mode {mode.name} does not cover row {row} (slot {slot}): {reason}; mode=None chooses")
    raise AssertionError("needs and uncovered() disagree")


def includes(mode: Mode, other: Mode) -> bool:
    """Whether a mode covers every request that another mode of the same vocabulary covers.

    It is derived from ``uncovered``, which is evaluated for both modes on every request of ``_corner_requests``.
    """
    capacities = frozenset((mode.capacity, other.capacity))
    return _covered_corners(other, capacities) <= _covered_corners(mode, capacities)


@lru_cache
def _covered_corners(mode: Mode, capacities: frozenset[int]) -> frozenset[SamplingParams]:
    """The corner requests that a mode covers."""
    corners = _corner_requests(mode.vocab_size, capacities)
    return frozenset(params for params in corners if uncovered(mode, params) is None)


@lru_cache
def _corner_requests(vocab_size: int, capacities: frozenset[int]) -> tuple[SamplingParams, ...]:
    """Requests that decide whether one mode covers all that another covers, for modes of these capacities.

    ``uncovered`` compares temperature with 0, min_p with 0, top_p with 1, and top_k with 0, 1 (greedy), the capacity C
    and V, and nothing else. So it gives one answer for all requests whose parameters lie on the same sides of these
    limits. The temperature, min_p and top_p below are one value on each side, and the numbers for top_k are 0 and the
    ends of the ranges [2, C], [C + 1, V - 1] and [V, ...): each range that is not empty has an end among them.

    Args:
        vocab_size: V.
        capacities: C of both modes.
    """
    choices = itertools.product((0.0, 1.0), top_k_limits(vocab_size, capacities), (0.5, 1.0), (0.0, 0.5))
    return tuple(
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=0)
        for temperature, top_k, top_p, min_p in choices
    )
