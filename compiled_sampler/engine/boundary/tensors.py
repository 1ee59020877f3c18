"""Checks of a caller's tensors, and layouts of results. They read metadata alone and wait for no device."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from compiled_sampler.batch import EditedOutputs, ProbabilityOutputs, SampleOutputs, VerifyOutputs
from compiled_sampler.edits.names import RESTORE
from compiled_sampler.logprobs import LogprobOutputs, Logprobs, layout_of_outputs
from compiled_sampler.modes import MOST_DRAFTS

INTEGERS = (torch.int64, torch.int32)
"""The dtypes of slots, positions, counts and token ids, those of new tensors first."""


class RowFormat(NamedTuple):
    """The format of rows of logits or probabilities."""

    vocab_size: int  # V; rows may have more columns
    dtype: torch.dtype
    device: torch.device


def check_rows(name: str, tensor: Tensor, rows: int | None, expected: RowFormat, way_out: str, what: str = "") -> None:
    """Raise unless a tensor is ``[rows, >= V]`` in the expected format; None allows any number of rows."""
    columns, dtype, device = expected
    check_tensor(name, tensor, (dtype,), device)
    shape = tensor.shape
    if len(shape) != 2 or rows not in (None, shape[0]) or shape[1] < columns:
        wanted = f"[{'R' if rows is None else rows}, >= {columns}]{what}"
        raise ValueError(f"{name} must be {wanted}, got {list(shape)}; {way_out}")
    if tensor.stride(1) != 1 and shape[1] > 1:
        raise ValueError(f"{name} must have column stride 1, got strides {tensor.stride()}; call .contiguous()")


def check_logits(logits: Tensor, rows: int | None, expected: RowFormat, name: str = "logits") -> None:
    """Raise unless ``logits``, or probabilities, are rows ``[rows, >= V]`` in the expected format."""
    check_rows(name, logits, rows, expected, "slice the rows of the plan")


def check_logits_buffer(buffer: Tensor, expected: RowFormat) -> None:
    """Raise unless a buffer of the engine has rows of logits, ``[>= 1, >= V]`` in the expected format."""
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
    form = RowFormat(-(-vocab_size // 32), torch.int32, device)
    way_out = f"xgrammar.allocate_token_bitmask({rows}, {vocab_size})"
    check_rows("token_bitmask", mask, rows, form, way_out, ", a bit for each token of each row of logits")


def check_edit_input(
    name: str, tensor: Tensor, rows: int, columns: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise unless a tensor of the call is ``[rows, >= columns]``, or ``[rows]`` for 0 columns, as an edit declares."""
    if columns:
        form = RowFormat(columns, dtype, device)
        return check_rows(name, tensor, rows, form, "slice it", ", one for each row of logits")
    check_tensor(name, tensor, (dtype,), device)
    if tensor.shape != (rows,):
        raise ValueError(f"{name} must be [{rows}], one for each row of logits, got {list(tensor.shape)}; slice it")


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

    start: int  # address of the first byte
    end: int  # address behind the last byte; ``start`` of an empty tensor
    step: int  # bytes from row to row
    width: int  # bytes from the first to the last of a row


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
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        if any(size > 1 and not stride for size, stride in sizes):  # as an expanded tensor has it
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


_ALSO: dict[torch.dtype, tuple[torch.dtype, ...]] = collections.defaultdict(tuple, {torch.int64: (torch.int32,)})
Results = TypeVar("Results", bound=tuple[Any, ...])

_FIELDS: dict[type, dict[str, tuple[tuple[torch.dtype, ...], int]]] = {
    SampleOutputs: {"token_ids": (INTEGERS, 1), "status": ((torch.int32,), 1)},
    ProbabilityOutputs: {"probabilities": ((torch.float32,), 2)},
    EditedOutputs: {"logits": ((torch.float32,), 2)},
    VerifyOutputs: {
        "token_ids": (INTEGERS, 2),
        "num_emitted": (INTEGERS, 1),
        "num_accepted": (INTEGERS, 1),
        "num_matching": (INTEGERS, 1),
        "status": ((torch.int32,), 1),
    },
}
"""The dtypes, that of new tensors first, and the number of dimensions: ``[rows]`` or ``[rows, columns]``."""
_FINISHED = {"finished": ((torch.bool,), 1)}  # the field that only batches with edits have
_NODES = {"node_ids": (INTEGERS, 2)}  # that of trees alone, which has a column less than the tokens
_Fields = dict[str, tuple[tuple[torch.dtype, ...], list[int]]]
"""Dtypes and shape by name; fields of logprobs by ``logprobs.name``."""


def check_outputs(
    out: object,
    kind: type[SampleOutputs] | type[VerifyOutputs] | type[ProbabilityOutputs],
    rows: int,
    columns: int,
    device: torch.device,
    inputs: tuple[Tensor | None, ...] = (),
    *,
    has_edits: bool = False,
    logprobs: Logprobs | None = None,
    of_trees: bool = False,
) -> None:
    """Raise unless ``out`` is outputs of a kind, for a batch on the sampler's device, with memory of their own."""
    wanted_fields = _fields(kind, rows, columns, has_edits, logprobs, of_trees)
    if not isinstance(out, kind):
        names = ", ".join(wanted_fields)
        shown = repr(out) if isinstance(out, str) else type(out).__name__
        raise TypeError(f"out must be {kind.__name__}, got {shown}; {kind.__name__}({names})")
    every = _flat_fields(out, logprobs)
    fields = {name: field for name, field in every.items() if field is not None or name in wanted_fields}
    _check_names(fields, wanted_fields, rows)
    for name, (dtypes, wanted) in wanted_fields.items():
        tensor = fields[name]
        check_tensor(f"out.{name}", tensor, dtypes, device)
        check_writable(f"out.{name}", tensor)
        if list(tensor.shape) != wanted:
            raise ValueError(f"out.{name} must be {wanted}, as the plan has it, got {list(tensor.shape)}")
    # results must not overwrite the tensors of the call
    check_apart(fields, [tensor for tensor in inputs if tensor is not None])


