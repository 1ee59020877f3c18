"""Requests between steps: their slots, what a slot says of them, modes, and seeds from a generator."""

import math
import random
import re

import pytest
import torch

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.engine.boundary.arguments import FEW
from compiled_sampler.engine.requests.slots import SlotState, slot_values
from compiled_sampler.modes import mode_table
from graph_cache import PinnedRing
from tests.builders.sampler import REQUESTS, held, sampler_with

V = 1000
MODES = mode_table(V, "top_k")


def new_state(num_slots: int = 4) -> SlotState:
    return SlotState(num_slots, MODES, torch.device("cpu"))


def entry(state: SlotState, slot: int) -> tuple[float | int, ...]:
    """Without what the request needs."""
    state.upload()
    return tuple(column[slot].item() for column in state.table[:-2])


def as_stored(params: SamplingParams) -> tuple[float | int, ...]:
    """``slot_values`` after the rounding of the table's columns."""
    values = zip(slot_values(params, V), new_state().table[:-2], strict=True)
    return tuple(torch.tensor(value, dtype=column.dtype).item() for value, column in values)


@pytest.mark.parametrize(
    ("params", "values"),
    [
        (SamplingParams(seed=5), (5, math.log2(math.e), True, V, 1.0, -math.inf)),
        (SamplingParams(temperature=0.5, seed=5), (5, 2.0 * math.log2(math.e), True, V, 1.0, -math.inf)),
        (SamplingParams(temperature=0.0, top_k=9, top_p=0.5, min_p=0.1, seed=5), (5, 1.0, False, 1, 1.0, -math.inf)),
        (SamplingParams(top_k=1, min_p=0.1, seed=5), (5, 1.0, False, 1, 1.0, -math.inf)),
        (SamplingParams(top_k=V - 1, seed=5), (5, math.log2(math.e), True, V - 1, 1.0, -math.inf)),
        (SamplingParams(top_k=V, seed=5), (5, math.log2(math.e), True, V, 1.0, -math.inf)),
        (SamplingParams(top_k=2**70, seed=5), (5, math.log2(math.e), True, V, 1.0, -math.inf)),
        (SamplingParams(top_p=0.1, min_p=0.125, seed=5), (5, math.log2(math.e), True, V, 0.1, -3.0)),
        (SamplingParams(top_p=5e-324, seed=5), (5, math.log2(math.e), True, V, 5e-324, -math.inf)),
    ],
)
def test_parameters_become_the_units_of_the_stages(params, values):
    seed, scale, noise, *filters = slot_values(params, V)
    assert (seed, scale, bool(noise), *filters) == values
    state = new_state()
    stored = entry(state, state.add(params))
    assert stored == as_stored(params)
    assert stored[4] == filters[1]  # top_p keeps every bit


def test_a_table_made_under_inference_mode_is_written_outside_of_it():
    with torch.inference_mode():
        state = new_state(2)
        slot = state.add(REQUESTS["min_p"])
    assert entry(state, slot) == entry(state, state.add(REQUESTS["min_p"]))


