"""The adapter of TokenSpeed has left the library; for a release its names are here, and say so."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from compiled_sampler.integrations.engine_interface import ends_process

VARIABLE = "COMPILED_SAMPLER_TOKENSPEED"  # environment variable that switched the adapter on


def load() -> None:
    """What TokenSpeed calls in each of its processes, which ends where the variable asks for the adapter."""
    with ends_process(VARIABLE):
        if os.environ.get(VARIABLE, "") not in ("", "0"):
            install()


def install(**settings: Any) -> NoReturn:
    """Raise ImportError with the way out."""
    raise ImportError(
        "the adapter of TokenSpeed has left compiled_sampler: it was never run in the engine; unset "
        f"{VARIABLE}, and see docs/engines.md for where a sampler goes in"
    )
