"""What a request asks of p-less; its stages are those of the pass that compares masses."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from compiled_sampler.edits.checks import checked_flag
from compiled_sampler.edits.edit_spec import Column, EditSpec, Parameter


class PLess(NamedTuple):
    """Requests that keep tokens as likely as a token is to be drawn twice."""

    is_on: Tensor
    """int32 ``[S]``, 0 keeps every token."""


P_LESS = EditSpec(
    name="p_less",
    kind="filter",
    effect="keeps tokens with `p >= sum(p**2)`",
    parameters={"p_less": Parameter(lambda name, value: checked_flag(name, value, "True switches it on"))},
    wanted=lambda params: params.p_less,
    table=PLess,
    columns={"is_on": Column(lambda params, row: 1)},
)
