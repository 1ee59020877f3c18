"""A table on the device that the host changes a few entries at a time: they travel with numbers that graphs fetch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from graph_cache.memory.pinned import PinnedRing

_MOST_CHANGES = 4  # entries that travel with one fetch; requests come one by one, and more are faster in one copy


class HostTable:
    """Words of int32 on the device, of which the host has a copy: changes come by a fetch, or all words by a copy.

    Args:
        words: int32 ``[W]``; the copy of the host, which the owner writes before it calls ``change``.
        width: words of an entry.
        device: of the table.

    Attributes:
        there: int32 ``[W + 1]`` on the device; the last one is written by patches that change less than they may.
        is_pending: whether there are changes that the device does not have.
        travels: whether the last changes went with a fetch, so that the next may wait for one too.
        nothing: the patch that changes nothing, bytes.
        num_places: words that a patch writes.
    """

    def __init__(self, words: np.ndarray, width: int, device: torch.device) -> None:
        """Bring all words to the device."""
        self._bytes, self._device = words.data.cast("B"), device
        with torch.inference_mode(False):  # a tensor made under inference mode could not be written outside of it
            self.there = torch.zeros(len(words) + 1, dtype=torch.int32, device=device)
            self._all = self.there[:-1]
            self._all.copy_(torch.from_numpy(words))
        self._ring = PinnedRing(len(words), torch.int32, device)
        self._changes: dict[bytes, bytes] = {}  # values by places; an entry that changes again is there once
        self.is_pending, self.travels = False, False
        self._is_lost = False  # whether the device lacks changes that are no longer listed
        self._no_places = np.full(width, len(words), np.int64).tobytes()
        self._no_values = bytes(4 * width)
        self.num_places = _MOST_CHANGES * width
        self.nothing = _MOST_CHANGES * self._no_places + _MOST_CHANGES * self._no_values

    def change(self, places: bytes, values: bytes) -> None:
        """Note that the host's copy has an entry that the device does not have.

        Args:
            places: of its words, int64 ``[width]``; entries have the same places or none in common.
            values: of its words, int32 ``[width]``.
        """
        self._changes[places] = values
        self.is_pending = True

    def taken(self) -> bytes | None:
        """What changed, for ``patched`` to write, which counts as there from now on.

        None where ``upload`` must bring it, since there is too much or something was lost.
        """
        missing = _MOST_CHANGES - len(self._changes)
        if missing < 0 or self._is_lost:
            return None
        places, values = b"".join(self._changes), b"".join(self._changes.values())
        self._changes.clear()
        self.is_pending = False
        return b"".join((places, self._no_places * missing, values, self._no_values * missing))

    def lose(self) -> None:
        """Count what was taken last as not there; all words are pending again."""
        self.is_pending = self._is_lost = True

    def patched(self, places: Tensor, values: Tensor) -> None:
        """Write a patch on the device, whose int64 places and int32 values ``[num_places]`` are there."""
        self.there.index_copy_(0, places, values)

    def upload(self) -> None:
        """Bring all words to the device, on the current stream and without a wait, if any change is pending.

        Raises:
            RuntimeError: a change is pending and the current stream is being captured, which would freeze it.
        """
        if not self.is_pending:
            return
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("changes of a table must not be pending inside a capture, which would freeze them")
        self._ring.send(self._bytes, self._all)
        self._changes.clear()
        self.is_pending = self._is_lost = self.travels = False  # only now: where it fails, a later upload tries again
