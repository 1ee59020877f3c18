"""What a request asks of min-k; its stages are those of the pass that finds cliffs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.edits.checks import checked_flag, in_range
from compiled_sampler.edits.edit_spec import Column, EditSpec, Parameter


class MinK(NamedTuple):
    """Requests that keep tokens before the cliff of their logits."""

    tau: Tensor
    """float64 ``[S]``, ranks times the range of logits that are kept behind it too; -1 keeps every token."""


MIN_K = EditSpec(
    name="min_k",
    kind="filter",
    effect="keeps the first k of the order, k the larger of the rank of the cliff and of `floor(τ / range)`",
    parameters={
        "min_k": Parameter(lambda name, value: checked_flag(name, value, "True switches it on")),
        "min_k_tau": Parameter(
            in_range("finite and >= 0", lambda x: 0.0 <= x < math.inf, "0 keeps no token behind the cliff")
        ),
    },
    wanted=lambda params: params.min_k,
    table=MinK,
    columns={"tau": Column(lambda params, row: params.min_k_tau, off=-1, dtype=torch.float64)},
)
