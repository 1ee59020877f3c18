"""Checks at the boundary: the rule, the value, the way out. Only metadata is read, so nothing waits for a device."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.batch import SampleOutputs
from compiled_sampler.modes import TOP_P_BASES

BACKENDS = ("auto", "eager", "compiled", "graph")
LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_VOCAB_SIZE = 2**22 - 1


def check_sampler(vocab_size: int, max_num_requests: int, logits_dtype: torch.dtype, backend: str, base: str) -> None:
    """Raise unless a sampler can be made of these arguments.

    Raises:
        TypeError: a wrong type.
        ValueError: a value out of range.
    """
    for name, value in (("vocab_size", vocab_size), ("max_num_requests", max_num_requests)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}; pass a Python int")
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}; count the tokens of the model or the requests at once")
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size must be <= {MAX_VOCAB_SIZE}, got {vocab_size}; the mass of a row must fit 62 bits"
        )
    if logits_dtype not in LOGITS_DTYPES:
        raise ValueError(f"logits_dtype must be one of {LOGITS_DTYPES}, got {logits_dtype}; convert the logits")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}; 'auto' suits every device")
    if base not in TOP_P_BASES:
        raise ValueError(f"top_p_base must be one of {TOP_P_BASES}, got {base!r}; 'top_k' is what most engines do")


def check_logits(logits: Tensor, rows: int | None, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless ``logits`` is ``[rows, >= vocab_size]`` of the sampler's dtype and device; None allows any rows.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another shape or device, or a column stride other than 1.
    """
    _check_tensor("logits", logits, dtype, device)
    if logits.dim() != 2 or (rows is not None and logits.shape[0] != rows) or logits.shape[1] < vocab_size:
        wanted = f"[{'R' if rows is None else rows}, >= {vocab_size}]"
        raise ValueError(f"logits must be {wanted}, got {list(logits.shape)}; slice the rows of the plan")
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"logits must have column stride 1, got strides {logits.stride()}; call .contiguous()")


def check_positions(positions: Tensor, rows: int, device: torch.device) -> None:
    """Raise unless ``positions`` is int64 ``[rows]`` on the sampler's device.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another shape or device.
    """
    _check_tensor("positions", positions, torch.int64, device)
    if tuple(positions.shape) != (rows,):
        raise ValueError(f"positions must be [{rows}], one a row of the plan, got {list(positions.shape)}")


def check_outputs(out: object, rows: int, device: torch.device) -> None:
    """Raise unless ``out`` is ``SampleOutputs`` of tensors ``[rows]`` on the sampler's device.

    Raises:
        TypeError: another type or dtype.
        ValueError: another shape or device.
    """
    if not isinstance(out, SampleOutputs):
        raise TypeError(f"out must be SampleOutputs, got {type(out).__name__}; SampleOutputs(token_ids, status)")
    for name, tensor, dtype in (("token_ids", out.token_ids, torch.int64), ("status", out.status, torch.int32)):
        _check_tensor(f"out.{name}", tensor, dtype, device)
        if tuple(tensor.shape) != (rows,):
            raise ValueError(f"out.{name} must be [{rows}], one a row of the plan, got {list(tensor.shape)}")


def _check_tensor(name: str, tensor: object, dtype: torch.dtype, device: torch.device) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}; torch.as_tensor converts")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}; convert with .to({dtype})")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}; move it there, or make a Sampler for it")
