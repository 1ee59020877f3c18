"""Checks of a caller's tensors, made before anything is launched: the rule, the value, the way out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from graph_cache.batches.registry import BufferSpec, Given, Results, listed, tensor_of


def check_tensor(name: str, tensor: Tensor, spec: BufferSpec, device: torch.device) -> None:
    """Raise unless ``tensor`` fits the layout of an input: ``[any, >= tail...]``, a dtype, the device.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another device, or a tail that is shorter in some dimension.
    """
    if not isinstance(tensor, Tensor):
        way_out = "use torch.as_tensor; a run takes one number a row as bytes too, such as array.tobytes()"
        raise TypeError(f"input {name!r} must be a tensor, got {type(tensor).__name__}; {way_out}")
    if tensor.dtype is not spec.dtype and tensor.dtype not in spec.also:
        wanted = " or ".join(map(str, (spec.dtype, *spec.also)))
        raise TypeError(f"input {name!r} must be {wanted}, got {tensor.dtype}; convert it with .to({spec.dtype})")
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
    inputs: Mapping[str, BufferSpec],
    given: Mapping[str, Given],
    rows: int | None,
    device: torch.device,
) -> int:
    """The number of rows of a batch, after a check of all its tensors.

    Args:
        inputs: the layouts that the callable was registered with.
        given: ``[rows, >= tail...]`` each; with ``rows`` given, more rows are allowed.
        rows: number of rows to use; None for all, of which each input must then have the same number.
        device: of the cache.

    Returns:
        The rows R, at least 0.

    Raises:
        TypeError: rows is no integer, an input is no tensor or has another dtype.
        ValueError: input names, device, tail or rows that do not fit.
    """
    if given.keys() != inputs.keys():
        missing, unknown = inputs.keys() - given.keys(), given.keys() - inputs.keys()
        raise ValueError(
            f"inputs must be {listed(inputs)}; missing {listed(sorted(missing))}, unknown {listed(sorted(unknown))}; "
            "pass one tensor a registered input"
        )
    tensors: dict[str, Tensor] = {}
    for name, spec in inputs.items():
        each = given[name]
        if isinstance(each, bytes) and (spec.shape or spec.is_ragged or len(each) % spec.dtype.itemsize):
            raise TypeError(f"input {name!r} must be a tensor, got bytes; bytes have one {spec.dtype} for each row")
        tensors[name] = tensor = tensor_of(each, spec.dtype) if isinstance(each, bytes) else each
        check_tensor(name, tensor, spec, device if tensor is each else tensor.device)
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


def check_out(out: Results, results: Results) -> None:
    """Raise unless ``out`` can take ``results``: the same NamedTuple type, shapes, dtypes and device.

    A field of int64 can be taken in int32, for numbers that fit: values are not looked at. A field that is None in the
    results must be None.

    Raises:
        TypeError: another type or dtype.
        ValueError: another shape or device.
    """
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
