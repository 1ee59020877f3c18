"""Checks of a caller's tensors: rule, value, way out. They read metadata alone and wait for no device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.edits.names import RESTORE
from compiled_sampler.modes import MOST_DRAFTS

INTEGERS = (torch.int64, torch.int32)
"""The dtypes of slots, positions, counts and token ids, those of new tensors first."""


class RowFormat(NamedTuple):
    """The format of rows of logits or probabilities."""

    vocab_size: int
    """V; rows may have more columns."""
    dtype: torch.dtype
    device: torch.device


def check_logits(logits: Tensor, rows: int | None, expected: RowFormat, name: str = "logits") -> None:
    """Raise unless ``logits`` is ``[rows, >= V]`` in the expected format; None allows any number of rows."""
    vocab_size, dtype, device = expected
    check_tensor(name, logits, (dtype,), device)
    shape = logits.shape
    if len(shape) != 2 or (rows is not None and shape[0] != rows) or shape[1] < vocab_size:
        wanted = f"[{'R' if rows is None else rows}, >= {vocab_size}]"
        raise ValueError(f"{name} must be {wanted}, got {list(shape)}; slice the rows of the plan")
    if logits.stride(1) != 1 and shape[1] > 1:
        raise ValueError(f"{name} must have column stride 1, got strides {logits.stride()}; call .contiguous()")


def check_logits_buffer(buffer: Tensor | None, expected: RowFormat) -> None:
    """Raise unless a buffer of the engine has rows of logits, ``[>= 1, >= V]`` in the expected format; None is none."""
    if buffer is None:
        return
    check_logits(buffer, None, expected)
    if not buffer.shape[0]:
        raise ValueError("buffer must have at least one row, got none; bind_logits(None) drops a binding")


def check_positions(positions: Tensor, rows: int, device: torch.device, name: str = "positions") -> None:
    """Raise unless ``positions`` is int64 or int32 ``[rows]`` on the sampler's device."""
    check_tensor(name, positions, INTEGERS, device)
    if positions.shape != (rows,):
        raise ValueError(f"{name} must be [{rows}], one a slot of the plan, got {list(positions.shape)}")


def check_bound_numbers(name: str, numbers: Tensor, device: torch.device) -> None:
    """Raise unless a buffer of the engine is int64 or int32 ``[>= 1]``, of drafts ``[>= 1, K]``, on the device."""
    check_tensor(name, numbers, INTEGERS, device)
    shape = "[>= 1, K]" if name == "draft_token_ids" else "[>= 1]"
    if numbers.dim() != shape.count(",") + 1 or not numbers.numel():
        raise ValueError(f"{name} must be {shape}, one entry a row, got {list(numbers.shape)}")
    if name == "slots" and (not numbers.is_contiguous() or numbers.data_ptr() % 16):
        raise ValueError("slots must be contiguous from a multiple of 16 bytes, got a view; allocate it by itself")


