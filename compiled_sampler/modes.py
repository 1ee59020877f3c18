"""Modes: what a compiled variant can do, which requests it covers, and which one a batch needs.

A mode is static: it is part of every key, log line and test id. The table runs from the cheapest mode to ``full``,
which covers everything; a batch takes the first mode that covers each of its requests. Whatever covers a request gives
it the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
