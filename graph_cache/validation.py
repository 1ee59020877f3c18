"""What a caller may pass, checked before anything is launched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from graph_cache.buffers import BufferSpec, Results


def listed(names: Iterable[str]) -> str:
    """The names for a message, ``'a', 'b'``; ``none`` when there is none."""
    return ", ".join(repr(name) for name in names) or "none"


def check_specs(name: str, inputs: Mapping[str, BufferSpec], known: Mapping[str, BufferSpec]) -> None:
    """Raises ValueError when no input gives a callable its rows, or one has a layout registered otherwise before."""
    if all(spec.is_ragged for spec in inputs.values()):
        found = ", ".join(f"{each!r} times {spec.times}" for each, spec in inputs.items()) or "none"
        raise ValueError(f"{name!r} must have an input that is not ragged, got {found}; its rows are the batch's")
    for each, spec in inputs.items():
        if known.get(each, spec) != spec:
            raise ValueError(
                f"input {each!r} must have one layout for all callables, got {spec} for {name!r} and {known[each]} "
                "before; give it another name"
            )


def check_tensor(name: str, tensor: Tensor, spec: BufferSpec, device: torch.device) -> None:
    """Raises unless ``tensor`` can stand for the input: ``[any, >= tail...]``, its dtype, its device.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another device, or a tail that is shorter in some dimension.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"input {name!r} must be a tensor, got {type(tensor).__name__}; use torch.as_tensor")
    if tensor.dtype is not spec.dtype:
        raise TypeError(f"input {name!r} must be {spec.dtype}, got {tensor.dtype}; convert it with .to({spec.dtype})")
    if tensor.device != device:
        raise ValueError(f"input {name!r} must be on {device}, got {tensor.device}; move it before the run")
    if not _holds_tail(tensor, spec.shape):
        wanted = ", ".join(["rows", *(f">={size}" for size in spec.shape)])
        raise ValueError(f"input {name!r} must have shape [{wanted}], got {list(tensor.shape)}; register it as it is")


def _holds_tail(tensor: Tensor, tail: tuple[int, ...]) -> bool:
    shape = tensor.shape
    if len(shape) != len(tail) + 1:
        return False
    return not tail or all(have >= want for have, want in zip(shape[1:], tail, strict=True))


def checked_rows(
    inputs: Mapping[str, BufferSpec], tensors: Mapping[str, Tensor], rows: int | None, device: torch.device
) -> int:
    """The rows of a batch, once every tensor of it has proved usable.

    Args:
        inputs: what the callable was registered with.
        tensors: ``[rows, >= tail...]`` each; with ``rows`` given, more rows are allowed.
        rows: rows to use; None for all, which must then be alike.
        device: of the cache.

    Returns:
        The rows R, at least 0.

    Raises:
        TypeError: rows is no integer, an input is no tensor or has another dtype.
        ValueError: input names, device, tail or rows that do not fit.
    """
    if tensors.keys() != inputs.keys():
        missing, unknown = inputs.keys() - tensors.keys(), tensors.keys() - inputs.keys()
        raise ValueError(
            f"inputs must be {listed(inputs)}; missing {listed(sorted(missing))}, unknown {listed(sorted(unknown))}; "
            "pass one tensor a registered input"
        )
    for name, spec in inputs.items():
        check_tensor(name, tensors[name], spec, device)
    counts = [tensors[name].shape[0] for name, spec in inputs.items() if not spec.is_ragged]
    if rows is None:
        if counts.count(counts[0]) != len(counts):
            found = {name: tensor.shape[0] for name, tensor in tensors.items()}
            raise ValueError(f"inputs must have the same number of rows, got {found}; pass rows= to use the first ones")
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


def check_results(results: object, rows: int, device: torch.device) -> None:
    """Raises unless a callable returned a NamedTuple of tensors ``[rows, ...]`` on the device.

    Raises:
        TypeError: no NamedTuple, or a field that is no tensor.
        ValueError: a field with other rows or on another device.
    """
    fields: Any = getattr(results, "_fields", None)
    if not isinstance(results, tuple) or not fields:
        raise TypeError(f"a callable must return a NamedTuple of tensors, got {type(results).__name__}")
    for field, value in zip(fields, results, strict=True):
        if not isinstance(value, Tensor):
            raise TypeError(f"result {field!r} must be a tensor, got {type(value).__name__}; leave the field out")
        if value.dim() == 0 or value.shape[0] != rows or value.device != device:
            raise ValueError(
                f"result {field!r} must be [{rows}, ...] on {device}, got {list(value.shape)} on {value.device}"
            )


def check_out(out: Results, results: Results) -> None:
    """Raises unless ``out`` can take ``results``: the same NamedTuple type, shapes, dtypes and device.

    Raises:
        TypeError: another type or dtype.
        ValueError: another shape or device.
    """
    if type(out) is not type(results):
        raise TypeError(f"out must be a {type(results).__name__}, got {type(out).__name__}; build it from that type")
    for index, (target, source) in enumerate(zip(out, results, strict=True)):
        if not isinstance(target, Tensor) or target.dtype is not source.dtype:
            got = target.dtype if isinstance(target, Tensor) else type(target).__name__
            raise TypeError(
                f"out field {index} must be a {source.dtype} tensor, got {got}; allocate it with that dtype"
            )
        if target.shape != source.shape or target.device != source.device:
            raise ValueError(
                f"out field {index} must be {list(source.shape)} on {source.device}, got {list(target.shape)} on "
                f"{target.device}; pass a view of exactly the rows of the batch"
            )
