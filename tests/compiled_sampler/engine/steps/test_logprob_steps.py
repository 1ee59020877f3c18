"""Steps with logprobs: recorded, compiled, in a caller's tensors, and what is refused."""

import math
import random

import pytest
import torch

from compiled_sampler import (
    LogprobOutputs,
    Logprobs,
    SampleOutputs,
    Sampler,
    SamplingParams,
    Verification,
    VerifyOutputs,
)
from compiled_sampler.batch import tensors_of
from compiled_sampler.engine.boundary.tensors import empty_outputs
from compiled_sampler.logprobs import layout_of_outputs
from compiled_sampler.modes import RULES
from tests.builders.edits import (
    BOUNDED_EDITS,
    V,
    edited_sampler,
    hard_logits,
    random_mask,
    random_request,
)
from tests.builders.logprobs import EVERYTHING, bare, differing, taken
from tests.builders.sampler import REQUESTS, SHARED_SLOTS, replay_recordings, same
from tests.oracles import oracle_logprobs as oracle

SOME = [Logprobs(top=3, rank=True), Logprobs(of="filtered", token_ids=(5, 0, 9), boundary=True)]


def test_recorded_steps_return_the_same():
    """Captured with each of two ``Logprobs``, with edits and without; another one is served directly."""
    source, ways = random.Random(13), [Verification(rule, 2) for rule in RULES]
    options = {
        "captured_edits": [BOUNDED_EDITS, ("token_bitmask", *BOUNDED_EDITS)],
        "verifications": ways,
        "buckets": [4],
    }
    made = edited_sampler("eager", 4, captured_logprobs=SOME, **options)
    replay_recordings(made)
    made.warmup(modes=["full"])
    wanted, captures = edited_sampler("eager", 4), made.statistics().captures
    for edits in ((), BOUNDED_EDITS):
        requests = [random_request(source, V, edits) for _ in range(3)]
        slots, others = [each.added(made) for each in requests], [each.added(wanted) for each in requests]
        for asked in (*SOME, None, Logprobs(entropy=True)):
            before = made.statistics()
            logits, positions = hard_logits(source, 9), torch.tensor([each.position for each in requests])
            mask, drafts = random_mask(source, 9, V) if edits else None, torch.randint(V, (3, 2))
            results = [
                taken(sampler, own, logits, positions, (mask, drafts, asked))
                for sampler, own in ((made, slots), (wanted, others))
            ]
            for left, right in zip(*results, strict=True):
                assert same(bare(left), bare(right))
                assert (left.logprobs is None) == (asked is None)
                assert asked is None or differing(left.logprobs, right.logprobs) == []
            replays = made.statistics().replays - before.replays
            assert replays == (0 if asked == Logprobs(entropy=True) else len(results[0]))
        for own, each in ((slots, made), (others, wanted)):
            for slot in own:
                each.remove_request(slot)
    assert made.statistics().captures == captures


@pytest.mark.parametrize("recorded", [False, True])
def test_results_are_written_into_out(recorded):
    asked, ways = EVERYTHING[2], [Verification("rejection", 2)]
    sampler = Sampler(V, 4, backend="eager", verifications=ways, captured_logprobs=[asked], buckets=[2, 4])
    if recorded:
        replay_recordings(sampler)
        sampler.warmup(modes=["full"])
    slots = [sampler.add_request(REQUESTS["full"]) for _ in range(3)]
    logits, positions, drafts = torch.randn(9, V), torch.arange(3), torch.randint(V, (3, 2))
    for plan, kind, columns in (
        (sampler.plan(slots), SampleOutputs, 0),
        (sampler.plan(slots, num_drafts=[2] * 3), VerifyOutputs, 3),
        (sampler.plan(slots, num_drafts=[1] * 3), VerifyOutputs, 2),
    ):

        def step(out=None, plan=plan, columns=columns):
            if not columns:
                return sampler.sample(plan, logits[:3], positions, out, logprobs=asked)
            rows = logits[: plan.num_rows]
            return sampler.verify(plan, rows, drafts[:, : columns - 1], positions, "rejection", out=out, logprobs=asked)

        wanted = step()
        empty = empty_outputs(kind, columns, torch.device("cpu"), logprobs=asked)
        fields = [each.new_full((3, *each.shape[1:]), -7) for each in tensors_of(empty)]
        split = len(fields) - len(LogprobOutputs._fields)
        out = kind(*fields[:split], logprobs=LogprobOutputs(*fields[split:]))
        for _ in range(3):
            assert step(out) is out
            assert differing(out.logprobs, wanted.logprobs) == []
            assert same(bare(out), bare(wanted))
    assert not recorded or sampler.statistics().replays > 8


