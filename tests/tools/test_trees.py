"""Trees: rounds of rejection keep the law, steps are counted as they are taken, and a wrong node ends a benchmark."""

import numpy as np
import pytest
import torch

from compiled_sampler import Sampler, SamplingParams
from tools.bench import trees
from tools.bench.__main__ import parse
from tools.bench.batches import WrongAnswer
from tools.bench.cases import CASES
from tools.trees import judge, nodes, places_of_recursion, tokens_per_step


@pytest.mark.parametrize("width", [1, 3])
def test_rounds_of_rejection_keep_the_law(width):
    source, p, q = np.random.default_rng(1), np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.2, 0.7])
    drawn = [judge(p, q, width, source)[0] for _ in range(20_000)]
    assert np.abs(np.bincount(drawn, minlength=3) / len(drawn) - p).max() < 0.015  # 4 standard deviations


def test_steps_end_where_no_draft_is_the_token():
    places = np.array([[0, 1, 4, 0, 0, 0, 4, 1, 4]])
    assert tokens_per_step(places, 1, 1, "full") == pytest.approx((2 + 1 + 2 + 2 + 1) / 5)
    assert tokens_per_step(places, 2, 2, "full") == pytest.approx((3 + 3 + 1) / 3)
    assert tokens_per_step(np.array([[1, 0, 0, 4, 4]]), 2, 2, "full") == 3.0
    assert tokens_per_step(np.array([[1, 0, 0, 4, 4]]), 2, 2, "comb") == 2.0
    assert (nodes(2, 5, "full"), nodes(2, 5, "comb")) == (62, 10)


def test_recursive_rejection_accepts_siblings_in_the_order_of_their_draws():
    class Same:
        """A decoder whose models agree, so that the first sibling is always accepted."""

        def __init__(self):
            self.sampler = Sampler(16, 4, backend="eager")
            self.plan = self.sampler.plan([self.sampler.add_request(SamplingParams(seed=n)) for n in range(4)])
            self.positions, self.tokens = torch.zeros(4, dtype=torch.int64), []
            self._logits = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))

        def logits(self):
            return self._logits, self._logits

        def push(self, tokens):
            self.positions = self.positions + 1
            self.tokens.append(tokens)

    decoder = Same()
    assert (places_of_recursion(decoder, 3, 2) == 0).all()
    assert len(decoder.tokens) == 3


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
