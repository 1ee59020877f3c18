"""Passes that make the edited copy pick its rows from more: what they make of a copy of these rows, bit for bit."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from compiled_sampler import EditRows, LogitEdit
from compiled_sampler.batch import PickedRows
from compiled_sampler.core.stage import call
from compiled_sampler.edits.allowed_token_ids import AllowedIds
from compiled_sampler.edits.custom import customized
from compiled_sampler.edits.masks import copied, masked
from compiled_sampler.lowering.compiled_stages import CompiledStages
from tests.builders.custom_edits import given_to_all

V, R, SLOTS = 129, 12, 3
ROW_IDS = torch.tensor([7, 8, 9, 10, 11, 11, 11])


@dataclass(frozen=True)
class Halved(LogitEdit):
    """An edit that depends on the row."""

    def edit(self, x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
        """Half the logits at odd positions."""
        return torch.where((rows.positions & 1) == 1, 0.5 * x, x)


@pytest.mark.parametrize("run", [call, CompiledStages()], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_picked_rows_are_edited_as_a_copy_of_them(dtype, run):
    source = torch.Generator().manual_seed(3)
    values = torch.randn(R, V + 4, generator=source).to(dtype)
    words = torch.randint(-(2**31), 2**31, (len(ROW_IDS) + SLOTS, -(-V // 32)), generator=source, dtype=torch.int32)
    slots, positions = torch.tensor([0, 1, 2, 0, 1, -1, -1]), torch.arange(len(ROW_IDS))
    masks = words[SLOTS:], slots, AllowedIds(words[:SLOTS])
    edits = given_to_all([Halved()], SLOTS, V)
    of_edits = words[SLOTS:], slots, positions, None, edits.tables.custom, (), None
    picked, copy = PickedRows(values, ROW_IDS), values[ROW_IDS]
    for stage, read, static in ((copied, (), {}), (masked, masks, {}), (customized, of_edits, {"edits": edits.custom})):
        made = run(stage, picked, *read, vocab_size=V, **static)
        assert torch.equal(made, stage(copy, *read, vocab_size=V, **static))
        assert made.dtype is torch.float32
        assert made.untyped_storage().data_ptr() != values.untyped_storage().data_ptr()
