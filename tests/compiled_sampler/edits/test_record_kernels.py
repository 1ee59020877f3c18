"""Records of tokens as kernels of a GPU: one for a token a row, and no operator left to ATen."""

import itertools

import pytest
import torch

from compiled_sampler import Sampler
from compiled_sampler.edits.min_tokens import StopLists
from compiled_sampler.edits.recording import record_drafts, record_draws, record_ends
from compiled_sampler.edits.stops import are_ends
from tests.tiers import tiers
from tools.kernels.launches import FALLBACK, for_a_gpu, generated, listed

ROWS, WIDTH, V = 8, 3, 1000


@pytest.mark.parametrize("length", tiers([40, 5000], [40, 3000, 5000]))
@pytest.mark.parametrize(("stage", "most"), [(record_draws, 1), (record_drafts, 2), (record_ends, 3)])
def test_a_record_takes_few_kernels(stage, most, length):
    """Whether the history is held in registers whole or looped over, which short and long ones differ in."""
    pytest.importorskip("triton")
    sampler = Sampler(V, ROWS, backend="eager", history_len=length)
    edits = sampler._edits
    numbers = torch.zeros(ROWS, dtype=torch.int64)
    one, several, status = numbers + 1, torch.zeros(ROWS, WIDTH, dtype=torch.int64), numbers.to(torch.int32)
    given = {
        record_draws: (one, status, edits.stops),
        record_drafts: (several, numbers + WIDTH, sampler._requests.staged.table),
        record_ends: (several, numbers + WIDTH - 1, status),
    }[stage]
    static = {record_drafts: {"vocab_size": V}, record_draws: {"num_places": length}}.get(stage, {})
    with for_a_gpu():
        code = generated(
            lambda run: run(stage, *edits.history.memory, torch.arange(ROWS), numbers, *given, **static), "triton"
        )
    found = listed(code)
    assert [each.name for each in found if each.kind == FALLBACK] == []
    assert sum(each.launches for each in found) <= most


@pytest.mark.parametrize("width", [1, 5, 32])
def test_an_end_is_one_in_however_many_places_it_is_looked_for(width):
    source = torch.Generator().manual_seed(width)
    ids = torch.stack([torch.randperm(40, generator=source)[:width] for _ in range(ROWS)]).to(torch.int32)
    counts = (torch.arange(ROWS) % (width + 1)).to(torch.int32)
    lists = StopLists(counts, counts, counts, ids)
    slots = torch.tensor([*range(ROWS), -1])
    tokens, status = torch.arange(40), torch.zeros(1, dtype=torch.int32)
    seen = set()
    for row, token in itertools.product(range(len(slots)), tokens):
        wanted = row < ROWS and int(token) in ids[row, : counts[row]].tolist()
        for places in (0, width - 1, width, 33, 100):
            found = are_ends(token[None], status, slots[row : row + 1], lists, num_places=places)
            assert found.tolist() == [wanted]
        seen.add(wanted)
    assert seen == {False, True}
