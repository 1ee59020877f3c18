"""How the adapter behaves: data that travels to an engine's processes as one environment variable."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_sampler.functional.arguments import BACKENDS
from compiled_sampler.scalars import check_choice

VARIABLE = "COMPILED_SAMPLER_TOKENSPEED"
"""Environment variable that switches the plugin on: a name of ``PLACES`` or ``1``, and after a comma a backend."""
PLACES = ("greedy", "flashinfer", "flashinfer_full", "triton", "triton_full")
"""Sampling backends that TokenSpeed's command line offers; it offers no other."""


@dataclass(frozen=True)
class Settings:
    """What ``install`` was told."""

    instead_of: str | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        if self.instead_of is not None:
            check_choice("instead_of", self.instead_of, PLACES, "None takes no name")
        check_choice("backend", self.backend, BACKENDS, "leave it out")

    @property
    def text(self) -> str:
        """The value of the environment variable, from which ``from_text`` makes the same settings."""
        return f"{self.instead_of or 1},{self.backend}"


def from_text(text: str) -> Settings | None:
    """The settings that an environment variable holds; None for ``0`` and for nothing."""
    if text in ("", "0"):
        return None
    place, _, backend = text.partition(",")
    return Settings(None if place == "1" else place, backend or "auto")
