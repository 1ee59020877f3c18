"""Rows of a draft table: each draft's own, in the order of the requests, and those of padding behind the last."""

import pytest
import torch

from compiled_sampler.batch import DraftTable
from compiled_sampler.speculation.row_layout import gathered, rows_of_drafts, rows_of_places

S, K, V = 5, 3, 7
TABLE = DraftTable(torch.arange((S + 1) * K * V).view(S + 1, K, V).float())


@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.parametrize("counts", [[3, 0, -1, 2, 1], [0] * 5, [3] * 5, [-1] * 5], ids=str)
def test_each_draft_has_the_row_of_its_slot_and_place(counts, searched):
    slots = [4, 2, -1, -1, 0]
    held = [(slot, j) for slot, count in zip(slots, counts, strict=True) for j in range(max(count, 0))]
    rows = len(held) + len(slots)
    found = rows_of_drafts(torch.zeros(rows, V), torch.tensor(slots), torch.tensor(counts), TABLE, searched=searched)
    assert found[0].tolist() == [slot for slot, _ in held] + [-1] * len(slots)
    assert found[1][: len(held)].tolist() == [(S if slot < 0 else slot) * K + j for slot, j in held]
    assert ((found[1][len(held) :] >= S * K) & (found[1][len(held) :] < (S + 1) * K)).all()


def test_a_place_is_found_where_it_was_written():
    slots, places = torch.tensor([4, 0, -1]), torch.tensor([2, 1, 0])
    rows = gathered(TABLE, rows_of_places(slots, places, TABLE))
    assert torch.equal(rows, torch.stack([TABLE.logits[4, 2], TABLE.logits[0, 1], TABLE.logits[S, 0]]))
