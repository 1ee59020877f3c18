"""Rows of ragged requests, of their drafts and of what they emit: a loop over requests finds the same."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from compiled_sampler.batch import DraftTable
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.speculation import trees
from compiled_sampler.speculation.emission import emitted_rows
from compiled_sampler.speculation.row_layout import (
    proposal_slots,
    row_layout,
    rows_of_drafts,
)
from tests.builders.trees import path_of, random_parents
from tools.bench.memory import scratch_bytes

V = 10


def looped(
    num_drafts: list[int], slots: list[int], positions: list[int], drafts: list[list[int]]
) -> list[tuple[Any, ...]]:
    """Slot, position, offset, draft and proposal of each row; None where there is no draft to have been proposed."""
    rows, proposal = [], 0
    for n, count in enumerate(num_drafts):
        for offset in range(count + 1):
            has_draft = offset < count
            draft = drafts[n][offset] if has_draft and 0 <= drafts[n][offset] < V else -1
            rows.append((slots[n], positions[n] + offset, offset, draft, proposal if has_draft else None))
            proposal += has_draft
    return rows


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=8), st.integers(0, 4), st.integers(0, 2**32))
def test_rows_are_those_of_a_loop_over_requests_compared_or_searched(num_drafts, extra_rows, seed):
    """Padding may be anywhere; what lies beyond a request's drafts is random, and rows beyond the last are padding."""
    generator, count = torch.Generator().manual_seed(seed), len(num_drafts)
    slots = torch.randint(0, 100, (count,), generator=generator)
    slots[torch.tensor(num_drafts) < 0] = -1
    positions = torch.randint(0, 2**40, (count,), generator=generator)
    drafts = torch.randint(-2, V + 3, (count, max(*num_drafts, 0)), generator=generator)
    rows = looped(num_drafts, slots.tolist(), positions.tolist(), drafts.tolist())
    proposers = [row for row, (*_, proposal) in enumerate(rows) if proposal is not None]
    given = torch.empty(len(rows) + extra_rows, 1), slots, positions, torch.tensor(num_drafts), drafts
    proposals = torch.empty(len(proposers) + extra_rows, 1)
    for searched in (False, True):
        layout = row_layout(*given, vocab_size=V, searched=searched)
        assert layout.first_drafts.tolist() == [sum(max(k, 0) for k in num_drafts[:n]) for n in range(count)]
        found = torch.stack(layout[:4], 1).tolist()
        assert found[: len(rows)] == [[*row[:4]] for row in rows]
        assert all((slot, draft) == (-1, -1) for slot, _, _, draft in found[len(rows) :])
        assert layout.proposals[proposers].tolist() == list(range(len(proposers)))
        trials = torch.stack([*layout.trials], 1).tolist()
        assert all(0 <= row < max(len(given[0]), 1) for row, *_ in trials)
        assert trials[: len(proposers)] == [[row, *rows[row][:4]] for row in proposers]
        owners = proposal_slots(proposals, slots, given[3], searched=searched)
        assert owners[: len(proposers)].tolist() == [rows[row][0] for row in proposers]


def test_compiled_searches_find_the_same_requests():
    counts = torch.randint(-1, 4, (1500,), generator=torch.Generator().manual_seed(2))
    requests = torch.arange(1500), torch.arange(1500) * 3, counts, torch.arange(4500).view(1500, 3) % (V + 2) - 1
    logits = torch.empty(int((counts + 1).sum()) + 2, 1)
    wanted = row_layout(logits, *requests, vocab_size=V)
    found = CompiledStages()(row_layout, logits, *requests, vocab_size=V, searched=True)
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(found), tree_leaves(wanted), strict=True))


def test_a_hundred_thousand_requests_take_no_memory_but_a_few_numbers_a_row():
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(-1, 4, (100_000,), generator=generator)
    rows = int((counts + 1).sum())
    requests = torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64), counts, torch.zeros(100_000, 3).long()
    logits = torch.empty(rows, 1)
    layout: list[Any] = []
    held = scratch_bytes(
        lambda: layout.append(row_layout(logits, *requests, vocab_size=V, searched=True)), torch.device("cpu")
    )
    assert held < 300 * rows
    assert torch.equal(layout[0].slots, torch.repeat_interleave(counts + 1))


CACHE_SLOTS, WIDTH, WIDE = 5, 3, 7
TABLE = DraftTable(torch.arange((CACHE_SLOTS + 1) * WIDTH * WIDE).view(CACHE_SLOTS + 1, WIDTH, WIDE).float())


@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.parametrize("counts", [[3, 0, -1, 2, 1], [0] * 5, [3] * 5, [-1] * 5], ids=str)
def test_each_draft_has_the_row_of_its_slot_and_place(counts, searched):
    slots = [4, 2, -1, -1, 0]
    held = [(slot, j) for slot, count in zip(slots, counts, strict=True) for j in range(max(count, 0))]
    rows = len(held) + len(slots)
    found = rows_of_drafts(torch.zeros(rows, WIDE), torch.tensor(slots), torch.tensor(counts), TABLE, searched=searched)
    assert found[0].tolist() == [slot for slot, _ in held] + [-1] * len(slots)
    assert found[1][: len(held)].tolist() == [(CACHE_SLOTS if slot < 0 else slot) * WIDTH + j for slot, j in held]
    assert ((found[1][len(held) :] >= CACHE_SLOTS * WIDTH) & (found[1][len(held) :] < (CACHE_SLOTS + 1) * WIDTH)).all()


NUM_DRAFTS = torch.tensor([2, -1, 0, 3, 1])
SLOTS = torch.tensor([4, -1, 0, 2, 7])
TOKEN_IDS = torch.tensor([[5, 6, -1, -1], [-1] * 4, [9, -1, -1, -1], [1, 2, 3, 8], [-1, -1, -1, -1]])
LOGITS = torch.zeros(12, 3)  # three rows of the first request, one, four, two, and two of nobody


def test_a_row_has_the_token_that_it_emits():
    rows = emitted_rows(LOGITS, SLOTS, NUM_DRAFTS, TOKEN_IDS)
    assert rows.token_ids.tolist() == [5, 6, -1, 9, 1, 2, 3, 8, -1, -1, -1, -1]
    assert rows.slots.tolist() == [4, 4, -1, 0, 2, 2, 2, 2, -1, -1, -1, -1]


# Depths and paths of nodes, whatever parents are.


@pytest.mark.parametrize("kind", ["random", "chain", "garbage"])
@pytest.mark.parametrize("width", [1, 8, 9, 64])
def test_nodes_have_the_depth_and_the_path_of_a_climb(kind, width):
    source = random.Random(width)
    every = [random_parents(source, width, kind) for _ in range(20)]
    counts = [source.randrange(width + 1) for _ in every]
    parents, num_drafts = torch.tensor(every), torch.tensor(counts)
    made = trees.tree_of(trees.first_ways(parents, num_drafts), parents, num_drafts)
    for n, (tree, count) in enumerate(zip(every, counts, strict=True)):
        for node in range(width):
            path = path_of(tree, node) if node < count else None
            assert made.depths[n, node] == len(path or ())
            if path is not None:
                assert int(made.paths[n, node]) % 2**64 == sum(1 << each for each in path)
        assert made.is_wrong[n] == any(not -1 <= tree[node] < node for node in range(count))
