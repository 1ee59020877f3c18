"""Checks of a caller's arguments: rule, value, way out. They read metadata alone, so nothing waits for a device."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, SupportsIndex

import torch
from torch import Tensor

from compiled_sampler.engine.plan import Plan
from compiled_sampler.modes import MAX_VOCAB_SIZE, MOST_DRAFTS, RULES, TOP_P_BASES, Verification

BACKENDS = ("auto", "reference", "eager", "compiled", "graph")
DEVICES = ("cpu", "cuda")
LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class RowFormat(NamedTuple):
    """The format of rows of logits or probabilities."""

    vocab_size: int
    """V; rows may have more columns."""
    dtype: torch.dtype
    device: torch.device


def check_sampler(
    vocab_size: int, max_num_requests: int, device: torch.device, logits_dtype: torch.dtype, backend: str, base: str
) -> None:
    """Raise unless the arguments of ``Sampler`` have the right types and values.

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
    if device.type not in DEVICES:
        raise ValueError(f"device must be one of {DEVICES}, got {device}; move the logits there")
    if logits_dtype not in LOGITS_DTYPES:
        raise ValueError(f"logits_dtype must be one of {LOGITS_DTYPES}, got {logits_dtype}; convert the logits")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}; 'auto' suits every device")
    if base not in TOP_P_BASES:
        raise ValueError(f"top_p_base must be one of {TOP_P_BASES}, got {base!r}; 'top_k' is what most engines do")


def check_logits(logits: Tensor, rows: int | None, expected: RowFormat, name: str = "logits") -> None:
    """Raise unless ``logits`` is ``[rows, >= V]`` in the expected format; None allows any number of rows.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another shape or device, or a column stride other than 1.
    """
    vocab_size, dtype, device = expected
    check_tensor(name, logits, dtype, device)
    if logits.dim() != 2 or (rows is not None and logits.shape[0] != rows) or logits.shape[1] < vocab_size:
        wanted = f"[{'R' if rows is None else rows}, >= {vocab_size}]"
        raise ValueError(f"{name} must be {wanted}, got {list(logits.shape)}; slice the rows of the plan")
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"{name} must have column stride 1, got strides {logits.stride()}; call .contiguous()")


def check_positions(positions: Tensor, rows: int, device: torch.device) -> None:
    """Raise unless ``positions`` is int64 ``[rows]`` on the sampler's device.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another shape or device.
    """
    check_tensor("positions", positions, torch.int64, device)
    if tuple(positions.shape) != (rows,):
        raise ValueError(f"positions must be [{rows}], one a slot of the plan, got {list(positions.shape)}")


def checked_slots(slots: Iterable[int]) -> tuple[int, ...]:
    """The slots of a batch as a tuple of ints.

    Raises:
        TypeError: no iterable, or a slot that is no int.
    """
    if not isinstance(slots, Iterable):
        raise TypeError(f"slots must be a sequence of ints, got {slots!r}; add_request() returns them")
    found = tuple(slots)
    if are_ints(found):
        return found
    return tuple(checked_slot(slot, f"slot of row {row}") for row, slot in enumerate(found))


def checked_slot(slot: object, name: str = "slot") -> int:
    """A slot as an int; numpy integers are accepted.

    Raises:
        TypeError: no integer. Tensors are refused: their values may change, or need a device sync.
    """
    if isinstance(slot, bool | Tensor) or not isinstance(slot, SupportsIndex):
        raise TypeError(f"{name} must be an int, got {slot!r}; add_request() returns it")
    return operator.index(slot)


def are_ints(numbers: Iterable[object]) -> bool:
    """Whether all numbers are of the type int itself. One set is faster than a check of each number."""
    return set(map(type, numbers)) <= {int}


def check_num_drafts(num_drafts: Sequence[int] | None, requests: int) -> None:
    """Raise unless ``num_drafts`` is None or has one count of drafts for each request.

    Raises:
        TypeError: a count that is no int.
        ValueError: another number of counts, or a count out of range.
    """
    if num_drafts is None:
        return
    if len(num_drafts) != requests:
        raise ValueError(f"num_drafts must have one count a slot, {requests}, got {len(num_drafts)}; 0 for no drafts")
    if are_ints(num_drafts) and min(num_drafts, default=0) >= 0 and max(num_drafts, default=0) <= MOST_DRAFTS:
        return
    for request, count in enumerate(num_drafts):
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"num_drafts of request {request} must be an int, got {count!r}; pass Python ints")
        if not 0 <= count <= MOST_DRAFTS:
            raise ValueError(f"num_drafts of request {request} must be in [0, {MOST_DRAFTS}], got {count}; draft fewer")


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
    buffers = {"slot_ids": plan.slot_ids}
    if plan.draft_counts is not None:
        buffers["draft_counts"] = plan.draft_counts
    for name, tensor in buffers.items():
        check_tensor(f"plan.{name}", tensor, torch.int64, device)
        if list(tensor.shape) != [len(plan.slots)]:
            raise ValueError(f"plan.{name} must be [{len(plan.slots)}], one a slot, got {list(tensor.shape)}; slice it")


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


def check_modes(names: Collection[str] | None, known: Sequence[str]) -> None:
    """Raise unless every name is the name of a mode; None stands for all modes.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(names, str) or not set(names or ()) <= set(known):
        raise ValueError(f"modes must be a list of some of {', '.join(known)}, got {names!r}; None prepares all")


def check_rule(rule: str) -> None:
    """Raise unless ``rule`` is one of ``modes.RULES``.

    Raises:
        ValueError: an unknown rule.
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {RULES}, got {rule!r}; 'match' keeps the sampler's stream")


def checked_verifications(verifications: Iterable[Verification]) -> list[Verification]:
    """The verifications as a list.

    Raises:
        TypeError: no iterable, or an element of another type.
    """
    known = list(verifications) if isinstance(verifications, Iterable) else [verifications]
    wrong = [each for each in known if not isinstance(each, Verification)]
    if wrong or not isinstance(verifications, Iterable):
        found = wrong[0] if wrong else verifications
        raise TypeError(f"verifications must be a list of Verification, got {found!r}; [Verification('match', 3)]")
    return known


def check_draft(offset: int, coupled: bool) -> None:
    """Raise unless ``offset`` is the index of a draft in its block, and ``coupled`` a bool.

    Raises:
        TypeError: the offset is no int, or ``coupled`` no bool.
        ValueError: the offset is out of range.
    """
    if not isinstance(coupled, bool):
        raise TypeError(f"coupled must be a bool, got {coupled!r}; True for the rule 'match', False for the others")
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise TypeError(f"offset must be an int, got {offset!r}; pass a Python int")
    if not 0 <= offset < MOST_DRAFTS:
        raise ValueError(f"offset must be in [0, {MOST_DRAFTS}), got {offset}; it counts drafts of the same block")


def check_tensor(name: str, tensor: object, dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless an argument is a tensor of a dtype on a device.

    Raises:
        TypeError: no tensor, or another dtype.
        ValueError: another device.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}; torch.as_tensor converts")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}; convert with .to({dtype})")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}; move it there, or make a Sampler for it")
