"""Baselines draw from the law that the library draws from, and one that fails or is missing ends nothing."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled_sampler import Sampler
from tests.oracles.goodness_of_fit import accept, chi_square, detects
from tools.bench import baselines
from tools.bench.batches import Batch, sampling_batch
from tools.bench.cases import CASES, VERIFY_CASES, Case
from tools.bench.runs import baseline_time

CPU, V, DRAWS = torch.device("cpu"), 1000, 10_000


def batch_of(case: Case, requests: int) -> Batch:
    return sampling_batch(case.distribution, requests, V, CPU, torch.float32)


def law_of(case: Case, logits: Tensor) -> Tensor:
    sampler = Sampler(V, 1, backend="eager")
    return sampler.probs(sampler.plan([sampler.add_request(case.params)] * logits.shape[0]), logits)


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_baselines_draw_from_the_same_law(case: Case) -> None:
    row = batch_of(case, 1).logits
    wanted, batch = law_of(case, row)[0], Batch(row.expand(DRAWS, V), torch.arange(DRAWS))
    found = {name: each for name, each in baselines.baselines_of(case).items() if not isinstance(each, str)}
    assert found
    for name, function in found.items():
        eager = "compile" in name  # compiled for each shape, which takes half a minute
        tokens = baselines.filtered_race(case.params, batch.logits) if eager else function(batch)
        accept(chi_square(np.bincount(tokens, minlength=V), wanted))
        detects(chi_square(np.bincount((tokens + 1) % V, minlength=V), wanted))


@pytest.mark.parametrize("one_hot", [True, False])
def test_the_torch_verifier_accepts_what_the_target_drew_and_rejects_what_it_cannot(one_hot: bool) -> None:
    params = dataclasses.replace(VERIFY_CASES["match, k 50 + p .9"].params, top_k=2, top_p=1.0)
    logits = torch.full((8, V), -20.0)
    logits[:, 7] = 20.0
    probs = None if one_hot else torch.full((6, V), 1.0 / V)
    drafts = torch.tensor([[7, 7, 7], [7, 3, 7]])
    tokens = baselines.verified(params, Batch(logits, torch.arange(2), drafts, probs))
    assert tokens.tolist() == [[7, 7, 7, 7], [7, 7, -1, -1]]


def test_a_baseline_that_fails_is_reported_and_ends_nothing() -> None:
    calls = list(batch_of(CASES["greedy"], 2).split(1))

    def broken(batch: Batch) -> Tensor:
        raise RuntimeError("no kernel for this device\nand a long trace")

    assert baseline_time(broken, calls, CPU) == "failed: RuntimeError: no kernel for this device"
    assert "failed: ValueError: token ids" in str(baseline_time(lambda batch: batch.positions + V, calls, CPU))
    assert isinstance(baseline_time(lambda batch: batch.positions, calls, CPU), float)


def test_an_engine_that_is_missing_is_said_to_be() -> None:
    assert baselines.imported("no_such_engine.sampling") is None
    if baselines.imported("flashinfer.sampling") is None:
        rows = baselines.baselines_of(CASES["p .9"])
        assert rows[baselines.BY_ROW] == rows[baselines.OF_ALL] == "not installed"
