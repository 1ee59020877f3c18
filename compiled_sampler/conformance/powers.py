"""The power of each question under an effort, where the clock does not end it and a sampler promises everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from compiled_sampler.conformance.bench import Effort
from compiled_sampler.conformance.evidence import binomial_power, rare_power
from compiled_sampler.conformance.questions.determinism import ROWS
from compiled_sampler.conformance.questions.law import bias, variation
from compiled_sampler.conformance.questions.paths import requests_of
from compiled_sampler.conformance.questions.randomness import KEYS, SERIAL_ROWS
from compiled_sampler.conformance.questions.randomness import LIVE as LIVE_OF_PAIRS
from compiled_sampler.conformance.questions.verification import LIVE, MOST_TRIALS
from compiled_sampler.conformance.rows import VOCAB

Power = Callable[[Effort], str]


def rows_in(rows: int, what: str) -> str:
    """The power of a comparison of rows, or of what else there is, in words."""
    return f"one {what} in {1 / rare_power(rows):.0f}"


def _of_law(share: int, cells: int) -> Power:
    return lambda effort: bias(effort.draws // share, cells)


def _of_rows(ways: int) -> Power:
    return lambda effort: rows_in(ways * ROWS * effort.batches, "row")


def _tail(effort: Effort) -> str:
    below, above = binomial_power(10**9, effort.tail_events / 10**9)
    return f"a tail of {below:.2f} or {above:.2f} times its mass"


def _serial(cells: int) -> Power:
    return lambda effort: variation(max(1, effort.pairs // SERIAL_ROWS) * SERIAL_ROWS // 2, cells**2)


LAWS = {
    "no_filter": (1, VOCAB), "greedy": (1, 2), "top_k": (1, 5), "top_p": (1, VOCAB), "min_p": (1, VOCAB),
    "mixed_filters": (1, 12), "top_p_base": (4, 4), "top_k_ties": (1, 5), "16_bits": (2, VOCAB), "flat_row": (1, VOCAB),
    "one_token": (16, VOCAB), "large_logits": (4, VOCAB),
}  # fmt: skip
"""Of the draws of an effort, the share of each law, and most tokens that it keeps."""

WAYS = {
    "twice": 1, "alone": 1, "order": 2, "batch_size": 11, "batchmates": 16, "equal_rows": 2, "strides": 2,
    "other_work": 1, "preemption": 1, "replay": 1,
}  # fmt: skip
"""Other ways to get the tokens of a batch."""

POWERS: dict[str, Power] = {
    **{f"law.{name}": _of_law(*sizes) for name, sizes in LAWS.items()},
    "law.top_p_boundary": lambda effort: f"a leak of {rare_power(effort.draws // 4):.0e}",
    "law.kept_set": lambda effort: f"a leak of {rare_power(effort.kept_draws):.0e}",
    "law.tail_1e-7": _tail,
    "law.tail_1e-8": _tail,
    **{f"determinism.{name}": _of_rows(ways) for name, ways in WAYS.items()},
    "determinism.new_process": lambda effort: rows_in(ROWS, "row"),
    "determinism.paths": lambda effort: f"one in {1 / rare_power(effort.rows):.0f} rows",
    **dict.fromkeys((f"randomness.{name}" for name in KEYS), lambda effort: variation(effort.pairs, LIVE_OF_PAIRS**2)),
    "randomness.serial": _serial(VOCAB),
    "randomness.serial_top_p": _serial(6),
    **dict.fromkeys(
        ("verification.one_hot", "verification.drawn", "verification.own_drafts"),
        lambda effort: variation(effort.trials, LIVE**3),
    ),
    "verification.stream": lambda effort: f"one in {1 / rare_power(requests_of(effort, 'match')):.0f} requests",
    "verification.paths": lambda effort: f"one in {1 / rare_power(requests_of(effort, 'block')):.0f} requests",
    **dict.fromkeys(
        ("verification.impossible", "verification.impossible_drawn"),
        lambda effort: f"acceptance of {rare_power(min(effort.trials, 4 * MOST_TRIALS)):.0e}",
    ),
    "verification.out_of_range": lambda effort: variation(min(effort.trials, MOST_TRIALS), LIVE),
    "robustness.nan": _of_law(16, VOCAB),
    "robustness.infinity": _of_law(16, 2),
}
"""Of questions whose power depends on the effort, by name."""

CONSTANTS = {
    "law.probs": "an error above 1e-05",
    "law.logprobs": "an error above 1e-04",
    "randomness.unseeded": "one noise for all requests, or for all calls",
    "verification.counters": "one request in 334",
    "robustness.all_masked": "a fault in any of 5",
    "robustness.largest_floats": "total variation 30.92%; of halves 34.18%",
    "robustness.single_token": "a fault in any of 5",
    "robustness.empty_batch": "a fault in any of 1",
    "robustness.padded_vocab": "one row in 167",
    "robustness.large_offsets": "a fault in any of 8",
    "robustness.inputs": "a fault in any of 5",
    "robustness.status": "a fault in any of 4",
    "cost.allocations": "one allocation in 200 replays",
    "cost.synchronisations": "one wait in 10",
    "cost.host_time": "a median above what is declared",
}
"""Of all others, for a sampler with three rules."""


def power_of(name: str, effort: Effort) -> str:
    """What a question finds with 99 % under an effort, in words."""
    return POWERS[name](effort) if name in POWERS else CONSTANTS[name]


def table(efforts: Mapping[str, Effort]) -> str:
    """A Markdown table of the powers that depend on the effort, a column for each effort; equal lines are one."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for name, power in POWERS.items():
        lines.setdefault(tuple(map(power, efforts.values())), []).append(f"`{name}`")
    head = [["questions", *efforts], ["---"] * (1 + len(efforts))]
    rows = [*head, *([", ".join(names), *powers] for powers, names in lines.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
