"""``functional.sample`` and ``probs``: the bits of a ``Sampler``, from numbers and from tensors, on every backend."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled_sampler import RowStatus, SampleOutputs, Sampler, SamplingParams
from compiled_sampler.batch import tensors_of
from compiled_sampler.functional import probs, sample
from compiled_sampler.functional.arguments import mode_of
from compiled_sampler.modes import mode_table, uncovered
from tests.builders.sampler import REQUESTS, V, same

CHOICES = itertools.product((0.0, 0.3, 1.0, 1e3), (0, 1, 5, 64, 90, V, 500), (0.05, 0.9, 1.0), (0.0, 0.04, 1.0))
PARAMS = [SamplingParams(*values, seed=2**64 - 1 - 2**57 * n) for n, values in enumerate(list(CHOICES)[::3])]
FLOATS, NAMES = ("temperature", "top_p", "min_p"), ("temperature", "top_k", "top_p", "min_p")


def columns(params: Sequence[SamplingParams], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    made = {name: torch.tensor([getattr(p, name) for p in params], dtype=dtype) for name in FLOATS}
    return {**made, "top_k": torch.tensor([p.top_k for p in params])}


def noise(params: Sequence[SamplingParams]) -> dict[str, Tensor]:
    seeds = torch.tensor([(p.seed + 2**63) % 2**64 - 2**63 for p in params])
    return {"seeds": seeds, "positions": torch.arange(len(params)) * 2**33}


def rows(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of logits with ties, a NaN, an infinity, one that is all masked, and one column more than V."""
    source = torch.Generator().manual_seed(3)
    logits = (torch.randn(max(count, 4), V + 1, generator=source) * 3).to(torch.bfloat16).to(dtype)
    logits[:, V] = 1e4
    logits[1, 4], logits[2, 5], logits[3] = math.nan, math.inf, -math.inf
    return logits[:count]


def with_sampler(
    params: Sequence[SamplingParams], logits: Tensor, positions: Tensor, base: str = "top_k"
) -> tuple[SampleOutputs, Tensor]:
    sampler = Sampler(V, len(params), logits_dtype=logits.dtype, backend="eager", top_p_base=base)
    plan = sampler.plan([sampler.add_request(each) for each in params])
    return sampler.sample(plan, logits, positions), sampler.probs(plan, logits)


@pytest.mark.parametrize(
    ("dtype", "base", "backend"),
    [
        *itertools.product([torch.float32, torch.bfloat16, torch.float16], ["top_k", "all"], ["eager"]),
        (torch.float32, "top_k", "compiled"),
    ],
)
def test_rows_of_all_kinds_are_those_of_a_sampler(dtype, base, backend):
    logits, drawn_by, filters = rows(len(PARAMS), dtype), noise(PARAMS), columns(PARAMS)
    options: dict[str, Any] = {"vocab_size": V, "top_p_base": base, "backend": backend}
    tokens, law = with_sampler(PARAMS, logits, drawn_by["positions"], base)
    assert same(sample(logits, **filters, **drawn_by, **options), tokens)
    assert torch.equal(probs(logits, **filters, **options), law)


@pytest.mark.parametrize("name", REQUESTS)
def test_numbers_choose_the_mode_of_a_sampler_and_draw_its_tokens(name):
    params = [REQUESTS[name]] * 9
    logits, drawn_by = rows(9), noise(PARAMS[:9])
    seeded = [SamplingParams(*(getattr(REQUESTS[name], field) for field in NAMES), seed=p.seed) for p in PARAMS[:9]]
    numbers = {field: getattr(params[0], field) for field in NAMES}
    tokens, law = with_sampler(seeded, logits, drawn_by["positions"])
    assert mode_of(None, tuple(numbers.values()), V, "top_k").name == name
    for mode in (None, name, "full"):
        options: dict[str, Any] = {"mode": mode, "vocab_size": V, "backend": "eager"}
        assert same(sample(logits, **numbers, **drawn_by, **options), tokens)
        assert same(sample(logits, **columns(params), **drawn_by, **options), tokens)
        assert torch.equal(probs(logits, **numbers, **options), law)


def test_numbers_of_numpy_and_float32_mean_the_value_that_they_hold():
    logits, drawn_by = rows(4), noise(PARAMS[:4])
    stored = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.03}
    held = {name: float(np.float32(value)) for name, value in stored.items()}
    seeded = [SamplingParams(**held, top_k=7, seed=p.seed) for p in PARAMS[:4]]
    wanted, _ = with_sampler(seeded, logits, drawn_by["positions"])
    as_numpy = {name: np.float32(value) for name, value in stored.items()}
    as_rows = {name: torch.full((4,), value) for name, value in stored.items()}
    options: dict[str, Any] = {"vocab_size": V, "backend": "eager"}
    assert same(sample(logits, **as_numpy, top_k=np.int32(7), **drawn_by, **options), wanted)
    narrow = {"top_k": torch.full((4,), 7, dtype=torch.int32), "seeds": drawn_by["seeds"]}
    assert same(sample(logits, **as_rows, **narrow, positions=drawn_by["positions"], **options), wanted)
    laws = [probs(torch.zeros(1, 10), top_p=p, backend="eager") for p in (0.3, np.float32(0.3), torch.tensor([0.3]))]
    assert [law.count_nonzero().item() for law in laws] == [3, 4, 4]


