"""What a request asks of top-n-sigma; its stages are those of the pass that measures deviations."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.edits.checks import in_range
from compiled_sampler.edits.edit_spec import Column, EditSpec, Parameter


class TopNSigma(NamedTuple):
    """Requests that keep tokens within so many standard deviations of the largest logit."""

    number: Tensor
    """float64 ``[S]``, deviations; 0 keeps every token."""


TOP_N_SIGMA = EditSpec(
    name="top_n_sigma",
    kind="filter",
    effect="keeps logits within n standard deviations of the largest",
    parameters={
        "top_n_sigma": Parameter(
            in_range("finite and >= 0", lambda x: 0.0 <= x < math.inf, "0 keeps every token"), off_at_minus_1=True
        )
    },
    wanted=lambda params: params.top_n_sigma > 0.0,
    table=TopNSigma,
    columns={"number": Column(lambda params, row: params.top_n_sigma, dtype=torch.float64)},
)
