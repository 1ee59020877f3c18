"""Results of a ring: the tokens of any other step, there until the second next call, and no new memory for a replay."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler import Logprobs, SampleOutputs, Sampler, SamplingParams, Verification
from compiled_sampler.batch import tensors_of
from compiled_sampler.engine import calls
from compiled_sampler.engine.calls import RING_LEN
from tests.builders.sampler import replay_recordings, same

V, R, K = 300, 4, 2
PARAMS = [SamplingParams(seed=1, temperature=0.0), SamplingParams(seed=2, top_k=20), SamplingParams(seed=3)] * 2


def holding(backend: str) -> Sampler:
    ways = [Verification("match", K)]
    made = Sampler(V, 8, backend="eager", buckets=[2, R], verifications=ways, captured_logprobs=[Logprobs(top=2)])
    if backend == "graph":
        replay_recordings(made)
        made.warmup(modes=["full"])
    for params in PARAMS:
        made.add_request(params)
    return made


@pytest.fixture(params=["eager", "graph"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return holding(request.param)


@pytest.fixture(scope="module")
def reference() -> Sampler:
    return holding("eager")


def kept(results: Any) -> list[Tensor]:
    return [each.clone() for each in tensors_of(results)]


def test_results_are_there_until_the_second_next_call(sampler, reference):
    logits, positions = torch.randn(R, V), torch.arange(R)
    plan, wanted = sampler.plan(range(R), "full"), reference.plan(range(R), "full")
    before: list[tuple[SampleOutputs, list[Tensor]]] = []
    for _ in range(8):
        logits.normal_()
        found = sampler.sample(plan, logits, positions, "ring")
        assert same(found, reference.sample(wanted, logits, positions))
        for earlier, held in before[-(RING_LEN - 1) :]:
            assert all(map(torch.equal, tensors_of(earlier), held))
        before.append((found, kept(found)))
    places = [each.token_ids.data_ptr() for each, _ in before]
    assert places == places[:RING_LEN] * (len(places) // RING_LEN)


def test_calls_of_one_form_share_a_ring_whatever_their_logits_and_modes(sampler, reference):
    buffers, positions = [torch.randn(R, V) for _ in range(3)], torch.arange(R)
    places = []
    for turn, (logits, mode) in zip(range(12), itertools.cycle(zip(buffers, ["full", None, "full"], strict=True))):
        slots = [(turn + n) % len(PARAMS) for n in range(R)]
        found = sampler.sample(sampler.plan(slots, mode), logits, positions, "ring")
        assert same(found, reference.sample(reference.plan(slots), logits, positions))
        places.append(found.token_ids.data_ptr())
    assert places == places[:RING_LEN] * (len(places) // RING_LEN)
    assert len(set(places)) == RING_LEN


def test_a_verification_takes_a_ring_too(sampler, reference):
    drafts, positions = torch.randint(0, V, (R, K)), torch.arange(R)
    before: list[tuple[Any, list[Tensor]]] = []
    for step in range(6):
        counts = [(step + n) % (K + 1) for n in range(R)]
        plans = [each.plan(range(R), "full", counts) for each in (sampler, reference)]
        logits = torch.randn(plans[0].num_rows, V)
        found = sampler.verify(plans[0], logits, drafts, positions, out="ring")
        assert same(found, reference.verify(plans[1], logits, drafts, positions))
        assert all(all(map(torch.equal, tensors_of(last), copy)) for last, copy in before[-1:])
        probs = torch.softmax(logits, -1)
        found = sampler.verify_from_probs(plans[0], probs, drafts, positions, out="ring")
        assert same(found, reference.verify_from_probs(plans[1], probs, drafts, positions))
        before.append((found, kept(found)))


def test_a_ring_has_the_fields_of_the_call(sampler, reference):
    logits, positions, asked = torch.randn(R, V), torch.arange(R), Logprobs(top=2)
    plans = [each.plan(range(R), "full") for each in (sampler, reference)]
    for logprobs in (asked, None, asked, asked):
        found = sampler.sample(plans[0], logits, positions, "ring", logprobs=logprobs)
        wanted = reference.sample(plans[1], logits, positions, logprobs=logprobs)
        assert (found.logprobs is None) == (logprobs is None)
        assert all(map(torch.equal, tensors_of(found), tensors_of(wanted)))


def test_an_empty_batch_takes_a_ring(sampler):
    for _ in range(3):
        assert sampler.sample(sampler.plan([]), torch.empty(0, V), torch.arange(0), "ring").tolist() == []


@pytest.mark.parametrize("made_under_inference", [True, False])
def test_a_ring_is_written_in_and_out_of_inference_mode(sampler, made_under_inference):
    logits, positions, plan = torch.randn(R, V), torch.arange(R), sampler.plan(range(R), "full")
    for inference in [made_under_inference, not made_under_inference] * RING_LEN:
        with torch.inference_mode(inference):
            sampler.sample(plan, logits, positions, "ring")


def test_a_ring_inside_a_capture_is_refused(sampler, monkeypatch):
    logits, positions, plan = torch.randn(R, V), torch.arange(R), sampler.plan(range(R), "full")
    wanted = sampler.sample(plan, logits, positions)
    with monkeypatch.context() as patched:
        patched.setattr(sampler, "_is_capturing", lambda: True)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out must not be 'ring' inside a capture"):
                sampler.sample(plan, logits, positions, "ring")
    assert same(sampler.sample(plan, logits, positions, "ring"), wanted)


@pytest.mark.parametrize("out", ["RING", b"ring"], ids=repr)
def test_other_words_are_refused(sampler, out):
    logits, positions, plan = torch.randn(R, V), torch.arange(R), sampler.plan(range(R), "full")
    sampler.sample(plan, logits, positions, "ring")
    for _ in range(2):
        with pytest.raises(TypeError, match="out must be SampleOutputs or 'ring', got"):
            sampler.sample(plan, logits, positions, out)


def test_an_argument_is_checked_with_a_ring_too(sampler):
    logits, positions, plan = torch.randn(R, V), torch.arange(R), sampler.plan(range(R), "full")
    sampler.sample(plan, logits, positions, "ring")
    with pytest.raises(ValueError, match="logits must"):
        sampler.sample(plan, logits[:2], positions, "ring")
    first = sampler.sample(plan, logits, positions, "ring")
    sampler.sample(plan, logits, positions, "ring")
    with pytest.raises(ValueError, match=r"out.token_ids must have memory of its own"):
        sampler.sample(plan, logits, first.token_ids, "ring")  # its turn to be overwritten


def test_a_call_that_fails_takes_no_turn(sampler):
    logits, positions, plan = torch.randn(R, V), torch.arange(R), sampler.plan(range(R), "full")
    first, last = (sampler.sample(plan, logits, positions, "ring") for _ in range(2))
    held = kept(last)
    for _ in range(3):
        with pytest.raises(ValueError, match=r"out.token_ids must have memory of its own"):
            sampler.sample(plan, logits, first.token_ids, "ring")
    found = sampler.sample(plan, logits + 1, positions + 7, "ring")
    assert found.token_ids.data_ptr() == first.token_ids.data_ptr()
    assert all(map(torch.equal, tensors_of(last), held))


def test_few_rings_are_kept():
    known = holding("eager")._calls
    for rows in range(1, 3 * calls._MOST_RINGS):
        form = calls.ResultForm(SampleOutputs, rows, 0, stops=False, logprobs=None)
        assert known._ring("ring", form, False) is known._ring("ring", form, False)
        assert len(known._rings) <= calls._MOST_RINGS
