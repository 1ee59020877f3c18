"""Rows under masks of the call and of requests, and the logits that the masks leave of them, a token at a time."""

import random
from typing import Any

import torch
from torch import Tensor

from compiled_sampler.batch import SampleInputs
from compiled_sampler.core.stage import Run
from compiled_sampler.edits.allowed_token_ids import AllowedIds
from compiled_sampler.edits.bias import BiasLists
from compiled_sampler.edits.tables import EditInputs, EditTables
from compiled_sampler.params import SamplingParams
from compiled_sampler.pipeline.chunks import without_kernels
from tests.builders.edits import random_mask
from tests.builders.filters import hard_rows
from tests.builders.inputs import slot_table

MASKS = ("token_bitmask", "allowed_token_ids", "both")
MASKED_MODES = ("greedy", "no_filter", "min_p", "top_k_top_p[64]", "top_k", "full")
"""Modes whose draws read masks beside the logits."""
_SLOTS = 5
_OF_MODE: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "no_filter": {"temperature": 1.5},
    "min_p": {"temperature": 1.5, "min_p": 0.05},
    "top_k_top_p[64]": {"top_k": 20, "top_p": 0.9},
    "top_k": {"temperature": 1.5, "top_k": 65},
    "full": {"temperature": 5.0, "top_p": 0.97},
}


def params_of(mode: str) -> list[SamplingParams]:
    """Requests of a mode, and a greedy one, which every mode serves."""
    drawn = [SamplingParams(seed=slot, **_OF_MODE[mode]) for slot in range(_SLOTS - 1)]
    return [*drawn, SamplingParams(seed=9, temperature=0.0)]


def bits_of(words: Tensor, vocab_size: int) -> Tensor:
    """Whether each token is set, bool ``[R, V]``, a token at a time."""
    rows = [[(row[v // 32] >> (v % 32)) & 1 == 1 for v in range(vocab_size)] for row in words.tolist()]
    return torch.tensor(rows)


def masked_inputs(
    mode: str, masks: str, vocab_size: int, dtype: torch.dtype = torch.float32, copies: int = 1
) -> tuple[SampleInputs, SampleInputs]:
    """A step with masks, and the same without, of logits that are -inf where they mask: float32.

    Hard rows, one masked whole, one of padding; words and logits have columns beyond V, which would change tokens.
    """
    source, words = random.Random(f"{mode} {masks} {vocab_size}"), -(-vocab_size // 32)
    logits = hard_rows(vocab_size, dtype).repeat(copies, 1)
    rows = len(logits)
    wide = torch.cat([logits, torch.full((rows, 3), torch.inf, dtype=dtype)], 1)
    slots = torch.tensor([-1 if row % 7 == 6 else row % _SLOTS for row in range(rows)])
    of_call, of_slot = random_mask(source, rows, vocab_size), random_mask(source, _SLOTS, vocab_size)
    of_call[0], of_call[1] = 0, -1
    bitmask = torch.full((rows, words + 5), -1, dtype=torch.int32)[:, 2 : 2 + words + 1]
    bitmask[:, :words] = of_call
    allowed = AllowedIds(torch.cat([of_slot, of_slot], 1)[:, :words])  # a part of wider rows, as a sampler's is
    keeps = torch.ones(rows, vocab_size, dtype=torch.bool)
    if masks != "allowed_token_ids":
        keeps &= bits_of(of_call, vocab_size)
    if masks != "token_bitmask":
        keeps &= bits_of(of_slot, vocab_size)[slots.clamp(min=0)]
    edits = EditInputs(
        EditTables(allowed=None if masks == "token_bitmask" else allowed),
        None if masks == "allowed_token_ids" else bitmask,
    )
    table = slot_table(params_of(mode), vocab_size)
    inputs = SampleInputs(wide[:, : vocab_size + 2], slots, torch.arange(rows) + 5, table)
    left = torch.where(keeps, logits.float(), -torch.inf)
    return inputs._replace(edits=edits), inputs._replace(logits=left)


def with_bias(inputs: SampleInputs, leave: bool | str = False) -> SampleInputs:
    """The step with biases of two tokens, in logits of its own."""
    ids, biases = torch.tensor([[3, 40]] * _SLOTS, dtype=torch.int32), torch.tensor([[-2.0, 50.0]] * _SLOTS)
    bias = BiasLists(torch.full((_SLOTS,), 2, dtype=torch.int32), ids, biases)
    tables = inputs.edits.tables._replace(lists=(bias,))
    edits = inputs.edits._replace(tables=tables, leave=leave)
    return inputs._replace(logits=inputs.logits.clone(), edits=edits)


def stages_watched(seen: list[str]):
    """A ``run`` in eager torch that notes the stages."""

    def watch(stage, /, *tensors, **static):
        seen.append(stage.__name__)
        return without_kernels(stage, *tensors, **static)

    return Run(watch)
