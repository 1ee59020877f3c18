"""The mode of a batch: the cheapest that covers it, or the one that the caller names."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_sampler.modes import Mode, uncovered
from compiled_sampler.params import SamplingParams
from compiled_sampler.scalars import check_choice


def covering_mode(modes: Sequence[Mode], needs: int) -> Mode:
    """The cheapest mode that covers a batch.

    Args:
        modes: the mode table, cheapest first; the last mode covers every batch.
        needs: bit i is set if mode i does not cover the batch.
    """
    return next(mode for i, mode in enumerate(modes) if not needs >> i & 1)


def forced_mode(
    modes: Sequence[Mode], name: str, needs: int, slots: Sequence[int], params: Sequence[SamplingParams | None]
) -> Mode:
    """The mode of a name, or the cheapest covering mode of a family (``top_k_top_p`` for ``top_k_top_p[64]``).

    Args:
        modes: the mode table, cheapest first.
        name: of a mode or a family.
        needs: bit i is set if mode i does not cover the batch.
        slots: the slot of each row; -1 is padding.
        params: by slot.

    Raises:
        ValueError: an unknown name, or a mode that does not cover a row; the message names the row and the reason.
    """
    family = [i for i, mode in enumerate(modes) if name in (mode.name, mode.name.partition("[")[0])]
    if not family:
        check_choice("mode", name, [mode.name for mode in modes], "None chooses")
    for i in family:
        if not needs >> i & 1:
            return modes[i]
    mode = modes[family[-1]]
    for row, slot in enumerate(slots):
        request = params[slot] if slot >= 0 else None
        reason = uncovered(mode, request) if request else None
        if reason:
            raise ValueError(f"mode {mode.name} does not cover row {row} (slot {slot}): {reason}; mode=None chooses")
    raise AssertionError("needs and uncovered() disagree")
