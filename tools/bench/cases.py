"""What ``tools.bench`` measures: parameters, the logits that suit them, the work they cannot avoid, and the targets."""

from __future__ import annotations

from dataclasses import dataclass, field

from compiled_sampler import SamplingParams

TARGET_VOCAB_SIZE, TARGET_DTYPE = 151_936, "float32"
"""What the targets below were set for."""
NUM_DRAFTS = 3
"""K of every verification."""


@dataclass(frozen=True)
class Case:
    """One line of the benchmark."""

    name: str
    params: SamplingParams
    passes: tuple[str, ...]
    """What any kernel must compute for every logit, names of ``floors.INSTRUCTIONS`` or "race"."""
    targets: dict[int, float] = field(default_factory=dict)
    """Microseconds by rows, with drafts by requests, at ``TARGET_VOCAB_SIZE`` and ``TARGET_DTYPE``."""
    distribution: str = "peaked"
    """The logits that the targets are for, one of ``workloads.DISTRIBUTIONS``."""
    rule: str | None = None
    """How drafts are verified; None samples."""
    drafts: str = "one_hot"
    """What the drafts were drawn from."""
    final_passes: tuple[str, ...] = ()
    """What must be computed for every logit of one row a request."""
    sampler_multiple: float | None = None
    """The target is so many times what the sampler takes for the same rows without drafts."""

    @property
    def num_drafts(self) -> int:
        """K; 0 where nothing is verified."""
        return NUM_DRAFTS if self.rule else 0


def _by_rows(*targets: float) -> dict[int, float]:
    return dict(zip((1, 8, 32, 128, 512), targets, strict=True))


def _by_requests(*targets: float) -> dict[int, float]:
    return dict(zip((8, 32, 128), targets, strict=True))


_NO_FILTER = SamplingParams(temperature=0.8, seed=2)
_TOP_K_TOP_P = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=4)
_TOP_K_TOP_P_MIN_P = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.05, seed=5)
_ORDER, _RACE, _MASS = ("order",), ("race",), ("mass",)

SAMPLING = (
    Case("greedy", SamplingParams(temperature=0.0, seed=1), _ORDER, _by_rows(4, 5, 9, 23, 84)),
    Case("no_filter", _NO_FILTER, _RACE, _by_rows(4.7, 8, 16, 48, 185)),
    Case("min_p .05", SamplingParams(temperature=0.8, min_p=0.05, seed=3), _RACE, _by_rows(8, 11, 24, 65, 240)),
    Case("k 50 + p .9", _TOP_K_TOP_P, _ORDER, _by_rows(19, 26, 36, 65, 210)),
    Case("k 50 + p .9 + min_p .05", _TOP_K_TOP_P_MIN_P, _ORDER, _by_rows(19, 26, 36, 65, 210)),
    Case("p .9", SamplingParams(temperature=0.8, top_p=0.9, seed=6), _MASS, _by_rows(28, 34, 50, 90, 300)),
    Case("p .5", SamplingParams(temperature=0.8, top_p=0.5, seed=7), _MASS, _by_rows(28, 34, 50, 90, 300)),
    Case("k 1000", SamplingParams(temperature=0.8, top_k=1000, seed=8), _ORDER, _by_rows(36, 40, 52, 110, 360)),
    Case(
        "p .99",
        SamplingParams(temperature=0.8, top_p=0.99, seed=9),
        ("mass", "race"),  # on flat rows nearly every token is kept and takes part in the race
        _by_rows(55, 60, 80, 150, 450),
        "flat",
    ),
)
VERIFICATION = (
    Case("match, k 50 + p .9", _TOP_K_TOP_P, _ORDER, _by_requests(45, 78, 235), rule="match"),
    Case(
        "rejection by probabilities, k 50 + p .9",
        _TOP_K_TOP_P,
        _ORDER,
        _by_requests(105, 160, 420),
        rule="rejection",
        drafts="probabilities",
    ),
    Case("match, no_filter", _NO_FILTER, _RACE, rule="match", sampler_multiple=2.2),
    Case(
        "rejection by probabilities, no_filter",
        _NO_FILTER,
        _MASS,  # a draft's probability needs the sum over its row; only the final row of a request is drawn from
        rule="rejection",
        drafts="probabilities",
        final_passes=_RACE,
        sampler_multiple=2.2,
    ),
)
CASES = {case.name: case for case in SAMPLING}
VERIFY_CASES = {case.name: case for case in VERIFICATION}
