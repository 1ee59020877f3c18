"""Integers of a caller in 32 or 64 bits; the stages compute with 64, so that one set of kernels serves both."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from compiled_sampler.batch import SampleInputs, VerifyInputs
from graph_cache import copy_tensors

Inputs = TypeVar("Inputs", bound=SampleInputs | VerifyInputs)
_FIELDS = ("slots", "positions", "num_drafts", "draft_token_ids")


def in_int64(inputs: Inputs) -> Inputs:
    """The inputs of a step with slots, positions, counts and drafts in int64: those of int32 are converted.

    They are converted together, with one launch, before the first stage; inside a capture it is part of the graph. So
    no stage is compiled for int32, and inputs that are int64 already pass as they are.
    """
    narrow: dict[str, Tensor] = {}
    for name in _FIELDS:
        tensor = getattr(inputs, name, None)
        if tensor is not None and tensor.dtype is not torch.int64:
            narrow[name] = tensor
    if not narrow:
        return inputs
    wide = {name: torch.empty(each.shape, dtype=torch.int64, device=each.device) for name, each in narrow.items()}
    copy_tensors([*wide.values()], [*narrow.values()])
    given: Any = inputs
    made: Inputs = given._replace(**wide)
    return made
