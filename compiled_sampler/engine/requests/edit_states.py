"""The state of the user's edits: tensors by slot, which steps read where they lie and an engine writes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_sampler.engine.boundary.edits import checked_states
from compiled_sampler.logit_edit import LogitEdit, name_of


class EditStates:
    """The tensors ``[S, ...]`` that edits declare; they keep their place, so that captured steps read what they hold.

    Args:
        edits: in the order in which they act.
        num_slots: S.
        vocab_size: V.
        device: of the sampler.
    """

    def __init__(self, edits: Sequence[LogitEdit], num_slots: int, vocab_size: int, device: torch.device) -> None:
        """Allocate all of them, since a step that is captured may allocate none that stays."""
        self._declared = {name_of(each): checked_states(each, vocab_size) for each in edits}
        self._tensors = dict[str, Tensor]()
        with torch.inference_mode(False):  # what is made inside could not be written outside of it
            for declared in self._declared.values():
                for key, each in declared.items():
                    shape = num_slots, *each.of_slot(vocab_size)
                    self._tensors[key] = torch.full(shape, each.initial, dtype=each.dtype, device=device)
            self._lent = {key: each.detach() for key, each in self._tensors.items()}  # whose gradients no step sees

    @property
    def every(self) -> tuple[Tensor, ...]:
        """All of the tensors."""
        return tuple(self._tensors.values())

    @property
    def sizes(self) -> tuple[Any, ...]:
        """What compiled code holds of the tensors; nothing without any."""
        return tuple((key, tuple(each.shape), each.dtype) for key, each in self._tensors.items())

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors on the device."""
        return sum(each.nbytes for each in self.every)

    def names(self, edit: str) -> tuple[str, ...]:
        """The names of the tensors of an edit."""
        return tuple(self._declared[edit])

    def tensors(self, edits: Collection[str]) -> list[Tensor]:
        """The tensors of some edits, in the order of all edits and their declarations."""
        return [self._tensors[key] for edit, keys in self._declared.items() if edit in edits for key in keys]

    def tensor(self, name: str) -> Tensor:
        """The tensor of a name, ``[S, ...]``, to lend to the engine: the same one each time.

        Raises:
            ValueError: no edit of the sampler has it.
        """
        if name not in self._lent:
            known = ", ".join(self._lent) or "none"
            raise ValueError(
                f"name must be of a state of the sampler's edits, here {known}, got {name!r}; LogitEdit.state"
            )
        return self._lent[name]

    def begin(self, slot: int, edits: Collection[str]) -> None:
        """Set the initial values of the edits of a request that takes a slot, on the current stream, without a wait."""
        for edit in edits:
            for key, each in self._declared[edit].items():
                self._tensors[key][slot].fill_(each.initial)
