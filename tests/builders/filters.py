"""Rows that are hard for filters of whole rows, and what the stages and the slow truth make of them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_sampler import SamplingParams
from compiled_sampler.batch import SampleInputs
from compiled_sampler.core.stage import Run, call
from compiled_sampler.edits.edit_spec import EditSizes
from compiled_sampler.engine.requests.custom_edits import CustomEditSet
from compiled_sampler.engine.requests.edit_slots import EditSlots
from compiled_sampler.modes import mode_table
from compiled_sampler.pipeline.edits import edited_step
from tests.builders.inputs import slot_table
from tests.builders.logprobs import processed_scale
from tests.oracles import oracle_filters

INF, NAN = math.inf, math.nan


def hard_rows(vocab_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows with ties, masks, NaN, infinities, zeros of both signs, denormals, and ranges from none to all floats."""
    source = torch.Generator().manual_seed(vocab_size)
    plain = 3.0 * torch.randn(12, vocab_size, generator=source)
    where = torch.rand(12, vocab_size, generator=source)
    rows = [
        plain[0],
        plain[1].round(),  # ties
        plain[2] * 0.0,  # zeros of both signs
        torch.where(where[3] < 0.4, -INF, plain[3]),
        torch.where(where[4] < 0.3, NAN, plain[4]),
        torch.where(where[5] < 0.1, INF, plain[5]),
        torch.full((vocab_size,), -INF),
        torch.full((vocab_size,), NAN),
        plain[8] * 2.0**-128,  # denormals
        torch.where(where[9] < 0.5, -3e38, 3e38),
        torch.where(where[10] < 0.1, -1e9, plain[10]),  # a mask of some engines
        plain[11] * 30.0,
    ]
    return torch.stack(rows).to(dtype)


def filtered_by_stages(logits: Tensor, given: Sequence[dict[str, Any]], run: Run = call) -> Tensor:
    """The edited copy of rows, one request each at position 7, float32 ``[R, V]``."""
    params = [SamplingParams(**{"seed": row, **each}) for row, each in enumerate(given)]
    vocab_size, cpu = logits.shape[1], torch.device("cpu")
    edits = EditSlots(len(params), vocab_size, EditSizes(), 0, cpu, CustomEditSet((), vocab_size, cpu, len(params)))
    names = set[str]()
    for slot, each in enumerate(params):
        needed = edits.checked(each, (), ())
        edits.add(slot, each, needed, (), ())
        names.update(needed)
    edits.upload()
    inputs = edits.inputs(edits.custom.expanded(tuple(names)), {}, processed_scale(params))
    positions = torch.full((len(params),), 7)
    read = SampleInputs(logits, torch.arange(len(params)), positions, slot_table(params, vocab_size), edits=inputs)
    return edited_step(mode_table(vocab_size, "top_k")[0], read, run).logits


def filtered_by_hand(logits: Tensor, given: Sequence[dict[str, Any]]) -> Tensor:
    rows = logits.float().tolist()
    pairs = enumerate(zip(rows, given, strict=True))
    return torch.tensor([oracle_filters.filtered(x, {"seed": row, **each}, 7) for row, (x, each) in pairs])


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether both hold the same float32 numbers, zeros with their signs; one NaN is like another."""
    is_nan = left.isnan() & right.isnan()
    return bool((is_nan | (left.view(torch.int32) == right.view(torch.int32))).all())