def test_positions_may_be_of_32_bits_or_one_number():
    logits, seeds = rows(5), noise(PARAMS[:5])["seeds"]
    options: dict[str, Any] = {"seeds": seeds, "backend": "eager"}
    wanted = sample(logits, positions=torch.full((5,), 9), **options)
    assert same(sample(logits, positions=9, **options), wanted)
    assert same(sample(logits, positions=torch.full((5,), 9, dtype=torch.int32), **options), wanted)


@pytest.mark.parametrize("seed", [-1, 2**64 - 1, np.int64(-1)])
def test_a_number_seeds_a_single_row(seed):
    logits = rows(1)
    wanted = sample(logits, seeds=torch.tensor([-1]), positions=3, backend="eager")
    assert same(sample(logits, seeds=seed, positions=3, backend="eager"), wanted)


def test_a_row_out_of_range_draws_nothing_and_the_others_their_tokens():
    logits, drawn_by, filters = rows(9), noise(PARAMS[:9]), columns(PARAMS[:9])
    options: dict[str, Any] = {"vocab_size": V, "backend": "eager"}
    wanted, law = sample(logits, **filters, **drawn_by, **options), probs(logits, **filters, **options)
    filters["temperature"][0], filters["top_p"][4], filters["min_p"][5] = math.nan, 0.0, 1.5
    filters["top_k"][6], drawn_by["positions"][8] = -1, -1
    made, wrong = sample(logits, **filters, **drawn_by, **options), [0, 4, 5, 6, 8]
    assert made.token_ids[wrong].tolist() == [-1] * 5
    assert made.status[wrong].tolist() == [RowStatus.PARAMETER_OUT_OF_RANGE] * 5
    right = [1, 2, 3, 7]
    assert same(*(SampleOutputs(*(each[right] for each in tensors_of(out))) for out in (made, wanted)))
    made_law = probs(logits, **filters, **options)
    assert not made_law[wrong[:4]].any()
    assert torch.equal(made_law[[*right, 8]], law[[*right, 8]])


def test_a_row_that_the_named_mode_does_not_cover_draws_nothing():
    filters = {"top_p": torch.tensor([1.0, 0.9]), "temperature": 1.0}
    options: dict[str, Any] = {**noise(PARAMS[:2]), "backend": "eager"}
    made = sample(rows(2), **filters, mode="no_filter", **options)
    assert made.token_ids[0] >= 0
    assert (made.token_ids[1], made.status[1]) == (-1, RowStatus.NOT_COVERED)
    filters["top_p"][1] = 0.0
    assert sample(rows(2), **filters, mode="no_filter", **options).status[1] == RowStatus.PARAMETER_OUT_OF_RANGE


def test_no_rows_give_no_tokens():
    none = torch.empty(0, dtype=torch.int64)
    out = sample(torch.empty(0, V), seeds=none, positions=none)
    assert (out.token_ids.shape, out.token_ids.dtype, out.status.dtype) == ((0,), torch.int64, torch.int32)
    assert probs(torch.empty(0, V)).shape == (0, V)


def test_results_have_no_history_of_gradients():
    logits = rows(3).requires_grad_()
    assert not probs(logits, temperature=torch.ones(3, requires_grad=True), backend="eager").requires_grad


VALUES: tuple[tuple[float, ...], ...] = ((0.0, 0.8), (0, 1, 2, 64, 65, 127, 128, 200), (0.5, 1.0), (0.0, 0.1))
NUMBERS = [*itertools.product(*((None, *values) for values in VALUES))]


@pytest.mark.parametrize("vocab_size", [1, 2, 40, 64, 128])
def test_the_cheapest_mode_that_covers_every_row_that_there_can_be(vocab_size):
    table = mode_table(vocab_size, "top_k")
    for filters in NUMBERS:
        held = [values if given is None else (given,) for given, values in zip(filters, VALUES, strict=True)]
        requests = [SamplingParams(heat, int(k), p, least, seed=0) for heat, k, p, least in itertools.product(*held)]
        wanted = next(mode for mode in table if not any(uncovered(mode, params) for params in requests))
        assert mode_of(None, filters, vocab_size, "top_k") == wanted
