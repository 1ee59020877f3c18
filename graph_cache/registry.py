"""The registered callables, the layouts of their inputs, and the checks of what a caller brings for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import lt
from typing import Any

import torch
from torch import Tensor

Results = tuple[Tensor | None, ...]  # a NamedTuple of tensors; a field that is None is left out
Given = Tensor | bytes
"""An input of a run: a tensor, or of an input ``on_host`` R int64 numbers as the machine has them."""


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
        on_host: whether batches may bring it as bytes of the host, which then lie in the cache's mirror.

    Raises:
        TypeError: the dtype would round the fill.
        ValueError: ``times`` is below 1; ``on_host`` of anything but one int64 a row.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: int | float
    times: int = 1
    ragged: bool = False
    also: tuple[torch.dtype, ...] = ()
    on_host: bool = False

    def __post_init__(self) -> None:
        if self.times < 1:
            raise ValueError(f"times must be >= 1, got {self.times}; 1 is one row for each row of a batch")
        if isinstance(self.fill, float) and not self.dtype.is_floating_point:
            raise TypeError(f"fill must be an integer for {self.dtype}, got {self.fill}; it is written as it is")
        layout = self.shape, self.dtype, self.times
        if self.on_host and layout != ((), torch.int64, 1):
            raise ValueError(f"on_host must be an input of one int64 a row, got {layout}; leave it out for others")

    @property
    def is_ragged(self) -> bool:
        """Whether the input may have another number of rows than the batch."""
        return self.ragged or self.times > 1


Inputs = Mapping[str, BufferSpec]  # the layout of each input of a callable, by its name


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
    """A callable ``fn(**tensors) -> NamedTuple of tensors`` and the layout of its inputs."""

    name: str
    fn: Callable[..., Results]
    inputs: dict[str, BufferSpec]
    covers: tuple[str, ...]  # callables whose results this one gives too, bit for bit
    most_copied: float = math.inf  # bytes; where a replay would copy more, a direct call takes less time


class Registry:
    """Callables by name, in order of registration, and the one layout of every input name."""

    def __init__(self) -> None:
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
        """Register a callable; ValueError where its name, its inputs or what it covers do not allow it."""
        if name in self._callables:
            raise ValueError(f"a name must be registered once, got {name!r} again; choose another")
        for covered in covers:
            self.named(covered)
        if all(spec.is_ragged for spec in inputs.values()):
            shown = ", ".join(f"{key!r} times {spec.times}" for key, spec in inputs.items()) or "none"
            raise ValueError(f"{name!r} must have an input that is not ragged, got {shown}; its rows are the batch's")
        for key, spec in inputs.items():
            if self._specs.get(key, spec) != spec:
                raise ValueError(
                    f"input {key!r} must have one layout for all callables, got {spec} for {name!r} and "
                    f"{self._specs[key]} before; give it another name"
                )
        self._specs.update(inputs)
        self._callables[name] = Registration(name, fn, dict(inputs), tuple(covers), most_copied)

    def named(self, name: str) -> Registration:
        """The callable registered as ``name``; ValueError if there is none."""
        registration = self._callables.get(name)
        if registration is None:
            raise ValueError(
                f"a callable must be registered before use, got {name!r}; registered: {listed(self._callables)}"
            )
        return registration

    def chosen(self, names: Iterable[str] | None) -> list[Registration]:
        """The named callables, or all for None."""
        return [self.named(name) for name in (self._callables if names is None else names)]

    def spec(self, input_name: str) -> BufferSpec:
        """The layout of an input; ValueError if no callable has it."""
        if input_name not in self._specs:
            raise ValueError(f"an input must belong to a callable, got {input_name!r}; known: {listed(self._specs)}")
        return self._specs[input_name]

    def covering(self, name: str) -> list[Registration]:
        """The callables that cover ``name``, in order of registration."""
        return [registration for registration in self._callables.values() if name in registration.covers]


def listed(names: Iterable[str]) -> str:
    """The names for a message, ``'a', 'b'``; ``none`` when there is none."""
    return ", ".join(repr(name) for name in names) or "none"


def check_results(results: object, rows: int, device: torch.device) -> None:
    """Raise unless a callable returned a NamedTuple of tensors ``[rows, ...]`` on the device; a field may be None."""
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


def check_tensor(name: str, tensor: Tensor, spec: BufferSpec, device: torch.device) -> None:
    """Raise unless ``tensor`` fits the layout of an input: ``[any, >= tail...]``, a dtype, the device."""
    if not isinstance(tensor, Tensor):
        way_out = "use torch.as_tensor, or array.tobytes() for an input with BufferSpec(on_host=True)"
        raise TypeError(f"input {name!r} must be a tensor, got {type(tensor).__name__}; {way_out}")
    if tensor.dtype is not spec.dtype and tensor.dtype not in spec.also:
        wanted = " or ".join(map(str, (spec.dtype, *spec.also)))
        raise TypeError(f"input {name!r} must be {wanted}, got {tensor.dtype}; convert it with .to({spec.dtype})")
    if tensor.device != device:
        raise ValueError(f"input {name!r} must be on {device}, got {tensor.device}; move it before the run")
    if tensor.dim() != 1 + len(spec.shape) or any(map(lt, tensor.shape[1:], spec.shape)):
        wanted = ", ".join(["rows", *(f">={size}" for size in spec.shape)])
        raise ValueError(f"input {name!r} must have shape [{wanted}], got {list(tensor.shape)}; register it as it is")


def checked_rows(
    inputs: Mapping[str, BufferSpec],
    given: Mapping[str, Given],
    rows: int | None,
    device: torch.device,
) -> int:
    """The number of rows of a batch, at least 0, after a check of all its tensors, ``[rows, >= tail...]`` each."""
    # With rows given, tensors may have more; with None, each input that is not ragged must have the same number.
    if given.keys() != inputs.keys():
        missing, unknown = inputs.keys() - given.keys(), given.keys() - inputs.keys()
        raise ValueError(
            f"inputs must be {listed(inputs)}; missing {listed(sorted(missing))}, unknown {listed(sorted(unknown))}; "
            "pass one tensor a registered input"
        )
    tensors: dict[str, Tensor] = {}
    for name, spec in inputs.items():
        source = given[name]
        if isinstance(source, bytes) and (not spec.on_host or len(source) % spec.dtype.itemsize):
            way_out = f"bytes have one {spec.dtype} for each row of an input with BufferSpec(on_host=True)"
            raise TypeError(f"input {name!r} must be a tensor, got bytes; {way_out}")
        tensors[name] = tensor = tensor_of(source, spec.dtype) if isinstance(source, bytes) else source
        check_tensor(name, tensor, spec, device if tensor is source else tensor.device)
    counts = [tensors[name].shape[0] for name, spec in inputs.items() if not spec.is_ragged]
    if rows is None:
        if counts.count(counts[0]) != len(counts):
            rows_of = {name: tensor.shape[0] for name, tensor in tensors.items()}
            raise ValueError(
                f"inputs must have the same number of rows, got {rows_of}; pass rows= to use the first ones"
            )
        _check_ragged(inputs, tensors, counts[0])
        return counts[0]
    if not isinstance(rows, int) or isinstance(rows, bool):
        raise TypeError(f"rows must be an integer, got {type(rows).__name__}; it counts rows and is no tensor")
    if not 0 <= rows <= min(counts):
        raise ValueError(f"rows must be in [0, {min(counts)}], the rows of the shortest input, got {rows}; lower it")
    return rows


def _check_ragged(inputs: Mapping[str, BufferSpec], tensors: Mapping[str, Tensor], rows: int) -> None:
    for name, spec in inputs.items():
        if spec.is_ragged and tensors[name].shape[0] > rows * spec.times:
            raise ValueError(
                f"input {name!r} must have at most {spec.times} rows for each of the {rows}, got "
                f"{tensors[name].shape[0]}; register it with more times"
            )


def check_out(out: Results, results: Results) -> None:
    """Raise unless ``out`` can take ``results``: the same NamedTuple type, shapes, dtypes and device."""
    # A field of int64 can be taken in int32, for numbers that fit: values are not looked at. A field that is None in
    # the results must be None.
    if type(out) is not type(results):
        raise TypeError(f"out must be a {type(results).__name__}, got {type(out).__name__}; build it from that type")
    for index, (target, source) in enumerate(zip(out, results, strict=True)):
        if source is None:
            if target is not None:
                raise TypeError(f"out field {index} must be None, as the results have none, got a tensor; leave it out")
            continue
        dtypes = (torch.int64, torch.int32) if source.dtype is torch.int64 else (source.dtype,)
        if not isinstance(target, Tensor) or target.dtype not in dtypes:
            got, wanted = getattr(target, "dtype", type(target).__name__), " or ".join(map(str, dtypes))
            raise TypeError(f"out field {index} must be a {wanted} tensor, got {got}; allocate it with that dtype")
        if target.shape != source.shape or target.device != source.device:
            raise ValueError(
                f"out field {index} must be {list(source.shape)} on {source.device}, got {list(target.shape)} on "
                f"{target.device}; pass a view of exactly the rows of the batch"
            )
