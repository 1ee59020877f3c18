"""What a request asks of typical-p; its stages are those of the pass that measures surprise."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.edits.checks import in_range
from compiled_sampler.edits.edit_spec import Column, EditSpec, Parameter


class TypicalP(NamedTuple):
    """Requests that keep tokens of about as much surprise as the law has in the mean."""

    share: Tensor
    """float64 ``[S]``, of the mass; 1 keeps every token."""


TYPICAL_P = EditSpec(
    name="typical_p",
    kind="filter",
    effect="keeps tokens in the order of their surprise's distance from the entropy, while the mass before is below it",
    parameters={
        "typical_p": Parameter(
            in_range("in (0, 1]", lambda x: 0.0 < x <= 1.0, "1.0 keeps every token"), in_generate=True
        )
    },
    wanted=lambda params: params.typical_p < 1.0,
    table=TypicalP,
    columns={"share": Column(lambda params, row: params.typical_p, off=1, dtype=torch.float64)},
)