def check_token_bitmask(mask: Tensor, rows: int, vocab_size: int, device: torch.device) -> None:
    """Raise unless a mask is int32 ``[rows, >= ceil(vocab_size / 32)]`` on the sampler's device."""
    if isinstance(mask, Tensor) and mask.dtype is not torch.int32:
        raise TypeError(
            f"token_bitmask must be torch.int32, 32 tokens a number with the lowest bit first, got {mask.dtype}; pack "
            "the tokens as xgrammar does, since a conversion would make another mask of them"
        )
    check_tensor("token_bitmask", mask, (torch.int32,), device)
    words = -(-vocab_size // 32)
    if mask.dim() != 2 or mask.shape[0] != rows or mask.shape[1] < words:
        raise ValueError(
            f"token_bitmask must be [{rows}, >= {words}], a bit for each token of each row of logits, got "
            f"{list(mask.shape)}; xgrammar.allocate_token_bitmask({rows}, {vocab_size})"
        )
    if mask.stride(1) != 1 and mask.shape[1] > 1:
        raise ValueError(f"token_bitmask must have column stride 1, got strides {mask.stride()}; call .contiguous()")


def check_edit_input(
    name: str, tensor: Tensor, rows: int, columns: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise unless a tensor of the call is ``[rows, >= columns]``, or ``[rows]`` for 0 columns, as an edit declares."""
    check_tensor(name, tensor, (dtype,), device)
    shape = tensor.shape
    is_wanted = shape == (rows,) if not columns else len(shape) == 2 and shape[0] == rows and shape[1] >= columns
    if not is_wanted:
        wanted = f"[{rows}, >= {columns}]" if columns else f"[{rows}]"
        raise ValueError(f"{name} must be {wanted}, one for each row of logits, got {list(shape)}; slice it")
    if columns > 1 and tensor.stride(1) != 1:
        raise ValueError(f"{name} must have column stride 1, got strides {tensor.stride()}; call .contiguous()")


def check_consumes(consumes: bool | str, logits: Tensor, *read: Tensor) -> None:
    """Raise unless ``consume_logits`` is False, or True or "restore" for logits that can be written in place."""
    if not isinstance(consumes, bool) and consumes != RESTORE:
        raise (ValueError if isinstance(consumes, str) else TypeError)(
            f"consume_logits must be a bool or {RESTORE!r}, got {consumes!r}; True lets edits write into the logits, "
            f"{RESTORE!r} also takes that back"
        )
    if consumes is False:
        return
    check_writable("logits with consume_logits", logits)
    if logits.dtype is not torch.float32:
        raise ValueError(f"consume_logits must be False for logits of {logits.dtype}: edits are float32; leave it out")
    if logits.shape[0] > 1 and abs(logits.stride(0)) < logits.shape[1]:
        raise ValueError(
            f"consume_logits must be False for rows that share memory, got strides {logits.stride()}; leave it out"
        )
    if any(isinstance(tensor, Tensor) and overlap(span(logits), span(tensor)) for tensor in read):
        raise ValueError(
            "consume_logits must be False for logits in the memory of draft_logits or of what edits read; leave it out"
        )


def check_writable(name: str, tensor: Tensor) -> None:
    """Raise if torch would refuse to write a tensor in place, or would record the write for a gradient."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} must not require grad while torch records gradients, got requires_grad=True; pass its .detach()"
        )
    if not torch.is_inference_mode_enabled() and tensor.is_inference():
        raise ValueError(
            f"{name} must be a normal tensor outside of inference mode, got one made under torch.inference_mode(); "
            "call under it too, or allocate outside of it"
        )


def check_drafts(
    draft_token_ids: Tensor, requests: int, width: int, count: int, device: torch.device, name: str = "draft_token_ids"
) -> None:
    """Raise unless drafts, or the ``parents`` of trees, are flat or padded, of integers, as planned."""
    check_tensor(name, draft_token_ids, INTEGERS, device)
    if draft_token_ids.dim() == 1:
        if len(draft_token_ids) != count:
            raise ValueError(
                f"flat {name} must be [{count}], the sum of num_drafts, got [{len(draft_token_ids)}]; slice "
                f"it, or pass [{requests}, >= {width}] padded with -1"
            )
        return
    if draft_token_ids.dim() != 2 or draft_token_ids.shape[0] != requests or draft_token_ids.shape[1] < width:
        shape = list(draft_token_ids.shape)
        raise ValueError(f"{name} must be [{requests}, >= {width}] as planned, got {shape}; pad with -1")
    if draft_token_ids.shape[1] > MOST_DRAFTS:
        raise ValueError(
            f"{name} must have at most {MOST_DRAFTS} columns, got {draft_token_ids.shape[1]}; the plan has "
            f"{width} drafts, so slice [:, :{width}]"
        )


def check_tensor(name: str, tensor: object, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    """Raise unless an argument is a tensor of one of some dtypes on a device."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}; torch.as_tensor converts")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(map(str, dtypes))
        raise TypeError(f"{name} must be {wanted}, got {tensor.dtype}; convert with .to({dtypes[0]})")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}; move it there, or make a Sampler for it")
    if tensor.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got a nested one; call .to_padded_tensor(padding)")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {tensor.layout}; call .to_dense()")
    if tensor.is_neg():
        raise ValueError(f"{name} must hold its numbers, got a view with the negative bit; call .resolve_neg()")


class Span(NamedTuple):
    """The bytes of a tensor ``[rows, ...]``: one piece for each row."""

    start: int
    """Address of the first byte."""
    end: int
    """Address behind the last byte; ``start`` of an empty tensor."""
    step: int
    """Bytes from row to row."""
    width: int
    """Bytes from the first to the last of a row."""


def span(tensor: Tensor) -> Span:
    """The bytes of a tensor of one dimension or more."""
    start, size, strides, shape = tensor.data_ptr(), tensor.element_size(), tensor.stride(), tensor.shape
    if not tensor.numel():
        return Span(start, start, size, 0)
    step, width = strides[0] * size, size
    for length, stride in zip(shape[1:], strides[1:], strict=True):
        width += (length - 1) * stride * size
    return Span(start, start + (shape[0] - 1) * step + width, step, width)


def overlap(a: Span, b: Span) -> bool:
    """Whether two tensors share memory: exact for rows of equal distance, like the columns of one buffer."""
    if a.end <= b.start or b.end <= a.start or a.start == a.end or b.start == b.end:
        return False
    if a.step != b.step or not a.step:
        # tensors that lie across each other with rows of different distances count as shared
        return True
    place = (b.start - a.start) % a.step
    return place < a.width or place + b.width > a.step


def check_apart(fields: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> None:
    """Raise unless every field of ``out`` has memory of its own."""
    for name, tensor in fields.items():
        if 0 in tensor.stride() and _repeats(tensor):
            raise ValueError(
                f"out.{name} must not repeat its memory, got strides {tensor.stride()}; call .contiguous()"
            )
    storages = {tensor.untyped_storage().data_ptr() for tensor in (*fields.values(), *inputs)}
    if len(storages) == len(fields) + len(inputs):
        return
    spans = {name: span(tensor) for name, tensor in fields.items()}
    for (name, a), (other, b) in combinations(spans.items(), 2):
        if overlap(a, b):
            raise ValueError(f"out.{name} must have memory of its own, got that of out.{other}; allocate each field")
    read = [span(tensor) for tensor in inputs]
    for name, a in spans.items():
        if any(overlap(a, b) for b in read):
            raise ValueError(f"out.{name} must have memory of its own, got that of an input; allocate each field")


def _repeats(tensor: Tensor) -> bool:
    """Whether elements of a tensor share memory because it was expanded."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
