"""What the user is told about compiled stages: which torch compiled them, and which of them run eager instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LoweringStatus:
    """How a sampler's stages run.

    Attributes:
        torch_version: of the torch that compiles them.
        torch_is_known: whether Inductor's private parts were checked on it; on an unknown torch they are not touched,
            which costs speed alone.
        eager_stages: by name of a stage that runs in eager torch instead of compiled, why.
    """

    torch_version: str
    torch_is_known: bool
    eager_stages: Mapping[str, str]


class StageWarning(UserWarning):
    """A compiled stage differs from eager torch, or does not compile, and runs in eager torch instead."""
