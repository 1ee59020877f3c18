"""Logprobs of a sampler are the slow truth's on every path, and change no token; steps with them are captured."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compiled_sampler import (
    LogprobOutputs,
    Logprobs,
    SampleOutputs,
    Sampler,
    SamplingParams,
    Verification,
    VerifyOutputs,
    replay,
)
from compiled_sampler.batch import tensors_of
from compiled_sampler.core.reference import kept, row_parameters
from compiled_sampler.engine.boundary.tensors import empty_outputs
from compiled_sampler.logprobs import LAWS, layout_of_outputs
from compiled_sampler.modes import RULES
from tests.builders.edits import (
    BOUNDED_EDITS,
    EDITS,
    FILTERS,
    Request,
    V,
    added_to,
    edited_rows,
    edited_sampler,
    hard_logits,
    plain_tokens,
    random_mask,
    random_request,
    unedited,
)
from tests.builders.inputs import sample_inputs
from tests.builders.logprobs import EVERYTHING, bare, differing, rows_of, taken, wrong_fields
from tests.builders.sampler import REQUESTS, SHARED_SLOTS, holding, planned, recorded, same, sampler_with
from tests.oracles import oracle_edits
from tests.oracles import oracle_logprobs as oracle
from tests.tiers import tiers

ROWS, K = 12, 3


def is_nothing(values: Tensor) -> bool:
    """Whether there is nothing: -inf in floats, -1 in integers."""
    return bool((values == (-torch.inf if values.is_floating_point() else -1)).all())


def drafted(source: random.Random, requests, sampler: Sampler):
    """A plan with drafts of the requests, its rows, drafts, positions and masks, all drafts of few ids."""
    slots = [each.added(sampler) for each in requests]
    counts = [source.randrange(K + 1) for _ in requests]
    plan = sampler.plan([*slots, -1], num_drafts=[*counts, 1])
    rows = hard_logits(source, plan.num_rows)
    drafts = torch.full((len(counts) + 1, K), -1)
    for n, (first, count) in enumerate(zip(plan.first_rows, counts, strict=False)):
        likely = rows[first : first + count].nan_to_num(-1e9).argmax(-1)
        drafts[n, :count] = likely
    positions = torch.tensor([*(each.position for each in requests), 0])
    mask = random_mask(source, plan.num_rows, V) if source.random() < 0.5 else None
    return plan, rows, drafts, positions, mask


@pytest.mark.parametrize(("backend", "rounds"), tiers([("eager", 2)], [("eager", 2), ("eager", 5), ("reference", 1)]))
@pytest.mark.parametrize(("rule", "law"), tiers(zip(RULES, LAWS, strict=True), itertools.product(RULES, LAWS)))
def test_emitted_tokens_have_the_logprobs_of_the_slow_truth(rule, law, backend, rounds):
    """With ragged drafts, edits, masks, stops and padding; nothing behind a rejected draft or a stop token."""
    source, sampler, wanted = random.Random(rule + law), edited_sampler(backend, ROWS), EVERYTHING[LAWS.index(law)]
    seen = set()
    for number in range(rounds):
        requests = [random_request(source, V, BOUNDED_EDITS if number % 3 else ()) for _ in range(ROWS)]
        plan, rows, drafts, positions, mask = drafted(source, requests, sampler)
        made = sampler.verify(plan, rows, drafts, positions, rule, token_bitmask=mask, logprobs=wanted)
        assert same(bare(made), sampler.verify(plan, rows, drafts, positions, rule, token_bitmask=mask))
        assert all(is_nothing(each[-1]) for each in made.logprobs)
        for n, request in enumerate(requests):
            for place, token in enumerate(made.token_ids[n].tolist()):
                found = rows_of(made.logprobs, (n, place))
                if token < 0:
                    assert all(is_nothing(each) for each in found)
                    continue
                seen.add(place)
                row = plan.first_rows[n] + place
                text = request._replace(output=[*request.output, *made.token_ids[n, :place].tolist()])
                of_row = None if mask is None else mask[row : row + 1]
                edited = edited_rows(rows[row : row + 1], [text], of_row)[0].tolist()
                logits = rows[row].tolist(), edited
                assert wrong_fields(found, logits, unedited(request), wanted, token) == [], (n, place, request)
        for slot in plan.slots[:-1]:
            sampler.remove_request(slot)
    assert len(seen) > 1


def test_proposals_change_no_logprob_of_a_token():
    """Under each rule and form of proposals, rows that emit one token have one logprob."""
    params = [SamplingParams(seed=n, top_k=30, min_p=0.01) for n in range(4)]
    sampler, plan = planned(*params, num_drafts=[2] * 4)
    rows, drafts = torch.randn(12, V), torch.randint(V, (4, 2))
    every = Logprobs(of="filtered", token_ids=tuple(range(V)))
    for rule in RULES:
        for form in ({}, {"draft_logits": torch.randn(8, V)}, {"draft_probs": torch.randn(8, V).softmax(-1)}):
            if rule == "match" and form:
                continue
            made = sampler.verify(plan, rows, drafts, torch.zeros(4, dtype=torch.int64), rule, logprobs=every, **form)
            given = made.logprobs.given.gather(2, made.token_ids.clamp(min=0)[..., None])[..., 0]
            assert torch.equal(torch.where(made.token_ids < 0, -torch.inf, given), made.logprobs.token)
            assert (made.logprobs.token[:, 0] > -torch.inf).all()


@pytest.mark.parametrize("drafts", [False, True])
def test_edited_logits_replay_what_was_drawn(drafts):
    """The kept set is that of the definition, and the logprobs are within 2e-6, also of the rows of drafts."""
    source, sampler = random.Random(5), edited_sampler("eager", ROWS)
    requests = [random_request(source, V, BOUNDED_EDITS) for _ in range(ROWS)]
    asked = Logprobs(of="filtered", num_kept=True, boundary=True)
    if drafts:
        plan, rows, tokens, positions, mask = drafted(source, requests, sampler)
        made = sampler.verify(plan, rows, tokens, positions, token_bitmask=mask, logprobs=asked)
        owners = [n for n, count in enumerate(plan.num_drafts) for _ in range(count + 1)]
        places = [place for count in plan.num_drafts for place in range(count + 1)]
    else:
        plan = sampler.plan([each.added(sampler) for each in requests])
        rows, positions, mask = hard_logits(source, ROWS), torch.tensor([r.position for r in requests]), None
        made = sampler.sample(plan, rows, positions, logprobs=asked)
        owners, places = list(range(ROWS)), None
    edited = sampler.edited_logits(plan, rows, positions, token_bitmask=mask)
    assert (edited.dtype, edited.shape) == (torch.float32, rows.shape)
    params = [unedited(requests[n]) if n < ROWS else SamplingParams(seed=0) for n in owners]
    index = (owners, places) if drafts else owners
    token_ids, found = made.token_ids[index], rows_of(made.logprobs, index)
    again, keep = replay(edited, params, token_ids, found.boundary)
    emitted = token_ids >= 0
    truth = kept(edited, row_parameters(sample_inputs(edited, params)), base_is_row=False)
    assert torch.equal(keep[emitted], truth[emitted])
    assert torch.equal(keep.sum(-1)[emitted], found.num_kept[emitted])
    assert emitted.sum() >= ROWS - 3
    for a, b in zip(again[emitted].tolist(), found.token[emitted].tolist(), strict=True):
        assert abs(a - b) <= oracle.error_bound(b)
    assert (again[~emitted] == -torch.inf).all()


@pytest.mark.parametrize("backend", tiers(["eager", "reference"], ["eager", "reference", "compiled"]))
def test_logits_without_edits_are_copied_as_they_are(backend):
    sampler, plan = planned(*[REQUESTS["full"]] * 2, slots=2, backend=backend, logits_dtype=torch.bfloat16)
    logits = torch.randn(2, V + 3).bfloat16()
    made = sampler.edited_logits(plan, logits, torch.arange(2))
    assert torch.equal(made, logits[:, :V].float())
    plan = sampler.plan([], num_drafts=[])
    assert sampler.edited_logits(plan, logits[:0], torch.arange(0)).shape == (0, V)


# Of every parameter that a request may have.


GIVEN = (0, 31, 64, 90, 128)
ASKED = [replace(each, token_ids=GIVEN) for each in EVERYTHING]
WITHOUT_BOUNDARY = [replace(each, boundary=False) for each in ASKED]


def marked_request(source: random.Random, edits: Sequence[str]) -> Request:
    """A request whose parameters are each off or any; one of three has a watermark."""
    request = random_request(source, V, edits)
    return request._replace(given={**request.given, "watermark_tokens": source.choice([0, 0, source.randrange(1, 9)])})


def noise_positions(requests: list[Request]) -> torch.Tensor:
    """What keys the noise of each row: its position, or a hash of the text before it."""
    of_rows = [(each.position, [*each.prompt, *each.output], each.given["watermark_tokens"]) for each in requests]
    return torch.tensor([oracle_edits.noise_position(*each) for each in of_rows])


@pytest.mark.parametrize(("backend", "rounds"), tiers([("eager", 32), ("reference", 2)], [("eager", 63)]))
def test_sampled_tokens_have_the_logprobs_of_the_slow_truth(backend, rounds):
    """Of up to 63 batches of 16: each law within 2e-6, and below -8 within 2.5e-7 of itself.

    Tokens and status are those of the slow truth, whatever is asked for. Filters of whole rows leave no boundary.
    """
    source, sampler, seen = random.Random(23), edited_sampler(backend, 16), Counter[str]()
    plain = Sampler(V, 16, backend="eager")
    for number in range(rounds):
        has_boundary = number % 4 == 0
        requests = [marked_request(source, BOUNDED_EDITS if has_boundary else EDITS) for _ in range(16)]
        logits, positions = hard_logits(source, 16), torch.tensor([each.position for each in requests])
        mask = random_mask(source, 16, V) if source.random() < 0.4 else None
        edited = edited_rows(logits, requests, mask)
        tokens, status = plain_tokens(plain, requests, edited, noise_positions(requests))
        with added_to(requests, sampler) as [(_, slots)]:
            for asked in (None, *(ASKED if has_boundary else WITHOUT_BOUNDARY)):
                made = sampler.sample(sampler.plan(slots), logits, positions, token_bitmask=mask, logprobs=asked)
                assert (made.token_ids.tolist(), made.status.tolist()) == (tokens, status), asked
                for row, pair in enumerate(zip(logits.tolist(), edited.tolist(), strict=True) if asked else ()):
                    found, params = rows_of(made.logprobs, row), unedited(requests[row])
                    assert wrong_fields(found, pair, params, asked, tokens[row]) == [], (asked.of, requests[row])
                    seen.update(f"{asked.of} below -8" for each in found.given if -math.inf < each < -8.0)
                    seen[asked.of] += tokens[row] >= 0
        seen.update(name for each in requests for name in (*FILTERS, "watermark") if name in each.params.edits)
    everything = {*LAWS, *(f"{of} below -8" for of in LAWS), *FILTERS, "watermark"}
    assert backend == "reference" or all(seen[name] > 30 for name in everything), seen


# Steps: recorded, compiled, in a caller's tensors, and what is refused.


SOME = [Logprobs(top=3, rank=True), Logprobs(of="filtered", token_ids=(5, 0, 9), boundary=True)]


def test_recorded_steps_return_the_same():
    """Captured with each of two ``Logprobs``, with edits and without; another one is served directly."""
    source = random.Random(13)
    options = {
        "captured_edits": [BOUNDED_EDITS, ("token_bitmask", *BOUNDED_EDITS)],
        "captured_logprobs": SOME,
        "verifications": [Verification(rule, 2) for rule in RULES],
    }
    made, wanted = recorded(edited_sampler("eager", 4, buckets=[4], **options)), edited_sampler("eager", 4)
    captures = made.statistics().captures
    for edits in ((), BOUNDED_EDITS):
        requests = [random_request(source, V, edits) for _ in range(3)]
        for asked in (*SOME, None, Logprobs(entropy=True)):
            before = made.statistics()
            logits, positions = hard_logits(source, 9), torch.tensor([each.position for each in requests])
            given = random_mask(source, 9, V) if edits else None, torch.randint(V, (3, 2)), asked
            with added_to(requests, made, wanted) as sides:
                results = [taken(sampler, slots, logits, positions, given) for sampler, slots in sides]
            for left, right in zip(*results, strict=True):
                assert same(bare(left), bare(right))
                assert (left.logprobs is None) == (asked is None)
                assert asked is None or differing(left.logprobs, right.logprobs) == []
            replays = made.statistics().replays - before.replays
            assert replays == (0 if asked == Logprobs(entropy=True) else len(results[0]))
    assert made.statistics().captures == captures


@pytest.mark.parametrize("backend", ["eager", "graph"])
def test_results_are_written_into_out(backend):
    asked, ways = EVERYTHING[2], [Verification("rejection", 2)]
    sampler = Sampler(V, 4, backend="eager", verifications=ways, captured_logprobs=[asked], buckets=[2, 4])
    holding(sampler, backend, [REQUESTS["full"]] * 3)
    logits, positions, drafts = torch.randn(9, V), torch.arange(3), torch.randint(V, (3, 2))
    for plan, kind, columns in (
        (sampler.plan(range(3)), SampleOutputs, 0),
        (sampler.plan(range(3), num_drafts=[2] * 3), VerifyOutputs, 3),
        (sampler.plan(range(3), num_drafts=[1] * 3), VerifyOutputs, 2),
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
    assert backend == "eager" or sampler.statistics().replays > 8


def test_outs_that_do_not_fit_are_refused():
    (sampler, plan), given = planned(*[REQUESTS["full"]] * 2), (torch.randn(2, V), torch.arange(2))
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
    sampler, plan = planned(REQUESTS["full"])
    drafts = sampler.plan([0], num_drafts=[1])
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
    source, asked = random.Random(17), {"logprobs": EVERYTHING[2]}
    requests = [random_request(source, V, BOUNDED_EDITS) for _ in range(3)]
    logits, positions = hard_logits(source, 9), torch.tensor([each.position for each in requests])
    drafts, results = torch.randint(V, (3, 2)), []
    for sampler in (edited_sampler("compiled", SHARED_SLOTS), edited_sampler("eager", 4)):
        slots = [each.added(sampler) for each in requests]
        plan, single = sampler.plan(slots, num_drafts=[2] * 3), sampler.plan(slots[:1], num_drafts=[0])
        drawn = sampler.sample(sampler.plan(slots), logits[:3], positions, **asked)
        judged = sampler.verify(plan, logits, drafts, positions, "rejection", **asked)
        alone = sampler.verify(single, logits[:1], drafts[:1, :0], positions[:1], "rejection", **asked)
        results.append((drawn, judged, alone))
    for left, right in zip(*results, strict=True):
        assert same(bare(left), bare(right))
        assert differing(left.logprobs, right.logprobs) == []


def test_a_greedy_row_without_a_token_has_no_logprobs_whatever_stands_beside_it():
    asked = Logprobs(of="filtered", top=2, rank=True, entropy=True, num_kept=True, boundary=True)
    nothing = {"token": -math.inf, "rank": -1, "entropy": -math.inf, "num_kept": -1, "boundary": -1}
    for backend in ("eager", "reference"):
        sampler, slots = (
            sampler_with([SamplingParams(temperature=t, seed=1) for t in (0.0, 1.0)], 8, backend=backend),
            [0, 1],
        )
        rows, positions = torch.stack([torch.full((8,), -math.inf), torch.randn(8)]), torch.arange(2)
        for plan in (sampler.plan(slots[:1]), sampler.plan(slots[:1], mode="full"), sampler.plan(slots)):
            count = len(plan.slots)
            found = sampler.sample(plan, rows[:count], positions[:count], logprobs=asked).logprobs
            assert {name: getattr(found, name)[0].item() for name in nothing} == nothing
            assert found.top_token_ids[0].tolist() == [-1, -1]


def test_calls_with_ever_other_ids_are_forgotten():
    sampler, plan = planned(SamplingParams(seed=1, logit_bias={1: 1.0}), vocab_size=300)
    for token_id in range(300):
        sampler.sample(plan, torch.zeros(1, 300), torch.tensor([0]), logprobs=Logprobs(token_ids=(token_id,)))
    assert len(sampler._runner._chosen) <= 256