def test_outs_that_do_not_fit_are_refused():
    sampler = Sampler(V, 2, backend="eager")
    plan, given = sampler.plan([sampler.add_request(REQUESTS["full"])] * 2), (torch.randn(2, V), torch.arange(2))
    tokens, status, floats = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32), torch.zeros(2)
    right, asked = LogprobOutputs(floats), Logprobs()
    assert sampler.sample(plan, *given, SampleOutputs(tokens, status, logprobs=right), logprobs=asked)
    for logprobs, wanted, error, words in (
        (None, asked, TypeError, r"LogprobOutputs\(token\)"),
        (right, None, ValueError, "out.logprobs.token must be None"),
        (floats, asked, TypeError, "got Tensor"),
        (LogprobOutputs(floats, rank=tokens.clone()), asked, ValueError, "out.logprobs.rank must be None"),
        (LogprobOutputs(floats[:1]), asked, ValueError, r"out.logprobs.token must be \[2\]"),
        (LogprobOutputs(floats.double()), asked, TypeError, "out.logprobs.token must be torch.float32"),
        (right, Logprobs(top=2), TypeError, "out.logprobs.top_token_ids must be a torch.Tensor"),
        (LogprobOutputs(floats, rank=tokens), Logprobs(rank=True), ValueError, "memory of its own"),
    ):
        with pytest.raises(error, match=words):
            sampler.sample(plan, *given, SampleOutputs(tokens, status, logprobs=logprobs), logprobs=wanted)


def test_what_is_asked_for_is_checked():
    sampler = Sampler(V, 2, backend="eager")
    slots = [sampler.add_request(REQUESTS["full"])]
    plan, drafts = sampler.plan(slots), sampler.plan(slots, num_drafts=[1])
    logits, position, one = torch.randn(2, V), torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int64)
    for wrong, error, words in (
        (5, TypeError, "logprobs must be Logprobs or None, got int"),
        ([Logprobs()], TypeError, "logprobs must be Logprobs or None, got list"),
        (Logprobs(token_ids=(V,)), ValueError, rf"token_ids must be in \[0, {V}\)"),
    ):
        with pytest.raises(error, match=words):
            sampler.sample(plan, logits[:1], position, logprobs=wrong)
        with pytest.raises(error, match=words):
            sampler.verify(drafts, logits, one, position, logprobs=wrong)
    with pytest.raises(ValueError, match="logprobs must be None in verify_from_probs"):
        sampler.verify_from_probs(drafts, logits.softmax(-1), one, position, logprobs=Logprobs())
    for wrong, error in ((Logprobs(), TypeError), ([5], TypeError), ([Logprobs(token_ids=(V,))], ValueError)):
        with pytest.raises(error, match=r"captured_logprobs|token_ids"):
            Sampler(V, 2, backend="eager", captured_logprobs=wrong)


