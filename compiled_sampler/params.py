"""Sampling parameters of one request, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_sampler.scalars import checked_float, checked_int

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e30


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request; numbers of numpy are stored as Python's, with the value that they hold.

    Args:
        temperature: 0 (greedy) or in [1e-5, 1e30]; the logits are divided by it.
        top_k: 0 (off) or the number of tokens to keep, in the order logit descending, id ascending.
        top_p: in (0, 1]; keeps the shortest prefix of the order that holds this share of the mass; 1 keeps all.
        min_p: in [0, 1]; keeps tokens at least this many times as likely as the likeliest; 0 keeps all.
        seed: any int in [-2**63, 2**64), taken modulo 2**64; None lets the sampler draw one.

    Raises:
        TypeError: a parameter of the wrong type.
        ValueError: a parameter out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check every parameter."""
        for name in ("temperature", "top_p", "min_p"):
            object.__setattr__(self, name, checked_float(name, getattr(self, name)))
        object.__setattr__(self, "top_k", checked_int("top_k", self.top_k))
        if self.seed is not None:
            object.__setattr__(self, "seed", checked_int("seed", self.seed))
        if not (self.temperature == 0.0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE):
            raise ValueError(
                f"temperature must be 0 or in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}], got {self.temperature}; "
                "0 is greedy sampling"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0, got {self.top_k}; pass 0 to switch it off, 0 keeps every token")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}; 1.0 keeps every token")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}; 0.0 keeps every token")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must be in [-2**63, 2**64), got {self.seed}; take it modulo 2**64")

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest one, of the lowest id among equals: temperature 0 or top_k 1."""
        return self.temperature == 0.0 or self.top_k == 1
