"""What a request asks of XTC, "exclude top choices"; its stages are those of the pass that compares masses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.edits.checks import in_range
from compiled_sampler.edits.edit_spec import Column, EditSpec, Parameter

_MOST_THRESHOLD = 0.5  # above it no two tokens can both be top choices


class Xtc(NamedTuple):
    """Requests that exclude their top choices from some draws."""

    threshold: Tensor
    """float64 ``[S]``, the least probability of a top choice."""
    probability: Tensor
    """float64 ``[S]``, of an exclusion; 0 for none."""


XTC = EditSpec(
    name="xtc",
    kind="filter",
    effect="with this probability, drops all tokens with `p >= xtc_threshold` but the last of them in the order",
    parameters={
        "xtc_probability": Parameter(in_range("in [0, 1]", lambda x: 0.0 <= x <= 1.0, "0 excludes nothing")),
        "xtc_threshold": Parameter(in_range("in [0, 1]", lambda x: 0.0 <= x <= 1.0, "above 0.5 it excludes nothing")),
    },
    wanted=lambda params: params.xtc_probability > 0.0 and params.xtc_threshold <= _MOST_THRESHOLD,
    table=Xtc,
    columns={
        "threshold": Column(lambda params, row: params.xtc_threshold, dtype=torch.float64),
        "probability": Column(lambda params, row: params.xtc_probability, dtype=torch.float64),
    },
    reads_positions=True,
)