def test_batches_without_rows_have_logprobs_without_rows():
    sampler, none = Sampler(V, 2, backend="eager"), torch.empty(0, dtype=torch.int64)
    plan, rows = sampler.plan([], num_drafts=[]), torch.zeros(0, V)
    sampled = sampler.sample(sampler.plan([]), rows, none, logprobs=SOME[0])
    verified = sampler.verify(plan, rows, none.view(0, 2), none, logprobs=SOME[0])
    for out, shape in ((sampled, [0]), (verified, [0, 3])):
        found = {name: each for name, each in out.logprobs._asdict().items() if each is not None}
        layout = layout_of_outputs(SOME[0]).items()
        assert {name: (each.dtype, [*each.shape]) for name, each in found.items()} == {
            name: (dtype, [*shape, *tail]) for name, (dtype, tail) in layout
        }


def test_samplers_of_one_process_do_not_share_ids_or_temperatures():
    asked, logits, position = Logprobs(of="processed", token_ids=(3, 8)), torch.randn(1, V), torch.tensor([0])
    samplers = [Sampler(V, 2, backend="eager", captured_logprobs=[asked] * n) for n in (0, 1)]
    greedy = SamplingParams(temperature=0.5, top_k=1)
    for temperature in (0.5, 2.0):
        for sampler, params in zip(samplers, (greedy, SamplingParams(temperature=temperature)), strict=True):
            made = sampler.sample(sampler.plan([sampler.add_request(params)]), logits, position, logprobs=asked)
            law = oracle.law("processed", *[logits[0].tolist()] * 2, {"temperature": params.temperature})
            assert made.logprobs.given[0].tolist() == pytest.approx([law[3], law[8]], abs=2e-6)


@pytest.mark.full
def test_compiled_steps_return_the_same():
    source, asked = random.Random(17), EVERYTHING[2]
    samplers = edited_sampler("compiled", SHARED_SLOTS), edited_sampler("eager", 4)
    requests = [random_request(source, V, BOUNDED_EDITS) for _ in range(3)]
    logits, positions = hard_logits(source, 9), torch.tensor([each.position for each in requests])
    drafts, results = torch.randint(V, (3, 2)), []
    for each in samplers:
        slots = [request.added(each) for request in requests]
        plan, single = each.plan(slots, num_drafts=[2] * 3), each.plan(slots[:1], num_drafts=[0])
        results.append(
            (
                each.sample(each.plan(slots), logits[:3], positions, logprobs=asked),
                each.verify(plan, logits, drafts, positions, "rejection", logprobs=asked),
                each.verify(single, logits[:1], drafts[:1, :0], positions[:1], "rejection", logprobs=asked),
            )
        )
    for left, right in zip(*results, strict=True):
        assert same(bare(left), bare(right))
        assert differing(left.logprobs, right.logprobs) == []


def test_a_greedy_row_without_a_token_has_no_logprobs_whatever_stands_beside_it():
    asked = Logprobs(of="filtered", top=2, rank=True, entropy=True, num_kept=True, boundary=True)
    nothing = {"token": -math.inf, "rank": -1, "entropy": -math.inf, "num_kept": -1, "boundary": -1}
    for backend in ("eager", "reference"):
        sampler = Sampler(8, 2, backend=backend)
        slots = [sampler.add_request(SamplingParams(temperature=t, seed=1)) for t in (0.0, 1.0)]
        rows, positions = torch.stack([torch.full((8,), -math.inf), torch.randn(8)]), torch.arange(2)
        for plan in (sampler.plan(slots[:1]), sampler.plan(slots[:1], mode="full"), sampler.plan(slots)):
            count = len(plan.slots)
            found = sampler.sample(plan, rows[:count], positions[:count], logprobs=asked).logprobs
            assert {name: getattr(found, name)[0].item() for name in nothing} == nothing
            assert found.top_token_ids[0].tolist() == [-1, -1]


def test_calls_with_ever_other_ids_are_forgotten():
    sampler = Sampler(300, 1, backend="eager")
    plan = sampler.plan([sampler.add_request(SamplingParams(seed=1, logit_bias={1: 1.0}))])
    for token_id in range(300):
        sampler.sample(plan, torch.zeros(1, 300), torch.tensor([0]), logprobs=Logprobs(token_ids=(token_id,)))
    assert len(sampler._runner._chosen) <= 256
