"""Outputs of steps: their layout, checks of a caller's ``out``, results of empty batches, and copies into ``out``."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from compiled_sampler.batch import ProbabilityOutputs, SampleOutputs, VerifyOutputs
from compiled_sampler.engine.boundary.memory import check_apart
from compiled_sampler.engine.boundary.tensors import INTEGERS, check_tensor

Results = TypeVar("Results", bound=tuple[Tensor | None, ...])

_FIELDS: dict[type, dict[str, tuple[tuple[torch.dtype, ...], int]]] = {
    SampleOutputs: {"token_ids": (INTEGERS, 1), "status": ((torch.int32,), 1)},
    ProbabilityOutputs: {"probabilities": ((torch.float32,), 2)},
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
"""The field that only batches with stop tokens have."""


def check_outputs(
    out: object,
    kind: type[SampleOutputs] | type[VerifyOutputs] | type[ProbabilityOutputs],
    rows: int,
    columns: int,
    device: torch.device,
    inputs: tuple[Tensor | None, ...] = (),
    *,
    stops: bool = False,
) -> None:
    """Raise unless ``out`` is outputs of a kind, for a batch on the sampler's device, with memory of their own.

    Args:
        out: from the caller.
        kind: of outputs.
        rows: of the batch.
        columns: of fields with two dimensions.
        device: of the sampler.
        inputs: tensors of the call, which results must not overwrite.
        stops: whether the batch has stop tokens, so that there is a field ``finished``.

    Raises:
        TypeError: another type or dtype.
        ValueError: another shape or device, memory that is shared, or a tensor that torch would not let be written.
    """
    wanted_fields = {**_FIELDS[kind], **(_FINISHED if stops else {})}
    if not isinstance(out, kind):
        fields = ", ".join(wanted_fields)
        raise TypeError(f"out must be {kind.__name__}, got {type(out).__name__}; {kind.__name__}({fields})")
    given = {name: each for name, each in out._asdict().items() if each is not None or name in wanted_fields}
    if given.keys() != wanted_fields.keys():
        raise ValueError("out.finished must be None in a batch without stop tokens, got a tensor; leave it out")
    for name, (dtypes, dims) in wanted_fields.items():
        tensor = given[name]
        check_tensor(f"out.{name}", tensor, dtypes, device)
        _check_writable(f"out.{name}", tensor)
        wanted = [rows, columns][:dims]
        if list(tensor.shape) != wanted:
            raise ValueError(f"out.{name} must be {wanted}, as the plan has it, got {list(tensor.shape)}")
    check_apart(given, [each for each in inputs if each is not None])


def _check_writable(name: str, tensor: Tensor) -> None:
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


def empty_outputs(kind: type[Results], columns: int, device: torch.device, *, stops: bool = False) -> Results:
    """The results of a batch without rows.

    Args:
        kind: of outputs.
        columns: of fields with two dimensions.
        device: of the sampler.
        stops: as for ``check_outputs``.
    """
    fields = {**_FIELDS[kind], **(_FINISHED if stops else {})}
    shapes = {name: (dtypes[0], (0, columns)[:dims]) for name, (dtypes, dims) in fields.items()}
    make: Any = kind
    made: Results = make(**{name: torch.empty(s, dtype=dtype, device=device) for name, (dtype, s) in shapes.items()})
    return made


def copied(results: Results, out: Results) -> Results:
    """``out``, after a copy of each field of the results into it, which converts what is of another dtype."""
    for source, target in zip(results, out, strict=True):
        if source is not None and target is not None:
            target.copy_(source)
    return out