def test_where_an_upload_fails_a_later_one_brings_everything(monkeypatch):
    state = new_state(2)
    slots = [state.add(REQUESTS["full"]), state.add(REQUESTS["min_p"])]
    with monkeypatch.context() as patched:
        patched.setattr(PinnedRing, "send", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            state.upload()
    assert state.is_pending
    assert [entry(state, slot) for slot in slots] == [as_stored(REQUESTS["full"]), as_stored(REQUESTS["min_p"])]
    assert not state.is_pending


@pytest.mark.parametrize("slot", [-1, 1, 2, 3, -3])
def test_a_slot_without_a_request_is_refused(slot):
    state = new_state(3)
    kept, gone = state.add(SamplingParams(seed=1)), state.add(SamplingParams())
    state.remove(gone)
    for call in (state.request, state.remove):
        with pytest.raises(ValueError, match=rf"slot must come from add_request\(\) and not be removed, got {slot}"):
            call(slot)
    assert state.request(kept).seed == 1
    assert state.add(SamplingParams()) == gone


@pytest.mark.parametrize("part", ["staged.write", "_edits.add", "_edits.custom.states.begin"])
def test_a_request_that_cannot_be_added_leaves_its_slot_free(part, monkeypatch):
    """Wherever it fails, here in the part that is named: the next one gets the slot, and nothing of the first."""
    sampler = Sampler(V, 2, backend="eager")
    holder = sampler._requests
    *path, name = part.split(".")
    for each in path:
        holder = getattr(holder, each)
    usual = getattr(holder, name)

    def failing(*given):
        usual(*given)
        raise MemoryError

    greedy, biased = SamplingParams(temperature=0.0), SamplingParams(seed=1, logit_bias={3: 9.0})
    with monkeypatch.context() as patches:
        patches.setattr(holder, name, failing)
        with pytest.raises(MemoryError):
            sampler.add_request(biased)
    assert sampler.num_free_slots == 2
    with pytest.raises(ValueError, match="must come from add_request"):
        sampler.plan([0])
    slots = [sampler.add_request(greedy) for _ in range(2)]
    assert sorted(slots) == [0, 1]
    plan = sampler.plan(slots)
    assert plan.edits == ()
    logits = torch.eye(V)[[5, 7]]
    assert sampler.sample(plan, logits, torch.tensor([0, 0])).tolist() == [5, 7]


def test_what_a_batch_needs_is_that_of_its_requests_however_they_are_mixed():
    """Requests alike and not, in few rows and many, before and behind padding, and in slots that others had before."""
    sampler, source = Sampler(V, 6, backend="eager"), random.Random(3)
    kinds = [{"temperature": 0.0}, {}, {"min_p": 0.1}, {"top_k": 5}, {"top_p": 0.5}, {"logit_bias": {1: 1.0}}]
    held: dict[int, SamplingParams] = {}
    for turn in range(300):
        if len(held) == 6 or (held and source.random() < 0.4):
            slot = source.choice([*held])
            sampler.remove_request(slot)
            del held[slot]
        else:
            params = SamplingParams(seed=turn, **source.choice(kinds))
            held[sampler.add_request(params)] = params
        slots = [source.choice([*held, -1]) for _ in range(source.choice([0, 1, 2, 4, FEW, FEW + 1, 3 * FEW]))]
        if source.random() < 0.4 and held:
            slots = [source.choice([*held])] * 2
        plan = sampler.plan(slots)
        wanted = [held[slot] for slot in slots if slot >= 0]
        assert plan.mode is sampler.mode_for(wanted[0] if len(wanted) == 1 else iter(wanted))
        assert plan.edits == (("logit_bias",) if any(each.edits for each in wanted) else ())


def test_steps_that_differ_in_what_comes_with_a_call_read_one_table():
    """A plan makes the tables that its steps read before a capture, which may bring a mask or consume logits."""
    state, name = new_state(), MODES[0].name
    planned = state.table_for(name, ("penalties",))
    assert planned.unserved.tolist() != state.table_for(name, ()).unserved.tolist()
    for of_call in (("token_bitmask",), ("consume_logits", "token_bitmask"), ("restore_logits",)):
        assert state.table_for(name, (*of_call, "penalties")) is planned


# Modes and seeds.


def seeded_by(generator: torch.Generator, slots: int = 4) -> Sampler:
    return Sampler(V, slots, backend="eager", default_generator=generator)


def seeds_of(sampler: Sampler, count: int = 4) -> list[int | None]:
    """The seeds of requests that name none; the requests are gone afterwards."""
    with held(sampler, [SamplingParams()] * count) as slots:
        return [sampler.request(slot).seed for slot in slots]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"top_k": 5}, "params must be SamplingParams or a sequence of them, got dict; SamplingParams(**options)"),
        ("greedy", "params must be SamplingParams or a sequence of them, got str; SamplingParams(**options)"),
        ([SamplingParams(), 3], "params of request 1 must be SamplingParams, got int; SamplingParams(**options)"),
    ],
)
def test_a_mode_is_asked_for_with_parameters_alone(params, words):
    sampler = Sampler(V, 4, backend="eager")
    with pytest.raises(TypeError, match=re.escape(words)):
        sampler.mode_for(params)


def test_samplers_with_equal_generators_draw_equal_seeds_under_any_default_device_and_in_inference_mode():
    first, second = (seeded_by(torch.Generator().manual_seed(7)) for _ in range(2))
    seeds = seeds_of(first)
    with torch.device("meta"), torch.inference_mode():
        assert seeds == seeds_of(second) == seeds_of(seeded_by(torch.Generator("cpu").manual_seed(7)))
    assert len(set(seeds + seeds_of(first))) == 8


def test_the_default_generator_of_torch_follows_manual_seed():
    sampler, seeds = seeded_by(torch.default_generator), []
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            seeds.append(seeds_of(sampler))
    assert seeds[0] == seeds[2] != seeds[1]


def test_seeds_of_a_generator_cover_64_bits_and_give_the_stream_that_they_name():
    sampler = seeded_by(torch.Generator().manual_seed(0), 400)
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
    sampler = seeded_by(generator, 2)
    state = generator.get_state()
    sampler.mode_for(SamplingParams())
    assert [sampler.request(sampler.add_request(SamplingParams(seed=seed))).seed for seed in (0, -3)] == [0, -3]
    with pytest.raises(RuntimeError, match=r"all 2 slots are taken; remove_request\(\) one, .* larger max_num"):
        sampler.add_request(SamplingParams())
    assert torch.equal(generator.get_state(), state)


def test_a_sampler_counts_free_slots_and_prints_what_it_was_made_of():
    sampler = sampler_with([SamplingParams()] * 3, V, 4, logits_dtype=torch.bfloat16, top_p_base="all")
    assert (sampler.num_free_slots, sampler.max_num_requests) == (1, 4)
    sampler.remove_request(2)
    sampler.remove_request(0)
    assert repr(sampler) == (
        "Sampler(vocab_size=1000, max_num_requests=4, device='cpu', logits_dtype=torch.bfloat16, backend='eager', "
        "top_p_base='all', num_free_slots=3)"
    )
