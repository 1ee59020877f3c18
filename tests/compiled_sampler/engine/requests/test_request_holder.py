"""Requests between steps: free slots, modes, and seeds from a generator."""

import pytest
import torch

from compiled_sampler import Mode, Sampler, SamplingParams
from tests.builders.sampler import REQUESTS

V = 1000


@pytest.fixture
def sampler() -> Sampler:
    """Eager, with four free slots."""
    return Sampler(V, 4, backend="eager")


def seeds_of(sampler: Sampler, count: int = 4) -> list[int | None]:
    """The seeds of requests that name none; the requests are gone afterwards."""
    slots = [sampler.add_request(SamplingParams()) for _ in range(count)]
    seeds = [sampler.request(slot).seed for slot in slots]
    for slot in slots:
        sampler.remove_request(slot)
    return seeds


def test_free_slots_are_counted(sampler):
    slots = [sampler.add_request(params) for params in list(REQUESTS.values())[:3]]
    assert sampler.num_free_slots == 1
    sampler.remove_request(slots[0])
    assert (sampler.num_free_slots, sampler.max_num_requests) == (2, 4)


@pytest.mark.parametrize(
    "names", [(), *((name,) for name in REQUESTS), ("greedy", "min_p"), ("top_k", "top_k_top_p[64]", "min_p")]
)
def test_the_mode_of_requests_is_that_of_their_plan(sampler, names):
    params = [REQUESTS[name] for name in names]
    mode = sampler.mode_for(params[0] if len(params) == 1 else iter(params))
    assert isinstance(mode, Mode)
    assert mode is sampler.plan([sampler.add_request(each) for each in params]).mode


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (None, "params must be SamplingParams or a sequence of them, got NoneType; SamplingParams(**options)"),
        ({"top_k": 5}, "params must be SamplingParams or a sequence of them, got dict; SamplingParams(**options)"),
        ("greedy", "params must be SamplingParams or a sequence of them, got str; SamplingParams(**options)"),
        ([SamplingParams(), 3], "params of request 1 must be SamplingParams, got int; SamplingParams(**options)"),
    ],
)
def test_a_mode_is_asked_for_with_parameters_alone(sampler, params, words):
    with pytest.raises(TypeError) as caught:
        sampler.mode_for(params)
    assert words in str(caught.value)


def test_samplers_with_equal_generators_draw_equal_seeds():
    first, second = (
        Sampler(V, 4, backend="eager", default_generator=torch.Generator().manual_seed(7)) for _ in range(2)
    )
    seeds = seeds_of(first)
    assert seeds == seeds_of(second)
    assert len(set(seeds + seeds_of(first))) == 8


def test_the_default_generator_of_torch_follows_manual_seed():
    sampler, seeds = Sampler(V, 4, backend="eager", default_generator=torch.default_generator), []
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            seeds.append(seeds_of(sampler))
    assert seeds[0] == seeds[2] != seeds[1]


def test_seeds_of_a_generator_cover_64_bits_and_give_the_stream_that_they_name():
    sampler = Sampler(V, 400, backend="eager", default_generator=torch.Generator().manual_seed(0))
    seeds = seeds_of(sampler, 400)
    assert all(0 <= seed < 2**64 for seed in seeds)
    for bit in range(64):
        assert 140 < sum(seed >> bit & 1 for seed in seeds) < 260  # six standard deviations
    slot = sampler.add_request(SamplingParams())
    again = sampler.add_request(SamplingParams(seed=sampler.request(slot).seed))
    tokens = [sampler.sample(sampler.plan([each] * 30), torch.zeros(30, V), torch.arange(30)) for each in (slot, again)]
    assert tokens[0].tolist() == tokens[1].tolist()


def test_a_seed_is_drawn_for_a_request_that_needs_one_and_gets_a_slot():
    generator = torch.Generator().manual_seed(7)
    sampler = Sampler(V, 2, backend="eager", default_generator=generator)
    state = generator.get_state()
    sampler.mode_for(SamplingParams())
    assert [sampler.request(sampler.add_request(SamplingParams(seed=seed))).seed for seed in (0, -3)] == [0, -3]
    with pytest.raises(RuntimeError, match=r"all 2 slots are taken; remove_request\(\) one, .* larger max_num"):
        sampler.add_request(SamplingParams())
    assert torch.equal(generator.get_state(), state)


def test_seeds_are_drawn_under_any_default_device_and_in_inference_mode():
    wanted = seeds_of(Sampler(V, 4, backend="eager", default_generator=torch.Generator().manual_seed(7)))
    with torch.device("meta"), torch.inference_mode():
        generator = torch.Generator("cpu").manual_seed(7)
        assert seeds_of(Sampler(V, 4, backend="eager", default_generator=generator)) == wanted


def test_a_sampler_prints_what_it_was_made_of():
    sampler = Sampler(V, 4, logits_dtype=torch.bfloat16, backend="eager", top_p_base="all")
    sampler.add_request(SamplingParams())
    assert repr(sampler) == (
        "Sampler(vocab_size=1000, max_num_requests=4, device='cpu', logits_dtype=torch.bfloat16, backend='eager', "
        "top_p_base='all', num_free_slots=3)"
    )
