"""Logprobs of a sampler are the slow truth's on every path, and change no token."""

import random

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
from compiled_sampler.engine.boundary.outputs import empty_outputs
from compiled_sampler.logprobs import LAWS, layout_of_outputs
from compiled_sampler.modes import RULES
from tests import oracle_logprobs as oracle
from tests.builders import sample_inputs
from tests.builders_edits import (
    EDITS,
    V,
    edited_rows,
    edited_sampler,
    hard_logits,
    random_mask,
    random_request,
    unedited,
)
from tests.builders_logprobs import EVERYTHING, differing, rows_of, wrong_fields
from tests.builders_sampler import REQUESTS, replay_recordings, same

ROWS, K = 12, 3
TOP_K_1 = SamplingParams(temperature=0.5, top_k=1, seed=7)


def bare(out):
    """Results without logprobs."""
    return out._replace(logprobs=None)


def is_nothing(values: Tensor) -> bool:
    """Whether there is nothing: -inf in floats, -1 in integers."""
    return bool((values == (-torch.inf if values.is_floating_point() else -1)).all())


@pytest.mark.parametrize(("backend", "rounds"), [("eager", 6), ("reference", 2)])
@pytest.mark.parametrize("wanted", EVERYTHING, ids=LAWS)
def test_sampled_tokens_have_the_logprobs_of_the_slow_truth(wanted, backend, rounds):
    """Of requests with every edit, with masks and without, on rows with ties, NaN and infinities."""
    source, sampler = random.Random(wanted.of), edited_sampler(backend, ROWS)
    for number in range(rounds):
        requests = [random_request(source, V, EDITS if number else ()) for _ in range(ROWS)]
        slots = [each.added(sampler) for each in requests]
        plan = sampler.plan(slots)
        logits, positions = hard_logits(source, ROWS), torch.tensor([each.position for each in requests])
        mask = random_mask(source, ROWS, V) if number % 2 else None
        made = sampler.sample(plan, logits, positions, token_bitmask=mask, logprobs=wanted)
        assert same(bare(made), sampler.sample(plan, logits, positions, token_bitmask=mask))
        rows = list(zip(logits.tolist(), edited_rows(logits, requests, mask).tolist(), strict=True))
        for row, (request, token) in enumerate(zip(requests, made.token_ids.tolist(), strict=True)):
            found = rows_of(made.logprobs, row)
            assert wrong_fields(found, rows[row], unedited(request), wanted, token) == [], (row, request)
        for slot in slots:
            sampler.remove_request(slot)


@pytest.mark.parametrize("wanted", EVERYTHING, ids=LAWS)
def test_every_mode_that_covers_a_batch_gives_the_same(wanted):
    sampler = Sampler(V, 1, backend="eager")
    logits, position = 2.0 * torch.randn(1, V), torch.tensor([3])
    for params in (*REQUESTS.values(), TOP_K_1):
        slot = sampler.add_request(params)
        first = list(sampler.modes).index(sampler.plan([slot]).mode)
        made = [
            sampler.sample(sampler.plan([slot], mode.name), logits, position, logprobs=wanted)
            for mode in sampler.modes[first:]
            if mode.name in covering(sampler, slot)
        ]
        assert [differing(each.logprobs, made[0].logprobs) for each in made] == [[]] * len(made)
        rows = (logits[0].tolist(),) * 2
        assert wrong_fields(rows_of(made[0].logprobs, 0), rows, params, wanted, int(made[0].token_ids)) == []
        sampler.remove_request(slot)


def covering(sampler: Sampler, slot: int) -> list[str]:
    """Names of the modes that cover a request."""
    found = []
    for mode in sampler.modes:
        try:
            sampler.plan([slot], mode.name)
        except ValueError:
            continue
        found.append(mode.name)
    return found


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


@pytest.mark.parametrize(("backend", "rounds"), [("eager", 5), ("reference", 1)])
@pytest.mark.parametrize("wanted", EVERYTHING, ids=LAWS)
@pytest.mark.parametrize("rule", RULES)
def test_emitted_tokens_have_the_logprobs_of_the_slow_truth(rule, wanted, backend, rounds):
    """With ragged drafts, edits, masks, stops and padding; nothing behind a rejected draft or a stop token."""
    source, sampler = random.Random(rule + wanted.of), edited_sampler(backend, ROWS)
    seen = set()
    for number in range(rounds):
        requests = [random_request(source, V, EDITS if number % 3 else ()) for _ in range(ROWS)]
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
    sampler = Sampler(V, 4, backend="eager")
    slots = [sampler.add_request(SamplingParams(seed=n, top_k=30, min_p=0.01)) for n in range(4)]
    plan, rows, drafts = sampler.plan(slots, num_drafts=[2] * 4), torch.randn(12, V), torch.randint(V, (4, 2))
    every = Logprobs(of="filtered", token_ids=tuple(range(V)))
    single = sampler.sample(sampler.plan([slot for slot in slots for _ in range(3)]), rows, torch.arange(12))
    assert single.logprobs is None
    for rule in RULES:
        for form in ({}, {"draft_logits": torch.randn(8, V)}, {"draft_probs": torch.randn(8, V).softmax(-1)}):
            if rule == "match" and form:
                continue
            made = sampler.verify(plan, rows, drafts, torch.zeros(4, dtype=torch.int64), rule, logprobs=every, **form)
            given = made.logprobs.given.gather(2, made.token_ids.clamp(min=0)[..., None])[..., 0]
            assert torch.equal(torch.where(made.token_ids < 0, -torch.inf, given), made.logprobs.token)
            assert (made.logprobs.token[:, 0] > -torch.inf).all()


