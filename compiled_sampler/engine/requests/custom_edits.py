"""The edits of the user that a sampler has: names, constants on the device, what requests set, and states by slot."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.edits.names import EDITS, GIVEN, HISTORY, MASK
from compiled_sampler.edits.tables import CustomTables, RequestNumbers, RequestState
from compiled_sampler.engine.boundary.edits import (
    checked_request,
    checked_states,
    checked_tables,
    numbers_without,
    param_kinds,
)
from compiled_sampler.engine.boundary.tensors import check_edit_input, check_token_bitmask
from compiled_sampler.logit_edit import CustomEdits, EditInput, LogitEdit, name_of
from compiled_sampler.params import SamplingParams
from graph_cache import BufferSpec

_ALIGNED = 8  # columns of 8 bytes; kernels clone what is not aligned


class CustomEditSet:
    """The edits of the user that a sampler was made with; ``checked_custom_edits`` has looked at them."""

    def __init__(self, edits: Sequence[LogitEdit], vocab_size: int, device: torch.device, num_slots: int) -> None:
        self._edits = {name_of(each): each for each in edits}
        self.names = tuple(self._edits)
        self.all_names = (*EDITS, *self.names)  # the library's first
        self._params = {name: param_kinds(each) for name, each in self._edits.items()}
        self._starts, end = {}, 0
        for name in self.names:
            self._starts[name] = end
            end += 1 + len(self._params[name])
        # numbers of a request, 8 bytes each
        self.num_columns = -(-end // _ALIGNED) * _ALIGNED
        # those of a request that has none of these edits, which are called with its row all the same
        self._numbers_without = np.zeros(self.num_columns, np.int64)
        for name, each in self._edits.items():
            self._set_params(self._numbers_without, name, numbers_without(each))
        self.inexact = tuple(name for name, each in self._edits.items() if not each.bit_exact)
        # those that read tensors of the call
        self.of_call = tuple(name for name, each in self._edits.items() if each.inputs)
        self._owners = {key: (name, spec) for name, each in self._edits.items() for key, spec in each.inputs.items()}
        self._tables: dict[str, dict[str, Tensor]] = {}
        with torch.inference_mode(False):
            for name, each in self._edits.items():
                made = checked_tables(each, vocab_size)
                self._tables[name] = {key: table.to(device)[None] for key, table in made.items()}
        self._vocab_size = vocab_size
        self.states = EditStates(edits, num_slots, vocab_size, device)

    def check(self, params: SamplingParams) -> None:
        """Raise unless the edits that a request names are of this sampler, with parameters as they declare."""
        for name, given in params.custom:
            if name not in self._edits:
                known = ", ".join(self.names) or "none"
                raise ValueError(
                    f"extra_args must name edits of the sampler, here {known}, got {name!r}; Sampler(edits=)"
                )
            checked_request(self._edits[name], given)

    def expanded(self, edits: Sequence[str]) -> tuple[str, ...]:
        """Names of edits in their order, with ``HISTORY`` if an edit of the user among them reads the history."""
        reads = any(self._edits[name].history_tokens for name in edits if name in self._edits)
        return tuple(name for name in self.all_names if name in edits or (reads and name == HISTORY))

    def numbers_of(self, params: SamplingParams) -> np.ndarray:
        """The numbers of a request, int64 ``[num_columns]``; ``check`` has looked at it."""
        row = self._numbers_without.copy()
        for name, given in params.custom:
            row[self._starts[name]] = 1
            self._set_params(row, name, checked_request(self._edits[name], given))
        return row

    def _set_params(self, row: np.ndarray, name: str, values: Mapping[str, float | int]) -> None:
        for place, (key, is_float) in enumerate(self._params[name], start=self._starts[name] + 1):
            row[place] = np.float32(values[key]).view(np.int32) if is_float else values[key]

    def step(self, edits: Sequence[str]) -> CustomEdits | None:
        """The edits of the user that a step makes; None for none."""
        used = [name for name in self.names if name in edits]
        if not used:
            return None
        return CustomEdits(
            edits=tuple(self._edits[name] for name in used),
            starts=tuple(self._starts[name] for name in used),
            params=tuple(self._params[name] for name in used),
            tables=tuple(tuple(self._tables[name]) for name in used),
            states=tuple(self.states.names(name) for name in used),
        )

    def tables(self, edits: Sequence[str], columns: Tensor) -> CustomTables:
        """What the edits of a step read; ``columns`` are the numbers of all requests, int64 ``[S, num_columns]``."""
        used = (table for name in self.names if name in edits for table in self._tables[name].values())
        states = map(RequestState, self.states.tensors(edits))
        return CustomTables(RequestNumbers(columns), tuple(used), tuple(states))

    def inputs(self, edits: Sequence[str]) -> dict[str, EditInput]:
        """The tensors of the call that a batch with these edits reads, by the names of a step's inputs, in order."""
        return {f"{GIVEN}{key}": spec for key, (owner, spec) in self._owners.items() if owner in edits}

    def buffers(self, edits: Sequence[str], times: int) -> dict[str, BufferSpec]:
        """``inputs`` as the graph cache has them, with ``times`` rows an entry."""
        found = self.inputs(edits)
        shapes = {name: (self._vocab_size,) if spec.per_token else () for name, spec in found.items()}
        return {name: BufferSpec(shapes[name], spec.dtype, 0, times) for name, spec in found.items()}

    def given(self, edits: Sequence[str], edit_inputs: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """The tensors of a call that its batch reads, by the names of a step's inputs; nothing else is looked at."""
        if edit_inputs is None:
            return {}
        if not isinstance(edit_inputs, Mapping):
            raise TypeError(
                f"edit_inputs must map names to tensors, got {type(edit_inputs).__name__}; {{name: tensor}}"
            )
        for name in edit_inputs:
            if name not in self._owners:
                known = ", ".join(self._owners) or "none"
                raise ValueError(f"edit_inputs must be inputs of the sampler's edits, here {known}, got {name!r}")
        return {f"{GIVEN}{key}": edit_inputs[key] for key in map(_key_of, self.inputs(edits)) if key in edit_inputs}

    def check_given(self, edits: Sequence[str], given: Mapping[str, Any], rows: int, device: torch.device) -> None:
        """Raise unless a call brings every tensor that its batch reads, and any mask, in the right format."""
        if MASK in given:
            check_token_bitmask(given[MASK], rows, self._vocab_size, device)
        for name, spec in self.inputs(edits).items():
            key = _key_of(name)
            if name not in given:
                owner, _ = self._owners[key]
                raise ValueError(
                    f"edit_inputs must have {key!r} for a batch with {owner}, got none; edit_inputs={{...}}"
                )
            check_edit_input(name, given[name], rows, self._vocab_size if spec.per_token else 0, spec.dtype, device)


def _key_of(name: str) -> str:
    return name.removeprefix(GIVEN)


class EditStates:
    """The tensors ``[S, ...]`` that edits declare; they keep their place, as captured steps read there."""

    def __init__(self, edits: Sequence[LogitEdit], num_slots: int, vocab_size: int, device: torch.device) -> None:
        # All are allocated now: a step that is captured may allocate none that stays.
        self._declared = {name_of(each): checked_states(each, vocab_size) for each in edits}
        self._tensors = dict[str, Tensor]()
        with torch.inference_mode(False):  # what is made inside could not be written outside of it
            for declared in self._declared.values():
                for key, each in declared.items():
                    shape = num_slots, *each.of_slot(vocab_size)
                    self._tensors[key] = torch.full(shape, each.initial, dtype=each.dtype, device=device)
            self.every = tuple(self._tensors.values())
            self._lent = {key: each.detach() for key, each in self._tensors.items()}  # whose gradients no step sees

    def names(self, edit: str) -> tuple[str, ...]:
        """The names of the tensors of an edit."""
        return tuple(self._declared[edit])

    def tensors(self, edits: Collection[str]) -> list[Tensor]:
        """The tensors of some edits, in the order of all edits and their declarations."""
        return [self._tensors[key] for edit, keys in self._declared.items() if edit in edits for key in keys]

    def tensor(self, name: str) -> Tensor:
        """The tensor of a name, ``[S, ...]``, to lend to the engine: the same one each time."""
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
