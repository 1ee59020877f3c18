"""What a target compiles before questions are asked, in parts for processes side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compiled_sampler.conformance.bench import Bench

Part = Callable[[], object]
"""A part that can be pickled and hashed; equal ones are the same."""


def preparations(bench: Bench, names: Sequence[str]) -> list[Part]:
    """What the target compiles for questions of these names, and did not before.

    Args:
        bench: with the target.
        names: of the questions.
    """
    found = getattr(bench.target, "preparations", None)
    parts: list[Part] = [] if found is None else found(bench.device, names)
    return parts


def do(part: Part) -> None:
    """Do a part; what it returns stays in its process."""
    part()


def in_words(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {error}"
