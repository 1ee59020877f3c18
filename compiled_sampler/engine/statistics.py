"""What ``Sampler.statistics`` returns."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_sampler.lowering.compiled_stages import LoweringStatus
from graph_cache import CacheStatistics


@dataclass(frozen=True)
class SamplerStatistics(CacheStatistics):
    """A snapshot of a sampler: the counts of its graph cache, and how its compiled stages run.

    Attributes:
        lowering: the torch that compiles the stages, whether it is known, and the stages that run in eager torch
            instead; None on the eager backend.
        draft_cache_bytes: bytes of the draft cache, ``(S + 1) * K * V`` logits; 0 without one.
        edit_bytes: bytes of the edits and the history by slot, 0 before a request or a capture needs them; and of the
            state of the user's edits, which is there from the start.
        inexact_edits: names of the sampler's edits that do not promise equal bits (``LogitEdit.bit_exact``).
    """

    lowering: LoweringStatus | None
    draft_cache_bytes: int
    edit_bytes: int
    inexact_edits: tuple[str, ...] = ()
