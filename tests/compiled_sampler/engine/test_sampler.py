"""What an engine sees of a sampler: one token on every backend, results that stay, several draws of a position."""

import copy
import itertools
import pickle
import runpy
from pathlib import Path

import pytest
import torch

from compiled_sampler import RowStatus, SampleOutputs, Sampler, SamplingParams, functional
from compiled_sampler.batch import tensors_of
from compiled_sampler.modes import uncovered
from tests.builders.sampler import (
    REQUESTS,
    V,
    drawn,
    held,
    holding,
    new_outputs,
    normal_rows,
    planned,
    same,
    shared_sampler,
)
from tests.oracles import oracle
from tests.tiers import tiers

PARAMS = list(REQUESTS.values())
BACKENDS = ("eager", "compiled", "graph")
LAYOUTS = [(1, torch.float32), (2, torch.float16), (127, torch.bfloat16), (V, torch.float32)]
"""Vocabularies below, at and above a block, each with a dtype."""


@pytest.mark.parametrize("base", ["top_k", "all"])
def test_tokens_are_the_oracles(base):
    params = [SamplingParams(temperature=0.7, top_k=12, top_p=0.6, min_p=0.02, seed=seed) for seed in range(60)]
    logits = normal_rows(60, 40)
    out = drawn(Sampler(40, 60, backend="eager", top_p_base=base), params, logits, torch.arange(60) * 10**9)
    for row, (seed, token) in enumerate(zip(range(60), out.token_ids.tolist(), strict=True)):
        options = {"temperature": 0.7, "top_k": 12, "top_p": 0.6, "min_p": 0.02, "top_p_base": base}
        assert token == oracle.draw(logits[row].tolist(), seed=seed, position=row * 10**9, **options)


@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e30])
def test_plus_infinity_wins_at_any_temperature_in_every_mode(temperature):
    sampler, logits = Sampler(4, 8, backend="eager"), torch.tensor([[0.0, torch.inf, 1.0, torch.inf]]).expand(8, 4)
    for filters in ({}, {"min_p": 0.5}, {"top_k": 2}, {"top_p": 0.9}):
        params = [SamplingParams(temperature=temperature, seed=seed, **filters) for seed in range(8)]
        modes = [mode.name for mode in sampler.modes if uncovered(mode, params[0]) is None]
        results = [drawn(sampler, params, logits, mode=mode) for mode in modes]
        assert all(same(each, results[0]) for each in results)
        assert set(results[0].token_ids.tolist()) <= {1, 3}
        assert results[0].status.tolist() == [RowStatus.POSITIVE_INFINITY] * 8


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(V, 8, backend="eager")


def cycled(count: int) -> list[SamplingParams]:
    return [params for params, _ in zip(itertools.cycle(PARAMS), range(count), strict=False)]


