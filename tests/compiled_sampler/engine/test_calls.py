"""Calls like one that was checked run without a check: the same tokens, whatever is new about them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compiled_sampler import SampleOutputs, Sampler, SamplingParams, Verification
from compiled_sampler.batch import tensors_of
from compiled_sampler.engine import calls
from compiled_sampler.logprobs import Logprobs
from compiled_sampler.lowering.inductor import versions
from graph_cache import PinnedRing
from tests.builders.sampler import REQUESTS, holding, new_outputs, same

V, R, K = 300, 4, 3
PARAMS = [*REQUESTS.values()][:R]


def sampler_of(backend: str, slots: int = R, probabilities: bool = False) -> Sampler:
    """Holds the requests; with the backend "graph" it replays recorded variants without a device."""
    ways = [Verification("rejection", 1)] if probabilities else []
    made = Sampler(V, slots, backend="eager", buckets=[1, 2, R], verifications=ways, probabilities=probabilities)
    return holding(made, backend, PARAMS, None)


@pytest.fixture(params=["eager", "graph"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return sampler_of(request.param)


@pytest.fixture
def reference() -> Sampler:
    return sampler_of("eager")


def test_what_was_asked_before_is_not_checked_again(sampler, monkeypatch):
    plan, logits, positions, out = sampler.plan([0, 1, 2, 3]), torch.randn(R, V), torch.arange(R), new_outputs(R)
    sampler.sample(plan, logits, positions, out)
    monkeypatch.setattr("compiled_sampler.engine.sampler.check_logits", lambda *_: 1 / 0)
    sampler.sample(plan, logits, positions, out)
    sampler.sample(sampler.plan([3, 2, 1, 0]), logits[:], positions.view(R), out)
    with pytest.raises(ZeroDivisionError):
        sampler.sample(plan, logits.clone(), positions, out)


@pytest.mark.parametrize("checked", [True, False], ids=["guards", "public functions"])
@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
def test_out_that_requires_grad_is_refused_where_torch_records_gradients(sampler, monkeypatch, checked, known):
    monkeypatch.setattr(versions, "was_checked", lambda: checked)
    plan, logits, positions, asked = sampler.plan([0, 1, 2, 3]), torch.randn(R, V), torch.arange(R), Logprobs()
    found = sampler.sample(plan, logits, positions, logprobs=asked)
    out = tree_map_only(Tensor, torch.clone, found)
    if known:
        sampler.sample(plan, logits, positions, out, logprobs=asked)
    out.logprobs.token.requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            assert sampler.sample(plan, logits, positions, out, logprobs=asked) is out
        with pytest.raises(ValueError, match=r"out\.logprobs\.token must not require grad while torch records"):
            sampler.sample(plan, logits, positions, out, logprobs=asked)


def test_variants_that_come_later_serve_known_calls(reference):
    sampler, logits, positions = sampler_of("graph"), torch.randn(R, V), torch.arange(R)

    def check() -> None:
        found = sampler.sample(sampler.plan([0, 1, 2, 3]), logits, positions)
        assert same(found, reference.sample(reference.plan([0, 1, 2, 3]), logits, positions))

    check()
    sampler.bind_logits(logits)
    sampler.warmup()
    check()
    assert "full[4] bound to logits" in "".join(sampler.statistics().coverage)
    sampler.bind_logits(None)
    logits.normal_()
    check()
    check()
    assert sampler.statistics().replays == 4


def test_few_calls_are_kept(reference, monkeypatch):
    monkeypatch.setattr(calls, "MOST_CALLS", 8)
    plan, positions, logits = reference.plan([0, 1, 2, 3]), torch.arange(R), [torch.randn(R, V) for _ in range(30)]
    for each in logits:
        reference.sample(plan, each, positions)
        assert 0 < sum(map(len, reference._calls._launches.values())) <= 8


def test_a_ring_of_results_says_what_took_its_place(reference):
    logits, positions, drafts = torch.randn(8, V), torch.arange(2), torch.zeros(2, 3, dtype=torch.int64)
    plan, counted = reference.plan([2, 1]), reference.plan([2, 1], num_drafts=[3, 3])
    with pytest.warns(DeprecationWarning, match=r"bind\(out=\) before warmup"):
        found = reference.sample(plan, logits[:2], positions, "ring")
    assert same(found, reference.sample(plan, logits[:2], positions))
    with pytest.warns(DeprecationWarning, match=r"bind\(out=\) before warmup"):
        verified = reference.verify(counted, logits, drafts, positions, out="ring")
    assert same(verified, reference.verify(counted, logits, drafts, positions))
    with pytest.raises(TypeError, match="out must be SampleOutputs, got 'RING'"):
        reference.sample(plan, logits[:2], positions, "RING")


def test_one_row_may_have_any_strides(reference):
    sampler, logits = sampler_of("graph", probabilities=True), torch.randn(1, V)
    plan, own = sampler.plan([2]), reference.plan([2])
    positions, tokens = torch.arange(12).view(3, 4)[:1, 2], torch.zeros(3, 4, dtype=torch.int64)
    out = SampleOutputs(tokens[:1, 1], torch.zeros(1, dtype=torch.int32))
    wanted = reference.sample(own, logits, positions)
    for into in (None, out):
        assert same(sampler.sample(plan, logits, positions, into), wanted)
    found, drafted = (
        each.draft(its, logits, positions, coupled=False, offset=1) for each, its in ((sampler, plan), (reference, own))
    )
    assert same(found.drawn, drafted.drawn)
    assert torch.equal(sampler.probs(plan, logits), reference.probs(own, logits))
    assert sampler.statistics().direct_runs == 0


@pytest.mark.parametrize("backend", ["eager", "graph"])
def test_results_keep_no_gradient_of_the_logits(backend):
    """Logprobs of steps without a graph had one, and so the memory of the model's backward pass."""
    sampler, logits = sampler_of(backend, R + 1), torch.randn(3, V, requires_grad=True)
    plan, positions, none = sampler.plan([0, 1, 2], mode="full"), torch.arange(3), sampler.plan([])
    biased = sampler.plan([sampler.add_request(SamplingParams(logit_bias={7: 1.0}))] * 3)
    drafts = [
        sampler.draft(each, logits[: len(each.slots)], positions[: len(each.slots)], False) for each in (plan, none)
    ]
    results = [sampler.edited_logits(each, logits, positions) for each in (plan, biased)]
    results += [sampler.probs(plan, logits), *(each.logits for each in drafts)]
    for of in ("raw", "processed"):
        results += tensors_of(sampler.sample(plan, logits, positions, logprobs=Logprobs(top=2, of=of)))
    assert not any(each.requires_grad for each in results)
    assert torch.equal(drafts[0].logits, logits)


