"""The registered callables, the layouts of their inputs, and the checks of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Results = tuple[Tensor | None, ...]
"""A NamedTuple of tensors; a field that is None is left out."""
Given = Tensor | bytes
"""An input of a run: a tensor, or of the host R numbers of the input's dtype, as the machine has them."""


@dataclass(frozen=True)
class BufferSpec:
    """The layout of one input of a callable.

    Attributes:
        shape: the tail T after the row dimension; ``()`` for one value a row.
        dtype: element type.
        fill: value of the rows that belong to no request, which the callable must accept. It is also what a covering
            callable reads in an input that the covered callable lacks.
        times: largest number of rows of this input for each row of a batch.
        ragged: whether a batch may bring fewer rows than ``times`` each; the callable then finds in other inputs which
            rows belong to which request. Every input with ``times`` above 1 is ragged.
        also: further dtypes that a batch may bring. The copy into an owned buffer converts; the callable gets them as
            they are where it reads the caller's tensor in place, and in direct calls.
        fetched: whether batches mostly bring it as bytes. A variant is then captured a second time, as a graph that
            fetches the bytes itself where the host has left them.

    Raises:
        TypeError: the dtype would round the fill.
        ValueError: ``times`` is below 1; ``fetched`` of anything but one int64 a row.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: int | float
    times: int = 1
    ragged: bool = False
    also: tuple[torch.dtype, ...] = ()
    fetched: bool = False

    def __post_init__(self) -> None:
        """Check ``times``, ``fill`` and ``fetched``."""
        if self.times < 1:
            raise ValueError(f"times must be >= 1, got {self.times}; 1 is one row for each row of a batch")
        if isinstance(self.fill, float) and not self.dtype.is_floating_point:
            raise TypeError(f"fill must be an integer for {self.dtype}, got {self.fill}; it is written as it is")
        layout = self.shape, self.dtype, self.times
        if self.fetched and layout != ((), torch.int64, 1):
            raise ValueError(f"fetched must be an input of one int64 a row, got {layout}; leave it out for others")

    @property
    def is_ragged(self) -> bool:
        """Whether the input may have another number of rows than the batch."""
        return self.ragged or self.times > 1


Inputs = Mapping[str, BufferSpec]
"""The layout of each input of a callable, by its name."""


def tensor_of(numbers: bytes, dtype: torch.dtype) -> Tensor:
    """Numbers of the host as a tensor ``[R]`` on the CPU, with memory of its own."""
    return torch.frombuffer(bytearray(numbers), dtype=dtype) if numbers else torch.empty(0, dtype=dtype, device="cpu")


def rows_used(tensor: Tensor, spec: BufferSpec, rows: int) -> int:
    """The number of rows of an input that belong to a batch of ``rows``; of a ragged input all up to ``times`` each."""
    return min(tensor.shape[0], rows * spec.times) if spec.is_ragged else rows


def first_rows(tensor: Tensor, rows: int, tail: tuple[int, ...]) -> Tensor:
    """The view ``[rows, *tail]`` at the origin of ``tensor`` (``[>= rows, >= tail...]``, any strides)."""
    if tensor.shape == (rows, *tail):
        return tensor
    return tensor[tuple(slice(size) for size in (rows, *tail))]


@dataclass(frozen=True)
class Registration:
    """A callable and the layout of its inputs.

    Attributes:
        name: what it is run under.
        fn: ``fn(**tensors) -> NamedTuple of tensors``.
        inputs: the layout of each keyword.
        covers: registered callables whose results this one gives too, bit for bit.
        most_copied: bytes; where more would be copied for a replay, a direct call takes less time.
    """

    name: str
    fn: Callable[..., Results]
    inputs: dict[str, BufferSpec]
    covers: tuple[str, ...]
    most_copied: float = math.inf

    def call(self, given: Mapping[str, Given], rows: int, device: torch.device) -> Results:
        """The callable's results for views ``[rows, *T]`` of what is given (``[>= rows, >= tail...]``).

        Raises:
            TypeError: it returned no NamedTuple of tensors.
            ValueError: a result has other rows or is on another device.
        """
        specs = self.inputs
        tensors = {
            n: each if isinstance(each, Tensor) else tensor_of(each, specs[n].dtype).to(device)
            for n, each in given.items()
        }
        used = {name: rows_used(tensors[name], spec, rows) for name, spec in self.inputs.items()}
        results = self.fn(**{n: first_rows(tensors[n], used[n], spec.shape) for n, spec in self.inputs.items()})
        check_results(results, rows, device)
        return results


class Registry:
    """Callables by name, in order of registration, and the one layout of every input name."""

    def __init__(self) -> None:
        """Create an empty registry."""
        self._callables: dict[str, Registration] = {}
        self._specs: dict[str, BufferSpec] = {}

    def add(
        self,
        name: str,
        fn: Callable[..., Results],
        inputs: Mapping[str, BufferSpec],
        covers: Sequence[str],
        most_copied: float,
    ) -> None:
        """Register a callable.

        Raises:
            ValueError: a name taken, no input, an input with another layout than before, an unknown covered name.
        """
        if name in self._callables:
            raise ValueError(f"a name must be registered once, got {name!r} again; choose another")
        for covered in covers:
            self.named(covered)
        _check_specs(name, inputs, self._specs)
        self._specs.update(inputs)
        self._callables[name] = Registration(name, fn, dict(inputs), tuple(covers), most_copied)

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
        """The named callables, or all for None.

        Raises:
            ValueError: an unknown name.
        """
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


def listed(names: Iterable[str]) -> str:
    """The names for a message, ``'a', 'b'``; ``none`` when there is none."""
    return ", ".join(repr(name) for name in names) or "none"


def check_results(results: object, rows: int, device: torch.device) -> None:
    """Raise unless a callable returned a NamedTuple of tensors ``[rows, ...]`` on the device, and None for some fields.

    Raises:
        TypeError: no NamedTuple, or a field that is no tensor.
        ValueError: a field with other rows or on another device.
    """
    fields: Any = getattr(results, "_fields", None)
    if not isinstance(results, tuple) or not fields:
        raise TypeError(f"a callable must return a NamedTuple of tensors, got {type(results).__name__}")
    for field, value in zip(fields, results, strict=True):
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"result {field!r} must be a tensor, got {type(value).__name__}; leave the field out")
        if value.dim() == 0 or value.shape[0] != rows or value.device != device:
            raise ValueError(
                f"result {field!r} must be [{rows}, ...] on {device}, got {list(value.shape)} on {value.device}"
            )


def _check_specs(name: str, inputs: Mapping[str, BufferSpec], known: Mapping[str, BufferSpec]) -> None:
    """Raise ValueError unless some input has the batch's rows and no input was registered with another layout."""
    if all(spec.is_ragged for spec in inputs.values()):
        found = ", ".join(f"{each!r} times {spec.times}" for each, spec in inputs.items()) or "none"
        raise ValueError(f"{name!r} must have an input that is not ragged, got {found}; its rows are the batch's")
    for each, spec in inputs.items():
        if known.get(each, spec) != spec:
            raise ValueError(
                f"input {each!r} must have one layout for all callables, got {spec} for {name!r} and {known[each]} "
                "before; give it another name"
            )
