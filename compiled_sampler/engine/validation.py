"""Checks of a caller's tensors and plans: rule, value, way out. They read metadata alone and wait for no device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_sampler.engine.plan import Plan
from compiled_sampler.modes import MOST_DRAFTS, Mode


class RowFormat(NamedTuple):
    """The format of rows of logits or probabilities."""

    vocab_size: int
    """V; rows may have more columns."""
    dtype: torch.dtype
    device: torch.device


def check_logits(logits: Tensor, rows: int | None, expected: RowFormat, name: str = "logits") -> None:
    """Raise unless ``logits`` is ``[rows, >= V]`` in the expected format; None allows any number of rows.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another shape or device, or a column stride other than 1.
    """
    vocab_size, dtype, device = expected
    check_tensor(name, logits, dtype, device)
    shape = logits.shape
    if len(shape) != 2 or (rows is not None and shape[0] != rows) or shape[1] < vocab_size:
        wanted = f"[{'R' if rows is None else rows}, >= {vocab_size}]"
        raise ValueError(f"{name} must be {wanted}, got {list(shape)}; slice the rows of the plan")
    if logits.stride(1) != 1 and shape[1] > 1:
        raise ValueError(f"{name} must have column stride 1, got strides {logits.stride()}; call .contiguous()")


def check_logits_buffer(buffer: Tensor | None, expected: RowFormat) -> None:
    """Raise unless a buffer of the engine has rows of logits, ``[>= 1, >= V]`` in the expected format; None is none.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another shape or device, a column stride other than 1, or no rows.
    """
    if buffer is None:
        return
    check_logits(buffer, None, expected)
    if not buffer.shape[0]:
        raise ValueError("buffer must have at least one row, got none; bind_logits(None) drops a binding")


def check_positions(positions: Tensor, rows: int, device: torch.device) -> None:
    """Raise unless ``positions`` is int64 ``[rows]`` on the sampler's device.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another shape or device.
    """
    check_tensor("positions", positions, torch.int64, device)
    if positions.shape != (rows,):
        raise ValueError(f"positions must be [{rows}], one a slot of the plan, got {list(positions.shape)}")


def check_has_drafts(plan: Plan, drafts: bool) -> None:
    """Raise unless a plan was made with drafts (to verify them) or without (to sample), as ``drafts`` says.

    Raises:
        ValueError: the plan is of the other kind.
    """
    if drafts and plan.num_drafts is None:
        raise ValueError("plan must say how many drafts each request has, got none; plan(slots, num_drafts=[...])")
    if not drafts and plan.num_drafts is not None:
        raise ValueError(f"plan must be without drafts, got num_drafts={plan.num_drafts}; verify() takes this one")


def check_not_capturing(device: torch.device, message: str) -> None:
    """Raise if the current stream of a CUDA device is being captured.

    Raises:
        RuntimeError: with ``message``.
    """
    if is_capturing(device):
        raise RuntimeError(message)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a CUDA device is being captured; false of a CPU."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_plan_buffers(plan: Plan, device: torch.device) -> None:
    """Raise unless the buffers that an engine put into a plan are int64, one entry a slot, on the device.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another shape or device.
    """
    if plan.num_drafts is None and plan.draft_counts is not None:
        raise ValueError("plan.draft_counts must be None without drafts, got a buffer; plan(slots, num_drafts=[...])")
    for name in plan.replaced:
        tensor = getattr(plan, name)
        check_tensor(f"plan.{name}", tensor, torch.int64, device)
        if list(tensor.shape) != [len(plan.slots)]:
            raise ValueError(f"plan.{name} must be [{len(plan.slots)}], one a slot, got {list(tensor.shape)}; slice it")


def check_replaced(plan: Plan) -> None:
    """Raise unless an engine replaced nothing in a plan but the buffers that it may replace.

    Raises:
        TypeError: what tells where the plan is from is gone.
        ValueError: what was decided when the plan was made is another.
    """
    for name in plan.replaced:
        value = getattr(plan, name)
        if name in ("planned", "origin"):
            raise TypeError(f"plan.{name} must be kept, got {type(value).__name__}; sampler.plan(slots) makes a plan")
        if name not in ("slot_ids", "draft_counts"):
            is_long = isinstance(value, Tensor | np.ndarray | Mode)  # to print a tensor may need a sync
            found = "another" if is_long else repr(value)
            raise ValueError(
                f"plan.{name} must be what plan() decided, got {found}; plan() again, since only slot_ids and "
                "draft_counts may be replaced"
            )


def check_drafts(draft_token_ids: Tensor, requests: int, width: int, device: torch.device) -> None:
    """Raise unless ``draft_token_ids`` is int64 ``[requests, K]`` on the device, with K from width to ``MOST_DRAFTS``.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another shape or device.
    """
    check_tensor("draft_token_ids", draft_token_ids, torch.int64, device)
    if draft_token_ids.dim() != 2 or draft_token_ids.shape[0] != requests or draft_token_ids.shape[1] < width:
        found = list(draft_token_ids.shape)
        raise ValueError(f"draft_token_ids must be [{requests}, >= {width}] as planned, got {found}; pad with -1")
    if draft_token_ids.shape[1] > MOST_DRAFTS:
        raise ValueError(
            f"draft_token_ids must have at most {MOST_DRAFTS} columns, got {draft_token_ids.shape[1]}; the plan has "
            f"{width} drafts, so slice [:, :{width}]"
        )


def check_tensor(name: str, tensor: object, dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless an argument is a tensor of a dtype on a device.

    Raises:
        TypeError: no tensor, a sparse one, or another dtype.
        ValueError: another device, or a view that negates what it holds.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}; torch.as_tensor converts")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}; convert with .to({dtype})")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}; move it there, or make a Sampler for it")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {tensor.layout}; call .to_dense()")
    if tensor.is_neg():
        raise ValueError(f"{name} must hold its numbers, got a view with the negative bit; call .resolve_neg()")