# Drafts.


def drafting_sampler(
    backend: str,
    cached: bool = False,
    requests: Sequence[SamplingParams] = PARAMS,
    modes: Sequence[str] | None = ("full",),
) -> Sampler:
    ways = [Verification("rejection", K, "cache" if cached else "logits")]
    given = {"draft_cache_len": K if cached else 0, "history_len": 16}
    return holding(
        Sampler(V, 8, backend="eager", buckets=[2, 5], verifications=ways, **given), backend, requests, modes
    )


@pytest.mark.parametrize("backend", ["eager", "graph"])
def test_modes_and_edits_of_other_batches_are_told_apart(backend):
    """With the same tensors: requests that are greedy, that draw, that are biased, in turns."""
    given = {"temperature": 0.0}, {}, {"logit_bias": {7: 100.0}}
    requests = [SamplingParams(seed=seed, **each) for each in given for seed in range(2)]
    sampler, logits, where = drafting_sampler(backend, False, requests, None), torch.randn(2, V), torch.arange(2)
    for coupled in (False, True):
        for slots in ([0, 1], [2, 3], [4, 5], [2, 3], [0, 1], [4, 5]) * 2:
            found, fresh = (
                sampler.draft(sampler.plan(slots), logits, where, coupled),
                drafting_sampler("eager", False, requests),
            )
            assert torch.equal(found.token_ids, fresh.draft(fresh.plan(slots), logits, where, coupled).token_ids)
            assert (slots != [4, 5]) or found.token_ids.tolist() == [7, 7]


