"""Outputs of steps: their layout, checks of a caller's ``out``, and results of empty batches."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from compiled_sampler.batch import EditedOutputs, ProbabilityOutputs, SampleOutputs, VerifyOutputs
from compiled_sampler.engine.boundary.tensors import INTEGERS, check_apart, check_tensor, check_writable
from compiled_sampler.logprobs import LogprobOutputs, Logprobs, layout_of_outputs

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
_FINISHED = {"finished": ((torch.bool,), 1)}
"""The field that only batches with edits have."""
_NODES = {"node_ids": (INTEGERS, 2)}
"""The field that only verifications of trees have; it has a column less than the tokens."""
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
    rows: int = 0,
    has_edits: bool = False,
    logprobs: Logprobs | None = None,
    of_trees: bool = False,
) -> Results:
    """New tensors for results, of as many rows as are given; without rows they are the results of an empty batch."""
    tensors: dict[str, Any] = {}
    of_logprobs: dict[str, Tensor] = {}
    for name, (dtypes, shape) in _fields(kind, rows, columns, has_edits, logprobs, of_trees).items():
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
