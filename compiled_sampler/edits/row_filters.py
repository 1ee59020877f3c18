"""What requests ask of filters of whole rows: top-n-sigma, min-k, p-less, typical-p and XTC ("exclude top choices").

Their stages stand in ``passes/row_filters.py``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.edits.edit_spec import Column, EditSpec, Parameter, checked_flag, in_range

_MOST_THRESHOLD = 0.5  # above it no two tokens can both be top choices of XTC


class TopNSigma(NamedTuple):
    """Requests that keep tokens within so many standard deviations of the largest logit."""

    number: Tensor  # float64 [S], deviations; 0 keeps every token


TOP_N_SIGMA = EditSpec(
    name="top_n_sigma",
    kind="filter",
    parameters={
        "top_n_sigma": Parameter(
            in_range("finite and >= 0", lambda x: 0.0 <= x < math.inf, "0 keeps every token"), off_at_minus_1=True
        )
    },
    wanted=lambda params: params.top_n_sigma > 0.0,
    table=TopNSigma,
    columns={"number": Column(lambda params, row: params.top_n_sigma, dtype=torch.float64)},
)


class MinK(NamedTuple):
    """Requests that keep tokens before the cliff of their logits."""

    tau: Tensor  # float64 [S], ranks times the range of logits that are kept behind it too; -1 keeps every token


MIN_K = EditSpec(
    name="min_k",
    kind="filter",
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


class PLess(NamedTuple):
    """Requests that keep tokens as likely as a token is to be drawn twice."""

    is_on: Tensor  # int32 [S], 0 keeps every token


P_LESS = EditSpec(
    name="p_less",
    kind="filter",
    parameters={"p_less": Parameter(lambda name, value: checked_flag(name, value, "True switches it on"))},
    wanted=lambda params: params.p_less,
    table=PLess,
    columns={"is_on": Column(lambda params, row: 1)},
)


class TypicalP(NamedTuple):
    """Requests that keep tokens of about as much surprise as the law has in the mean."""

    share: Tensor  # float64 [S], of the mass; 1 keeps every token


TYPICAL_P = EditSpec(
    name="typical_p",
    kind="filter",
    parameters={
        "typical_p": Parameter(
            in_range("in (0, 1]", lambda x: 0.0 < x <= 1.0, "1.0 keeps every token"), in_generate=True
        )
    },
    wanted=lambda params: params.typical_p < 1.0,
    table=TypicalP,
    columns={"share": Column(lambda params, row: params.typical_p, off=1, dtype=torch.float64)},
)


class Xtc(NamedTuple):
    """Requests that exclude their top choices from some draws."""

    threshold: Tensor  # float64 [S], the least probability of a top choice
    probability: Tensor  # float64 [S], of an exclusion; 0 for none


XTC = EditSpec(
    name="xtc",
    kind="filter",
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
