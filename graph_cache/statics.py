"""The static tensors of all variants: owned inputs, bound inputs, outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from graph_cache.buffers import InputBuffer, OutputBuffers, Results, first_rows
from graph_cache.key import Binding, VariantKey
from graph_cache.registry import Registration, Registry
from graph_cache.validation import check_results, check_tensor, listed


class StaticTensors:
    """One owned buffer an input name, one a result of a callable, and the caller's bound tensors.

    Attributes:
        bindings: identity of each bound input, by name.
    """

    def __init__(self, registry: Registry, capacity: int, device: torch.device) -> None:
        """Nothing is allocated.

        Args:
            registry: layouts of the inputs.
            capacity: rows of every buffer, the largest bucket M.
            device: where they live.
        """
        self._registry = registry
        self._capacity = capacity
        self._device = device
        self._inputs: dict[str, InputBuffer] = {}
        self._outputs: dict[str, OutputBuffers] = {}
        self._bound: dict[str, Tensor] = {}
        self.bindings: dict[str, Binding] = {}

    def bind(self, input_name: str, tensor: Tensor) -> None:
        """Refers to ``tensor`` (``[rows, >= tail...]``, any strides) as the input; raises where it cannot be it."""
        check_tensor(input_name, tensor, self._registry.spec(input_name), self._device)
        self._bound[input_name] = tensor.detach()
        self.bindings[input_name] = Binding.of(input_name, tensor)

    def unbind(self, input_name: str) -> None:
        """Drops the reference; raises ValueError when the input is unknown or not bound."""
        self._registry.spec(input_name)
        if input_name not in self._bound:
            raise ValueError(f"input {input_name!r} must be bound to be unbound; bound now: {listed(self._bound)}")
        del self._bound[input_name], self.bindings[input_name]

    def matched(self, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
        """The inputs whose tensor is the bound one."""
        bindings = self.bindings.items()
        return tuple(name for name, binding in bindings if name in tensors and binding.matches(tensors[name]))

    def owned(self, input_name: str) -> InputBuffer:
        """The owned buffer of an input, allocated the first time; raises ValueError for an unknown input."""
        if input_name not in self._inputs:
            self._inputs[input_name] = InputBuffer(self._registry.spec(input_name), self._capacity, self._device)
        return self._inputs[input_name]

    def owned_by(self, registration: Registration, key: VariantKey) -> dict[str, InputBuffer]:
        """The owned buffers a variant reads: of every input that its key does not bind."""
        bound = {each.input_name for each in key.binding or ()}
        return {name: self.owned(name) for name in registration.inputs if name not in bound}

    def read_by(
        self, registration: Registration, key: VariantKey, owned: Mapping[str, InputBuffer]
    ) -> dict[str, Tensor]:
        """What a variant reads, ``[B * times, *T]`` each: owned rows, or the bound tensor's."""
        return {
            name: owned[name].rows(key.rows * spec.times)
            if name in owned
            else first_rows(self._bound[name], key.rows * spec.times, spec.shape)
            for name, spec in registration.inputs.items()
        }

    def outputs_of(self, registration: Registration, results: Results, rows: int) -> OutputBuffers:
        """The output buffers of a callable, allocated for the first ``results`` (``[rows, *T]`` a field).

        Raises:
            TypeError: no NamedTuple of tensors, or another layout than the callable gave before, or than a callable
                gives that it covers or that covers it.
            ValueError: a field with other rows or on another device.
        """
        check_results(results, rows, self._device)
        layout = OutputBuffers.layout_of(results)
        covered = (self._registry.named(name) for name in registration.covers)
        for peer in (registration, *covered, *self._registry.covering(registration.name)):
            known = self._outputs.get(peer.name)
            if known is not None and known.layout != layout:
                raise TypeError(
                    f"{registration.name!r} must return what {peer.name!r} returns, got {layout} against "
                    f"{known.layout}; return one NamedTuple type with the same tails and dtypes"
                )
        if registration.name not in self._outputs:
            self._outputs[registration.name] = OutputBuffers(results, self._capacity)
        return self._outputs[registration.name]

    def nbytes(self) -> int:
        """Bytes of all owned inputs and outputs."""
        tensors: list[Tensor] = [buffer.tensor for buffer in self._inputs.values()]
        tensors += _flat(outputs.tensors for outputs in self._outputs.values())
        return sum(tensor.nbytes for tensor in tensors)


def _flat(groups: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    return [tensor for group in groups for tensor in group]
