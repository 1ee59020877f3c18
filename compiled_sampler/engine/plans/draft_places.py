"""Where the drafts of a batch lie: among padded ones, and where padded ones lie among them."""

from __future__ import annotations

import numpy as np


def drafted_ids(counts: np.ndarray) -> np.ndarray | None:
    """``Plan.drafted`` of these numbers of drafts ``[N]``."""
    width = int(counts.max(initial=0))
    if (counts == width).all():
        return None
    ends = counts.cumsum()
    first: np.ndarray = np.repeat(np.arange(len(counts)) * width - (ends - counts), counts)
    return first + np.arange(ends[-1])


def padded_ids(counts: np.ndarray) -> np.ndarray:
    """``Plan.padded`` of these numbers of drafts ``[N]``, not all 0; any draft where a request has none."""
    ends = counts.cumsum()
    index: np.ndarray = (ends - counts)[:, None] + np.arange(counts.max(initial=0))
    return index.clip(max=ends[-1] - 1).ravel()