SOME = [Logprobs(top=3, rank=True), Logprobs(of="filtered", token_ids=(5, 0, 9), boundary=True)]


def test_recorded_steps_return_the_same():
    """Captured with each of two ``Logprobs``, with edits and without; another one is served directly."""
    source, ways = random.Random(13), [Verification(rule, 2) for rule in RULES]
    options = {"captured_edits": [EDITS, ("token_bitmask", *EDITS)], "verifications": ways, "buckets": [4]}
    made = edited_sampler("eager", 4, captured_logprobs=SOME, **options)
    replay_recordings(made)
    made.warmup(modes=["full"])
    wanted, captures = edited_sampler("eager", 4), made.statistics().captures
    for edits in ((), EDITS):
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


def taken(sampler, slots, logits, positions, given):
    """Results of a step of each kind, drafts of width 1 and 2."""
    mask, drafts, asked = given
    few, plan = None if mask is None else mask[:3], sampler.plan(slots)
    results = [sampler.sample(plan, logits[:3], positions, token_bitmask=few, logprobs=asked)]
    for rule, width in (*((rule, 2) for rule in RULES), ("match", 1)):
        rows, count = 3 * (width + 1), [width] * 3
        own = sampler.plan(slots, num_drafts=count)
        masked = {"token_bitmask": None if mask is None else mask[:rows], "logprobs": asked}
        results.append(sampler.verify(own, logits[:rows], drafts[:, :width], positions, rule, **masked))
    return results


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
    sampler = Sampler(V, 2, backend="eager")
    for out, shape in (
        (sampler.sample(sampler.plan([]), torch.zeros(0, V), torch.arange(0), logprobs=SOME[0]), [0]),
        (
            sampler.verify(
                sampler.plan([], num_drafts=[]),
                torch.zeros(0, V),
                torch.zeros(0, 2, dtype=torch.int64),
                torch.arange(0),
                logprobs=SOME[0],
            ),
            [0, 3],
        ),
    ):
        layout = layout_of_outputs(SOME[0])
        assert {name for name, each in out.logprobs._asdict().items() if each is not None} == layout.keys()
        for name, (dtype, tail) in layout.items():
            each = getattr(out.logprobs, name)
            assert (each.dtype, [*each.shape]) == (dtype, [*shape, *tail])


def test_samplers_of_one_process_do_not_share_ids_or_temperatures():
    asked, logits, position = Logprobs(of="processed", token_ids=(3, 8)), torch.randn(1, V), torch.tensor([0])
    samplers = [Sampler(V, 2, backend="eager", captured_logprobs=[asked] * n) for n in (0, 1)]
    for temperature in (0.5, 2.0):
        for sampler, params in zip(samplers, (TOP_K_1, SamplingParams(temperature=temperature, seed=2)), strict=True):
            made = sampler.sample(sampler.plan([sampler.add_request(params)]), logits, position, logprobs=asked)
            law = oracle.law("processed", *[logits[0].tolist()] * 2, {"temperature": params.temperature})
            assert made.logprobs.given[0].tolist() == pytest.approx([law[3], law[8]], abs=2e-6)


@pytest.mark.parametrize("drafts", [False, True])
def test_edited_logits_replay_what_was_drawn(drafts):
    """The kept set is that of the definition, and the logprobs are within 2e-6, also of the rows of drafts."""
    source, sampler = random.Random(5), edited_sampler("eager", ROWS)
    requests = [random_request(source, V) for _ in range(ROWS)]
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


@pytest.mark.parametrize("backend", ["eager", "reference", "compiled"])
def test_logits_without_edits_are_copied_as_they_are(backend):
    sampler = Sampler(V, 2, backend=backend, logits_dtype=torch.bfloat16)
    plan, logits = sampler.plan([sampler.add_request(REQUESTS["full"])] * 2), torch.randn(2, V + 3).bfloat16()
    made = sampler.edited_logits(plan, logits, torch.arange(2))
    assert torch.equal(made, logits[:, :V].float())
    plan = sampler.plan([], num_drafts=[])
    assert sampler.edited_logits(plan, logits[:0], torch.arange(0)).shape == (0, V)


def test_compiled_steps_return_the_same():
    source, asked = random.Random(17), EVERYTHING[2]
    samplers = edited_sampler("compiled", 4), edited_sampler("eager", 4)
    requests = [random_request(source, V) for _ in range(3)]
    logits, positions = hard_logits(source, 9), torch.tensor([each.position for each in requests])
    given = random_mask(source, 9, V), torch.randint(V, (3, 2)), asked
    results = [taken(each, [r.added(each) for r in requests], logits, positions, given) for each in samplers]
    for left, right in zip(*results, strict=True):
        assert same(bare(left), bare(right))
        assert differing(left.logprobs, right.logprobs) == []
    alone = [
        each.verify(each.plan([0], num_drafts=[0]), logits[:1], given[1][:1, :0], positions[:1], logprobs=asked)
        for each in samplers
    ]
    assert differing(alone[0].logprobs, alone[1].logprobs) == []