@pytest.mark.parametrize("field", ["draft_counts", "cumulative_drafts"])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("backend", ["eager", "graph"])
def test_plans_whose_counts_are_buffers_draft_too(backend, cached, field, monkeypatch):
    sampler, fresh = drafting_sampler(backend, cached), drafting_sampler("eager")
    counts = torch.tensor([3, 2, 0, 1]) if field == "draft_counts" else torch.tensor([3, 5, 5, 6])
    logits, where = torch.randn(R, V), torch.arange(R)
    wanted = [fresh.draft(fresh.plan(range(R), "full"), logits, where, c).drawn for c in (True, False)]
    for repeat in range(3):
        plan = replace(sampler.plan(range(R), "full", num_drafts=[K, K - repeat, K, K]), **{field: counts})
        assert same(sampler.draft(plan, logits, where, True).drawn, wanted[0])
        assert same(sampler.draft(plan, logits, where, False).drawn, wanted[1])
        monkeypatch.setattr("compiled_sampler.engine.sampler.check_logits", lambda *_: 1 / 0)  # not asked again


# Uploads of added requests.


def capturing(sampler: Sampler) -> Any:
    return mock.patch.object(sampler, "_is_capturing", return_value=True)


def test_requests_waiting_for_their_upload_are_refused_inside_a_capture(reference):
    sampler, logits, positions = sampler_of("eager", R + 2), torch.randn(R, V), torch.arange(R)
    plan = sampler.plan([0, 1, 2, 3])
    sampler.sample(plan, logits, positions)
    sampler.add_request(SamplingParams(seed=9))
    with capturing(sampler), pytest.raises(RuntimeError, match=r"flush\(\) before it begins"):
        sampler.sample(plan, logits, positions)
    sampler.flush()
    with capturing(sampler):
        found = sampler.sample(plan, logits, positions)
    assert same(found, reference.sample(reference.plan([0, 1, 2, 3]), logits, positions))


def test_a_plan_uploads_what_a_capture_will_read(reference):
    sampler, logits = sampler_of("eager"), torch.randn(R, V)
    plan = sampler.plan([0, 1, 2, 3])  # no step before the capture
    with capturing(sampler):
        found = sampler.sample(plan, logits, torch.arange(R))
    assert same(found, reference.sample(reference.plan([0, 1, 2, 3]), logits, torch.arange(R)))


def test_after_a_capture_of_the_engine_requests_are_uploaded_as_they_come():
    sampler, logits, positions = sampler_of("eager", R + 2), torch.randn(R, V), torch.arange(R)
    table, plan = sampler._requests.staged.table, sampler.plan([0, 1, 2, 3])
    slot = sampler.add_request(SamplingParams(seed=11))
    assert table.seeds[slot] != 11
    sampler.sample(plan, logits, positions)
    assert table.seeds[slot] == 11
    with capturing(sampler):
        sampler.sample(plan, logits, positions)
    slot = sampler.add_request(SamplingParams(seed=12))
    assert table.seeds[slot] == 12


def test_a_request_whose_upload_fails_leaves_its_slot_free(monkeypatch):
    sampler, logits, positions = sampler_of("eager", R + 1), torch.randn(R, V), torch.arange(R)
    plan = sampler.plan([0, 1, 2, 3])
    with capturing(sampler):
        sampler.sample(plan, logits, positions)
    with monkeypatch.context() as patched:
        patched.setattr(PinnedRing, "send", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sampler.add_request(SamplingParams(seed=12))
    assert sampler.add_request(SamplingParams(seed=13)) == R
    assert sampler._requests.staged.table.seeds[R] == 13


def test_a_graph_of_tensors_that_are_no_longer_bound_is_not_kept_for_the_next_call():
    """It would be destroyed by that call, perhaps inside an engine's own capture, which it would end."""
    sampler, first, positions = sampler_of("graph"), torch.randn(R, V), torch.arange(R)
    sampler.bind(logits=first)
    sampler.warmup(modes=["full"])
    sampler.sample(sampler.plan([0, 1, 2, 3]), first, positions)
    assert sampler._calls._launches
    sampler.bind(logits=torch.randn(R, V))
    assert not sampler._calls._launches
