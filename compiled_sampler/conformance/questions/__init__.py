"""Questions, a file for each section, and one for the comparisons of paths; importing this registers all."""

from compiled_sampler.conformance.questions import cost, determinism, law, paths, randomness, robustness, verification

__all__ = ["SECTIONS", "cost", "determinism", "law", "paths", "randomness", "robustness", "verification"]

SECTIONS = ("law", "determinism", "randomness", "verification", "robustness", "cost")
