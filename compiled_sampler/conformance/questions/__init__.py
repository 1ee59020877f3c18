"""All questions, in the order in which they are asked; a file for each section."""

from compiled_sampler.conformance.questions import cost, determinism, law, randomness, robustness, verification

QUESTIONS = (
    *law.QUESTIONS,
    *determinism.QUESTIONS,
    *randomness.QUESTIONS,
    *verification.QUESTIONS,
    *robustness.QUESTIONS,
    *cost.QUESTIONS,
)
