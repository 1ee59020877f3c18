"""What an engine sees of a sampler: the same tokens on every backend, slots that come and go, results that stay."""

import copy
import itertools
import pickle

import pytest
import torch

from compiled_sampler import RowStatus, SampleOutputs, Sampler, SamplingParams
from compiled_sampler.batch import tensors_of
from compiled_sampler.modes import uncovered
from tests.builders.sampler import REQUESTS, V, drawn, held, new_outputs, same, shared_sampler
from tests.oracles import oracle
from tests.tiers import tiers

PARAMS = list(REQUESTS.values())
BACKENDS = ("eager", "compiled", "graph")
LAYOUTS = [(1, torch.float32), (2, torch.float16), (127, torch.bfloat16), (V, torch.float32)]
"""Vocabularies below, at and above a block, each with a dtype."""


@pytest.fixture
def sampler() -> Sampler:
    """Eager, with eight free slots."""
    return Sampler(V, 8, backend="eager")


def rows_of(count: int, vocab_size: int = V, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (3.0 * torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed))).to(dtype)


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
    logits = rows_of(rows, vocab_size, dtype)
    wanted = drawn(shared_sampler(vocab_size, dtype, "eager"), cycled(rows), logits)
    mode = None if vocab_size == V else "full"  # compiling each mode of each vocabulary would take minutes
    assert same(drawn(shared_sampler(vocab_size, dtype, "compiled"), cycled(rows), logits, mode=mode), wanted)
    assert (wanted.token_ids >= 0).all()
    assert (wanted.token_ids < vocab_size).all()
    assert (wanted.status == 0).all()


@pytest.mark.parametrize(("name", "rows"), [("greedy", 1), ("no_filter", 7)])
def test_the_graph_backend_without_cuda_calls_its_stages(name, rows):
    graph, logits = shared_sampler(V, backend="graph"), rows_of(rows)
    before = graph.statistics()
    wanted = drawn(shared_sampler(V, backend="eager"), [REQUESTS[name]] * rows, logits)
    assert same(drawn(graph, [REQUESTS[name]] * rows, logits), wanted)
    after = graph.statistics()
    assert (after.direct_runs, after.replays) == (before.direct_runs + 1, 0)
    request = f"{name} rows={rows} -> direct"
    assert after.coverage[request] == before.coverage.get(request, 0) + 1
    assert (after.variants, after.captures, after.fallbacks, after.buffer_bytes) == (0, 0, {}, 0)


@pytest.mark.parametrize("base", ["top_k", "all"])
def test_tokens_are_the_oracles(base):
    params = [SamplingParams(temperature=0.7, top_k=12, top_p=0.6, min_p=0.02, seed=seed) for seed in range(60)]
    logits = rows_of(60, 40)
    out = drawn(Sampler(40, 60, backend="eager", top_p_base=base), params, logits, torch.arange(60) * 10**9)
    for row, (seed, token) in enumerate(zip(range(60), out.token_ids.tolist(), strict=True)):
        options = {"temperature": 0.7, "top_k": 12, "top_p": 0.6, "min_p": 0.02, "top_p_base": base}
        assert token == oracle.draw(logits[row].tolist(), seed=seed, position=row * 10**9, **options)


def test_a_backend_is_chosen_for_the_device():
    assert Sampler(V, 1).backend == "compiled"
    assert [Sampler(V, 1, backend=backend).backend for backend in BACKENDS] == list(BACKENDS)


def test_a_slot_may_stand_in_several_rows(sampler):
    slots = [sampler.add_request(params) for params in PARAMS]
    logits, positions = rows_of(1).expand(6, V), torch.tensor([5, 5, 6, 7, 5, 6])
    out = sampler.sample(sampler.plan([slots[1]] * 5 + [slots[-1]]), logits, positions).token_ids
    alone = [sampler.sample(sampler.plan([slots[1]]), logits[:1], positions[i : i + 1]).token_ids for i in range(5)]
    assert torch.equal(out[:5], torch.cat(alone))
    assert out[0] == out[1] == out[4]
    assert len(set(out.tolist())) > 1


@pytest.mark.parametrize("backend", tiers(["eager"], ["compiled"]))
def test_padding_is_minus_one_whatever_its_logits(backend):
    sampler, poisons = shared_sampler(V, backend=backend), (0.0, torch.nan, torch.inf, -torch.inf, 3e38)
    for params in PARAMS:
        with held(sampler, [params]) as (slot,):
            wanted = sampler.sample(sampler.plan([slot] * 2), rows_of(2), torch.tensor([3, 4]))
            for poison in poisons:
                logits = torch.full((4, V), poison)
                logits[1::2] = rows_of(2)
                out = sampler.sample(sampler.plan([-1, slot, -1, slot]), logits, torch.tensor([9, 3, -5, 4]))
                assert out.token_ids[::2].tolist() == out.status[::2].tolist() == [-1, -1]
                assert same(SampleOutputs(*(each[1::2] for each in tensors_of(out))), wanted)


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
        wanted = sampler.sample(plan, rows_of(7), torch.arange(7))
        part = SampleOutputs(*(each[1:8] for each in tensors_of(out)))
        assert sampler.sample(plan, rows_of(7), torch.arange(7), out=part) is part
    assert same(part, wanted)
    assert [each[[0, 8]].tolist() for each in tensors_of(out)] == [[-7, -7], [-7, -7]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_never_overwritten(backend):
    sampler, results = shared_sampler(V, backend=backend), []
    for seed in range(4):
        logits = rows_of(7, seed=seed)
        before = logits.clone()
        out = drawn(sampler, [PARAMS[1]] * 7, logits)
        assert torch.equal(logits, before)
        results.append((out, SampleOutputs(*(each.clone() for each in tensors_of(out)))))
    assert all(same(out, copy) for out, copy in results)
    assert not same(results[0][0], results[1][0])


@pytest.mark.parametrize("stride", [V, V + 1, 2 * V, 0])
def test_any_row_stride_is_read(stride):
    memory = rows_of(1, 7 * 2 * V)[0]
    logits = memory.as_strided((7, V), (stride, 1), storage_offset=3)
    sampler = shared_sampler(V, backend="eager")
    assert same(
        drawn(sampler, cycled(7), logits),
        drawn(sampler, cycled(7), logits.clone(memory_format=torch.contiguous_format)),
    )


@pytest.mark.parametrize(("seed", "equal"), [(-1, 2**64 - 1), (-(2**63), 2**63), (-5, 2**64 - 5)])
def test_seeds_count_modulo_two_to_the_64(sampler, seed, equal):
    logits = rows_of(1).expand(40, V)
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
