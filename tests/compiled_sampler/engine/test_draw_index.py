"""Several draws of one position: each has noise of its own, the same on every path, and index 0 is today's draw."""

import runpy
from pathlib import Path

import pytest
import torch

from compiled_sampler import Sampler, SamplingParams, functional
from tests.builders.sampler import V, holding, same

R = 6
PARAMS = [
    SamplingParams(seed=i, **own) for i, own in enumerate([{"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.01}, {}] * 2)
]
LOGITS, POSITIONS = torch.randn(R, V, generator=torch.Generator().manual_seed(3)), torch.arange(R) + 5


def sampler_on(backend: str) -> Sampler:
    made = Sampler(V, 8, backend="eager" if backend == "graph" else backend, history_len=16)
    return holding(made, backend, PARAMS)


@pytest.fixture(scope="module")
def reference() -> Sampler:
    return sampler_on("reference")


@pytest.mark.parametrize("backend", ["eager", "compiled", "graph"])
def test_every_backend_draws_the_tokens_of_the_definition(reference, backend):
    sampler, indices = sampler_on(backend), torch.tensor([0, 1, 2, 31, 0, 2**24 - 1])
    plan, wanted = sampler.plan(range(R), "full"), reference.plan(range(R), "full")
    by_row = reference.sample(wanted, LOGITS, POSITIONS, draw_index=indices)
    for given in (indices, indices.to(torch.int32)):
        assert same(sampler.sample(plan, LOGITS, POSITIONS, draw_index=given), by_row)
    for row, index in enumerate(indices.tolist()):
        alone = sampler.sample(plan, LOGITS, POSITIONS, draw_index=index)
        assert alone.token_ids[row] == by_row.token_ids[row]
    usual = sampler.sample(plan, LOGITS, POSITIONS)
    assert same(sampler.sample(plan, LOGITS, POSITIONS, draw_index=0), usual)
    assert same(sampler.sample(plan, LOGITS, POSITIONS, draw_index=torch.zeros(R, dtype=torch.int64)), usual)


def test_functions_draw_what_a_sampler_draws(reference):
    flat, positions = torch.zeros(R, V), torch.arange(R)
    seeds = torch.arange(R)
    sampler = Sampler(V, R, backend="eager")
    plan = sampler.plan([sampler.add_request(SamplingParams(seed=i)) for i in range(R)])
    for index in (0, 3, 100, torch.arange(R)):
        drawn = functional.sample(flat, seeds=seeds, positions=positions, draw_index=index, backend="eager")
        assert same(drawn, sampler.sample(plan, flat, positions, draw_index=index))


def test_draws_of_one_position_are_as_independent_as_those_of_two():
    """A pair of draws is equal in 1 of 64: of 20,000 pairs 312.5, deviation 17.5; 5 of them are a false alarm in 10**6.

    The control, one index twice, is equal in all.
    """
    rows = 20_000
    logits, seeds = torch.zeros(rows, 64), torch.arange(rows)
    first, second, again = (
        functional.sample(logits, seeds=seeds, positions=0, draw_index=i, backend="eager").token_ids for i in (1, 2, 1)
    )
    assert abs(int((first == second).sum()) - 312.5) < 5 * 17.5
    assert int((first == again).sum()) == rows


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (-1, ValueError, r"draw_index must be in \[0, 2\*\*24\), got -1"),
        (2**24, ValueError, "counts draws of one position"),
        (True, TypeError, "draw_index must be an int, got True"),
        (1.0, TypeError, "draw_index must be an int, got 1.0"),
        (torch.zeros(R - 1, dtype=torch.int64), ValueError, r"draw_index must be \[6\]"),
        (torch.zeros(R), TypeError, "draw_index must be"),
    ],
    ids=repr,
)
def test_a_wrong_index_is_refused_and_the_sampler_works_afterwards(index, error, message):
    sampler = sampler_on("eager")
    plan = sampler.plan(range(R))
    with pytest.raises(error, match=message):
        sampler.sample(plan, LOGITS, POSITIONS, draw_index=index)
    with pytest.raises(error, match="draw_index must be"):
        functional.sample(LOGITS, seeds=torch.arange(R), positions=POSITIONS, draw_index=index, backend="eager")
    assert sampler.sample(plan, LOGITS, POSITIONS).status.tolist() == [0] * R


def test_a_history_of_one_token_a_position_refuses_further_draws():
    sampler = Sampler(V, 2, backend="eager", history_len=8)
    plan = sampler.plan([sampler.add_request(SamplingParams(seed=1, presence_penalty=1.0))])
    with pytest.raises(ValueError, match="draw_index must be 0 for requests with"):
        sampler.sample(plan, LOGITS[:1], POSITIONS[:1], draw_index=1)
    assert sampler.sample(plan, LOGITS[:1], POSITIONS[:1]).status.tolist() == [0]


@pytest.mark.gpu
def test_the_example_captures_a_position_whole(capsys):
    runpy.run_path(str(Path(__file__).parents[3] / "examples" / "codebooks.py"), run_name="__main__")
    assert "the same codes on every path" in capsys.readouterr().out
