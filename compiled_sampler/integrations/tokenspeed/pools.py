"""Parameters of requests by TokenSpeed's pool index: tensors that a captured graph reads, and modes on the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from compiled_sampler.modes import mode_table, uncovered
from compiled_sampler.params import SamplingParams
from compiled_sampler.scalars import as_int64

MODES = ("greedy", "no_filter", "top_k_top_p[64]", "full")
"""Modes that a step may run in, cheapest first; the last one covers every request."""
LEAST_TEMPERATURE = 1e-5
"""The sampler's limit; TokenSpeed takes temperatures below 1e-6 as greedy, and any other."""
_COLUMNS: dict[str, tuple[torch.dtype, float]] = {
    "temperature": (torch.float64, 1.0),
    "top_k": (torch.int64, 1),
    "top_p": (torch.float64, 1.0),
    "min_p": (torch.float64, 0.0),
    "seeds": (torch.int64, 0),
}
"""Arguments of ``functional.sample``, and what a slot holds before a request has it: a greedy one."""


class RequestPools:
    """The parameters of the request that each pool index stands for."""

    def __init__(self, count: int, vocab_size: int, device: Any) -> None:
        self._columns = {
            name: torch.full((count,), value, dtype=dtype, device=device) for name, (dtype, value) in _COLUMNS.items()
        }
        self._table = [mode for mode in mode_table(vocab_size, "top_k") if mode.name in MODES]
        self._covering = [frozenset(MODES)] * count

    def put(self, index: int, params: Any) -> None:
        """Set the parameters of a pool index: of a request with a seed."""
        checked = sampler_params(params)
        values = (checked.temperature, checked.top_k, checked.top_p, checked.min_p, as_int64(int(params.seed)))
        for column, value in zip(self._columns.values(), values, strict=True):
            column[index].fill_(value)
        self._covering[index] = frozenset(mode.name for mode in self._table if not uncovered(mode, checked))

    def mode_of(self, indices: Iterable[int]) -> str:
        """The name of the cheapest mode that covers the requests of a step."""
        covering = frozenset(MODES).intersection(*(self._covering[index] for index in indices))
        return next(name for name in MODES if name in covering)

    def rows(self, indices: Tensor) -> dict[str, Tensor]:
        """The arguments of ``functional.sample`` for pool indices, int64 ``[B]`` on the device."""
        return {name: column.index_select(0, indices) for name, column in self._columns.items()}


def sampler_params(params: Any) -> SamplingParams:
    """TokenSpeed's parameters as those of a sampler."""
    return SamplingParams(
        temperature=max(float(params.temperature), LEAST_TEMPERATURE),
        top_k=int(params.top_k),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        seed=int(params.seed) % 2**64,
    )


UNSUPPORTED = ("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")
"""Features of a request that the adapter does not have, as TokenSpeed names them."""


def unsupported(features: Iterable[str]) -> str | None:
    """What a request asks for that it cannot have, in one line; None for nothing."""
    wanted = sorted(set(features) & set(UNSUPPORTED))
    return f"{', '.join(wanted)} must be left out; the adapter of compiled_sampler has none" if wanted else None