def _fields(kind: type, rows: int, columns: int, has_edits: bool, logprobs: Logprobs | None, of_trees: bool) -> _Fields:
    """The fields of outputs of a kind for a batch."""
    every = {**_FIELDS[kind], **(_FINISHED if has_edits else {})}
    fields = {name: (dtypes, [rows, columns][:dims]) for name, (dtypes, dims) in every.items()}
    if of_trees:
        fields |= {name: (dtypes, [rows, columns - 1]) for name, (dtypes, _) in _NODES.items()}
    if logprobs is not None:
        _, shape = fields["token_ids"]
        layout = layout_of_outputs(logprobs)
        fields |= {f"logprobs.{name}": ((dtype,), [*shape, *tail]) for name, (dtype, tail) in layout.items()}
    return fields


def _flat_fields(out: Any, logprobs: Logprobs | None) -> dict[str, Any]:
    """The fields of ``out``, those of logprobs by ``logprobs.name``."""
    fields: dict[str, Any] = out._asdict()
    nested = fields.pop("logprobs", None)
    if isinstance(nested, LogprobOutputs):
        fields |= {f"logprobs.{name}": field for name, field in nested._asdict().items()}
    elif nested is not None or logprobs is not None:
        names = ", ".join(layout_of_outputs(logprobs or Logprobs()))
        raise TypeError(
            f"out.logprobs must be LogprobOutputs in a call with logprobs, else None, got {type(nested).__name__}; "
            f"LogprobOutputs({names})"
        )
    return fields


def _check_names(fields: Mapping[str, Any], wanted: Mapping[str, Any], rows: int) -> None:
    """Raise if ``out`` has a field more than the call returns, or not ``finished`` where it does."""
    if "finished" in wanted and fields["finished"] is None:
        raise TypeError(
            f"out.finished must be a torch.Tensor in a batch with edits, got None; torch.empty({rows}, "
            "dtype=torch.bool, device=sampler.device)"
        )
    if "node_ids" in wanted and fields["node_ids"] is None:
        raise TypeError(
            f"out.node_ids must be a torch.Tensor in a verification of trees, got None; torch.empty({rows}, K, "
            "dtype=torch.int64, device=sampler.device)"
        )
    for name in fields:
        if name not in wanted:
            reason = "in a batch without edits" if name == "finished" else "which this call does not ask for"
            raise ValueError(f"out.{name} must be None {reason}, got a tensor; leave it out")


def empty_outputs(
    kind: type[Results],
    columns: int,
    device: torch.device,
    *,
    has_edits: bool = False,
    logprobs: Logprobs | None = None,
    of_trees: bool = False,
) -> Results:
    """The results of a batch without rows, new tensors."""
    tensors: dict[str, Any] = {}
    of_logprobs: dict[str, Tensor] = {}
    for name, (dtypes, shape) in _fields(kind, 0, columns, has_edits, logprobs, of_trees).items():
        owner = of_logprobs if "." in name else tensors
        owner[name.rpartition(".")[2]] = torch.empty(shape, dtype=dtypes[0], device=device)
    if logprobs is not None:
        tensors["logprobs"] = LogprobOutputs(**of_logprobs)
    make: Any = kind
    results: Results = make(**tensors)
    return results


def has_form(out: Any, form: Any) -> bool:
    """Whether ``out`` can take results like ``form``, of any number of rows."""
    if type(out) is not type(form):
        return False
    for field, wanted in zip(out, form, strict=True):
        if not isinstance(field, Tensor) or wanted is None:
            if field is not wanted:
                return False
        elif field.shape[1:] != wanted.shape[1:] or field.dtype not in (wanted.dtype, *_ALSO[wanted.dtype]):
            return False
    return True


def check_bound_out(out: object, device: torch.device, inputs: tuple[Tensor | None, ...]) -> None:
    """Raise unless ``out`` is results of a sample or a verification that variants may write in place."""
    if not isinstance(out, SampleOutputs | VerifyOutputs):
        raise TypeError(f"out must be SampleOutputs or VerifyOutputs, got {type(out).__name__}")
    tokens = out.token_ids
    check_tensor("out.token_ids", tokens, INTEGERS, device)
    if not tokens.dim() or not tokens.numel():
        raise ValueError(f"out.token_ids must be [>= 1] or [>= 1, K + 1], got {list(tokens.shape)}")
    columns = tokens.shape[1] if tokens.dim() > 1 else 0
    of_trees = isinstance(out, VerifyOutputs) and out.node_ids is not None
    has_edits = out.finished is not None
    check_outputs(out, type(out), len(tokens), columns, device, inputs, has_edits=has_edits, of_trees=of_trees)
