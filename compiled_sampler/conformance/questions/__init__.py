"""All questions; a file for each section, and one for the comparisons of paths."""

from compiled_sampler.conformance.question import REGISTERED
from compiled_sampler.conformance.questions import cost, determinism, law, paths, randomness, robustness, verification

__all__ = ["QUESTIONS", "cost", "determinism", "law", "paths", "randomness", "robustness", "verification"]

SECTIONS = ("law", "determinism", "randomness", "verification", "robustness", "cost")

QUESTIONS = tuple(sorted(REGISTERED, key=lambda question: SECTIONS.index(question.section)))
"""In the order in which they are asked."""
