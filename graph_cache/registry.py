"""The registered callables and the layouts of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graph_cache.buffers import BufferSpec, Results, first_rows, rows_used
from graph_cache.validation import check_results, check_specs, listed


@dataclass(frozen=True)
class Registration:
    """A callable and the layout of its inputs.

    Attributes:
        name: what it is run under.
        fn: ``fn(**tensors) -> NamedTuple of tensors``.
        inputs: tail, dtype and fill of each keyword.
        covers: registered callables whose results this one gives too, bit for bit.
    """

    name: str
    fn: Callable[..., Results]
    inputs: dict[str, BufferSpec]
    covers: tuple[str, ...]

    def call(self, tensors: Mapping[str, Tensor], rows: int, device: torch.device) -> Results:
        """The callable's own results for views ``[rows, *T]`` of ``tensors`` (``[>= rows, >= tail...]``).

        Raises:
            TypeError: it returned no NamedTuple of tensors.
            ValueError: a result has other rows or is on another device.
        """
        used = {name: rows_used(tensors[name], spec, rows) for name, spec in self.inputs.items()}
        results = self.fn(**{n: first_rows(tensors[n], used[n], spec.shape) for n, spec in self.inputs.items()})
        check_results(results, rows, device)
        return results


class Registry:
    """Callables by name, in order of registration, and the one layout of every input name."""

    def __init__(self) -> None:
        """Nothing is registered."""
        self._callables: dict[str, Registration] = {}
        self._specs: dict[str, BufferSpec] = {}

    def add(
        self, name: str, fn: Callable[..., Results], inputs: Mapping[str, BufferSpec], covers: Sequence[str]
    ) -> None:
        """Registers a callable.

        Raises:
            ValueError: a name taken, no input, an input with another layout than before, an unknown covered name.
        """
        if name in self._callables:
            raise ValueError(f"a name must be registered once, got {name!r} again; choose another")
        for covered in covers:
            self.named(covered)
        check_specs(name, inputs, self._specs)
        self._specs.update(inputs)
        self._callables[name] = Registration(name, fn, dict(inputs), tuple(covers))

    def named(self, name: str) -> Registration:
        """The callable registered as ``name``.

        Raises:
            ValueError: there is none.
        """
        registration = self._callables.get(name)
        if registration is None:
            raise ValueError(
                f"a callable must be registered before use, got {name!r}; registered: {listed(self._callables)}"
            )
        return registration

    def chosen(self, names: Iterable[str] | None) -> list[Registration]:
        """The named callables, or all; raises ValueError for an unknown name."""
        return [self.named(name) for name in (self._callables if names is None else names)]

    def spec(self, input_name: str) -> BufferSpec:
        """The layout of an input.

        Raises:
            ValueError: no callable has it.
        """
        if input_name not in self._specs:
            raise ValueError(f"an input must belong to a callable, got {input_name!r}; known: {listed(self._specs)}")
        return self._specs[input_name]

    def covering(self, name: str) -> list[Registration]:
        """The callables that cover ``name``, in order of registration."""
        return [each for each in self._callables.values() if name in each.covers]
