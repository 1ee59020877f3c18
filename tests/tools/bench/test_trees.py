"""Trees in the benchmark: what is timed is held against eager torch, and a wrong answer ends the run."""

import pytest
import torch

from compiled_sampler import Sampler
from tools.bench import trees
from tools.bench.__main__ import parse
from tools.bench.batches import WrongAnswer
from tools.bench.cases import CASES


def test_cells_are_of_the_trees_that_the_options_name(monkeypatch):
    monkeypatch.setattr(trees, "NODES", (5,))
    options = parse(["--trees", "--device", "cpu", "--vocab", "300", "--requests", "3", "--backend", "eager"])
    (cell,) = trees.measure(options, options.requests)
    assert (cell.requests, cell.nodes, cell.rows) == (3, 5, 18)
    assert cell.tokens_per_step > 1.0


def test_a_wrong_node_ends_the_run():
    drafts, parents, positions = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[-1, 0, 0]] * 2), torch.arange(2)
    logits = torch.zeros(8, 20).index_fill(1, torch.tensor([0]), 30.0)
    sampler = Sampler(20, 1, backend="eager")
    plan = sampler.plan([sampler.add_request(CASES[trees.CASE].params)] * 2, num_drafts=[3, 3])
    made = sampler.verify(plan, logits, drafts, positions, parents=parents)
    trees.compare(logits, drafts, positions, parents, made, 20)
    assert made.node_ids is not None
    with pytest.raises(WrongAnswer, match="trees of 3 nodes"):
        trees.compare(logits, drafts, positions, parents, made._replace(node_ids=made.node_ids + 1), 20)
