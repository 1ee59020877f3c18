"""SGLang's tensors of a batch as arguments of ``compiled_sampler.functional``; needs no SGLang."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from compiled_sampler.modes import narrow_mode

LEAST_TEMPERATURE = float(np.nextafter(np.float32(1e-5), np.float32(1)))
MOST_TEMPERATURE = float(np.nextafter(np.float32(1e30), np.float32(1)))
"""The sampler's limits, as float32 holds them inside; SGLang takes temperatures below 1e-6 as greedy, and any other."""


def drawn_positions(positions: Tensor) -> Tensor:
    """The position of the token that each row draws, ``[B]``, from that of the last token that it read."""
    # Here alone positions of SGLang become those of the sampler: it gives that of a decode's input token, and behind a
    # prompt or a part of it the length less one.
    return positions + 1


def law_arguments(info: Any) -> dict[str, Any]:
    """The parameters of the rows, and the mode that serves them, as ``sample`` and ``probs`` take them."""
    if info.is_all_greedy:
        return {"temperature": 0.0}
    # Filters that no row has are numbers, which makes the step cheaper and changes no token.
    return {
        "temperature": info.temperatures.view(-1).clamp(LEAST_TEMPERATURE, MOST_TEMPERATURE),
        "top_k": info.top_ks if info.need_top_k_sampling else 0,
        "top_p": info.top_ps if info.need_top_p_sampling else 1.0,
        "min_p": info.min_ps if info.need_min_p_sampling else 0.0,
        "mode": narrow_mode(info.max_top_k) if info.need_top_k_sampling else None,
        "top_p_base": "all",  # as SGLang's filters are ("joint")
    }


def of_rows(arguments: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """The arguments of some rows, int64 ``[n]``."""
    return {name: value[rows] if isinstance(value, Tensor) else value for name, value in arguments.items()}
