"""The mode of rows whose top_k is bounded on the host, while the numbers themselves are on the device."""

from __future__ import annotations

from compiled_sampler.modes import CAPACITIES


def narrow_mode(most: int | None) -> str | None:
    """The name of the mode that keeps so many candidates; None where none does, and the caller's tensors choose.

    Args:
        most: a bound of every row's top_k; None where a row has none.
    """
    fitting = [capacity for capacity in CAPACITIES if most is not None and most <= capacity]
    return f"top_k_top_p[{min(fitting)}]" if fitting else None
