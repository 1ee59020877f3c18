"""How the adapter behaves: data that travels to an engine's processes as one environment variable."""

from __future__ import annotations

from compiled_sampler.functional.arguments import BACKENDS

VARIABLE = "COMPILED_SAMPLER_SGLANG"
"""Environment variable that switches the plugin on: ``1``, or a backend of ``compiled_sampler.functional``."""


def from_text(text: str) -> str | None:
    """The backend that an environment variable names; None for ``0`` and for nothing."""
    if text in ("", "0"):
        return None
    if text == "1":
        return "auto"
    if text not in BACKENDS:
        raise ValueError(f"{VARIABLE} must be 1 or one of {BACKENDS}, got {text!r}; 0 switches it off")
    return text
