"""How the adapter behaves: data that travels to an engine's processes as one environment variable."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields

from compiled_sampler.scalars import check_choice

VARIABLE = "COMPILED_SAMPLER_VLLM"
"""Environment variable that switches the plugin on: ``1``, or settings such as ``rule=rejection,backend=eager``."""
_OFF, _ON = ("", "0"), "1"
CHOICES: dict[str, tuple[str, ...]] = {
    "on_unsupported": ("error", "stock"),
    "rule": ("match", "rejection", "block"),
    "backend": ("auto", "graph", "compiled", "eager", "reference"),
    "warmup": ("start", "off"),
}


@dataclass(frozen=True)
class Settings:
    """What ``install`` was told; it says what the fields mean."""

    on_unsupported: str = "error"
    rule: str = "match"
    backend: str = "auto"
    warmup: str = "start"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices, "leave it out")

    @property
    def text(self) -> str:
        """The value of the environment variable, from which ``from_text`` makes the same settings."""
        settings = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return ",".join(f"{name}={value}" for name, value, default in settings if value != default) or _ON


def warn_of_v2(value: str) -> None:
    """Say that ``v2="untested"`` says nothing any more; no other value was ever taken for an engine that draws."""
    check_choice("v2", value, ("untested",), "leave it out: V2 runners draw here like V1 runners")
    warnings.warn("v2='untested' is the default now; leave it out", DeprecationWarning, stacklevel=3)


def from_text(text: str) -> Settings | None:
    """The settings that an environment variable holds; None for ``0`` and for nothing."""
    if text in _OFF:
        return None
    if text == _ON:
        return Settings()
    given = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name == "v2":
            warn_of_v2(value)
            continue
        if name not in CHOICES:
            raise ValueError(
                f"{VARIABLE} must be 1 or settings of {tuple(CHOICES)}, got {text!r}; rule=match,backend=auto"
            )
        given[name] = value
    return Settings(**given)