@pytest.mark.parametrize("work", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_sampler_is_not_copied(sampler, work):
    for original in (sampler, sampler.plan([-1])) if work is not copy.copy else (sampler,):
        with pytest.raises(TypeError, match=r"a Sampler must not be copied or pickled.*; share it, or make another"):
            work(original)


@pytest.mark.parametrize("rows", tiers([1, 33], [1, 2, 3, 7, 33]))
@pytest.mark.parametrize(("vocab_size", "dtype"), tiers(LAYOUTS[-1:], LAYOUTS))
def test_backends_draw_the_same_tokens(vocab_size, dtype, rows):
    logits = normal_rows(rows, vocab_size).to(dtype)
    wanted = drawn(shared_sampler(vocab_size, dtype, "eager"), cycled(rows), logits)
    mode = None if vocab_size == V else "full"  # compiling each mode of each vocabulary would take minutes
    assert same(drawn(shared_sampler(vocab_size, dtype, "compiled"), cycled(rows), logits, mode=mode), wanted)
    assert (wanted.token_ids >= 0).all()
    assert (wanted.token_ids < vocab_size).all()
    assert (wanted.status == 0).all()


@pytest.mark.parametrize(("name", "rows"), [("greedy", 1), ("no_filter", 7)])
def test_the_graph_backend_without_cuda_calls_its_stages(name, rows):
    graph, logits = shared_sampler(V, backend="graph"), normal_rows(rows)
    before = graph.statistics()
    wanted = drawn(shared_sampler(V, backend="eager"), [REQUESTS[name]] * rows, logits)
    assert same(drawn(graph, [REQUESTS[name]] * rows, logits), wanted)
    after = graph.statistics()
    assert (after.direct_runs, after.replays) == (before.direct_runs + 1, 0)
    request = f"{name} rows={rows} -> direct"
    assert after.coverage[request] == before.coverage.get(request, 0) + 1
    assert (after.variants, after.captures, after.fallbacks, after.buffer_bytes) == (0, 0, {}, 0)


def test_a_backend_is_chosen_for_the_device():
    assert Sampler(V, 1).backend == "compiled"
    assert [Sampler(V, 1, backend=backend).backend for backend in BACKENDS] == list(BACKENDS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_batch_gives_empty_results(backend):
    sampler = Sampler(V, 2, backend=backend)
    inputs = sampler.plan([]), torch.empty(0, V), torch.empty(0, dtype=torch.int64)
    assert same(sampler.sample(*inputs), new_outputs(0))
    out = new_outputs(0)
    assert sampler.sample(*inputs, out=out) is out


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_is_filled_and_returned(backend):
    sampler = shared_sampler(V, backend=backend)
    with held(sampler, [PARAMS[1]] * 7) as slots:
        plan, out = sampler.plan(slots), new_outputs(9)
        wanted = sampler.sample(plan, normal_rows(7), torch.arange(7))
        part = SampleOutputs(*(each[1:8] for each in tensors_of(out)))
        assert sampler.sample(plan, normal_rows(7), torch.arange(7), out=part) is part
    assert same(part, wanted)
    assert [each[[0, 8]].tolist() for each in tensors_of(out)] == [[-7, -7], [-7, -7]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_never_overwritten(backend):
    sampler, results = shared_sampler(V, backend=backend), []
    for seed in range(4):
        logits = normal_rows(7, seed=seed)
        before = logits.clone()
        out = drawn(sampler, [PARAMS[1]] * 7, logits)
        assert torch.equal(logits, before)
        results.append((out, SampleOutputs(*(each.clone() for each in tensors_of(out)))))
    assert all(same(out, copy) for out, copy in results)
    assert not same(results[0][0], results[1][0])


@pytest.mark.parametrize(("seed", "equal"), [(-1, 2**64 - 1), (-(2**63), 2**63), (-5, 2**64 - 5)])
def test_seeds_count_modulo_two_to_the_64(sampler, seed, equal):
    logits = normal_rows(1).expand(40, V)
    seeds = (seed, equal, equal ^ 1, equal ^ 2**63)
    slots = [sampler.add_request(SamplingParams(temperature=2.0, seed=each)) for each in seeds]
    out = [sampler.sample(sampler.plan([slot] * 40), logits, torch.arange(40)).token_ids for slot in slots]
    assert torch.equal(out[0], out[1])
    assert not torch.equal(out[0], out[2])
    assert not torch.equal(out[0], out[3])
    assert sampler.request(slots[0]).seed == seed


@pytest.mark.parametrize("params", [None, {"temperature": 1.0}, 1.0, SamplingParams])
def test_only_sampling_params_are_held(sampler, params):
    with pytest.raises(TypeError, match=r"params must be SamplingParams, got \w+; SamplingParams\(\*\*options\)"):
        sampler.add_request(params)
    assert sampler.add_request(PARAMS[0]) == 0


# Several draws of one position.


R = 6
VARIED = [
    SamplingParams(seed=i, **own) for i, own in enumerate([{"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.01}, {}] * 2)
]
LOGITS, POSITIONS = normal_rows(R), torch.arange(R) + 5


def sampler_on(backend: str) -> Sampler:
    made = Sampler(V, 8, backend="eager" if backend == "graph" else backend, history_len=16)
    return holding(made, backend, VARIED)


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
    flat, positions, seeds = torch.zeros(R, V), torch.arange(R), torch.arange(R)
    sampler, plan = planned(*(SamplingParams(seed=i) for i in range(R)))
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
    sampler, plan = planned(SamplingParams(seed=1, presence_penalty=1.0), history_len=8)
    with pytest.raises(ValueError, match="draw_index must be 0 for requests with"):
        sampler.sample(plan, LOGITS[:1], POSITIONS[:1], draw_index=1)
    assert sampler.sample(plan, LOGITS[:1], POSITIONS[:1]).status.tolist() == [0]


@pytest.mark.gpu
def test_the_example_captures_a_position_whole(capsys):
    runpy.run_path(str(Path(__file__).parents[3] / "examples" / "codebooks.py"), run_name="__main__")
    assert "the same codes on every path" in capsys.readouterr().out
