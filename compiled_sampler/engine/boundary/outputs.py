"""Outputs of steps: their layout, checks of a caller's ``out``, results of empty batches, and copies into ``out``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from compiled_sampler.batch import EditedOutputs, ProbabilityOutputs, SampleOutputs, VerifyOutputs, tensors_of
from compiled_sampler.engine.boundary.tensors import INTEGERS, check_apart, check_tensor, check_writable
from compiled_sampler.logprobs import LogprobOutputs, Logprobs, layout_of_outputs

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
    stops: bool = False,
    logprobs: Logprobs | None = None,
) -> None:
    """Raise unless ``out`` is outputs of a kind, for a batch on the sampler's device, with memory of their own.

    Args:
        out: from the caller.
        kind: of outputs.
        rows: of the batch.
        columns: of fields with two dimensions.
        device: of the sampler.
        inputs: tensors of the call, which results must not overwrite.
        stops: whether the batch has edits, so that there is a field ``finished``.
        logprobs: which are asked for, so that there is a field ``logprobs`` with those fields.

    Raises:
        TypeError: another type or dtype.
        ValueError: another shape or device, memory that is shared, or a tensor that torch would not let be written.
    """
    wanted_fields = _fields(kind, rows, columns, stops, logprobs)
    if not isinstance(out, kind):
        fields = ", ".join(wanted_fields)
        found = repr(out) if isinstance(out, str) else type(out).__name__
        raise TypeError(f"out must be {kind.__name__} or 'ring', got {found}; {kind.__name__}({fields})")
    given = {name: each for name, each in _given(out, logprobs).items() if each is not None or name in wanted_fields}
    _check_names(given, wanted_fields, rows)
    for name, (dtypes, wanted) in wanted_fields.items():
        tensor = given[name]
        check_tensor(f"out.{name}", tensor, dtypes, device)
        check_writable(f"out.{name}", tensor)
        if list(tensor.shape) != wanted:
            raise ValueError(f"out.{name} must be {wanted}, as the plan has it, got {list(tensor.shape)}")
    check_apart(given, [each for each in inputs if each is not None])


def _fields(kind: type, rows: int, columns: int, stops: bool, logprobs: Logprobs | None) -> _Fields:
    """The fields of outputs of a kind for a batch."""
    every = {**_FIELDS[kind], **(_FINISHED if stops else {})}
    made = {name: (dtypes, [rows, columns][:dims]) for name, (dtypes, dims) in every.items()}
    if logprobs is not None:
        _, shape = made["token_ids"]
        layout = layout_of_outputs(logprobs)
        made |= {f"logprobs.{name}": ((dtype,), [*shape, *tail]) for name, (dtype, tail) in layout.items()}
    return made


def _given(out: Any, logprobs: Logprobs | None) -> dict[str, Any]:
    """The fields of ``out``, those of logprobs by ``logprobs.name``.

    Raises:
        TypeError: no logprobs where some are asked for, or something else.
    """
    fields: dict[str, Any] = out._asdict()
    found = fields.pop("logprobs", None)
    if isinstance(found, LogprobOutputs):
        fields |= {f"logprobs.{name}": each for name, each in found._asdict().items()}
    elif found is not None or logprobs is not None:
        names = ", ".join(layout_of_outputs(logprobs or Logprobs()))
        raise TypeError(
            f"out.logprobs must be LogprobOutputs in a call with logprobs, else None, got {type(found).__name__}; "
            f"LogprobOutputs({names})"
        )
    return fields


def _check_names(given: Mapping[str, Any], wanted: Mapping[str, Any], rows: int) -> None:
    """Raise if ``out`` has a field more than the call returns, or not ``finished`` where it does.

    Raises:
        TypeError: ``finished`` is None in a batch with edits.
        ValueError: a field more.
    """
    if "finished" in wanted and given["finished"] is None:
        raise TypeError(
            f"out.finished must be a torch.Tensor in a batch with edits, got None; torch.empty({rows}, "
            "dtype=torch.bool, device=sampler.device)"
        )
    for name in given:
        if name not in wanted:
            reason = "in a batch without stop tokens" if name == "finished" else "which this call does not ask for"
            raise ValueError(f"out.{name} must be None {reason}, got a tensor; leave it out")


def empty_outputs(
    kind: type[Results],
    columns: int,
    device: torch.device,
    *,
    rows: int = 0,
    stops: bool = False,
    logprobs: Logprobs | None = None,
) -> Results:
    """New tensors for results, of as many rows as are given; without rows they are the results of an empty batch.

    Args:
        kind: of outputs.
        columns: of fields with two dimensions.
        device: of the sampler.
        rows: of the batch.
        stops: as for ``check_outputs``.
        logprobs: as for ``check_outputs``.
    """
    fields = _fields(kind, rows, columns, stops, logprobs)
    empty = {name: torch.empty(shape, dtype=dtypes[0], device=device) for name, (dtypes, shape) in fields.items()}
    make: Any = kind
    made: dict[str, Any] = {name: each for name, each in empty.items() if "." not in name}
    if logprobs is not None:
        found = {name.partition(".")[2]: each for name, each in empty.items() if "." in name}
        made["logprobs"] = LogprobOutputs(**found)
    results: Results = make(**made)
    return results


def copied(results: Results, out: Results) -> Results:
    """``out``, after a copy of each field of the results into it, which converts what is of another dtype."""
    for source, target in zip(tensors_of(results), tensors_of(out), strict=True):
        target.copy_(source)
    return out
