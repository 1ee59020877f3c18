"""Requests with edits draw what an unedited sampler draws from logits that the slow truth edited, on every path.

Also a request's edits and history from its beginning to its end: preempted, in a used slot, told by others.
"""

import math
import random
from functools import partial
from unittest import mock

import pytest
import torch

from compiled_sampler import RowStatus, Sampler, SamplingParams, Verification
from compiled_sampler.batch import tensors_of
from compiled_sampler.edits.names import MASK
from compiled_sampler.engine import step_runner
from compiled_sampler.engine.requests.edit_slots import RowLayout
from compiled_sampler.lowering.compiled_stages import CompiledStages
from tests.builders import custom_edits
from tests.builders.custom_edits import custom_sampler, random_inputs
from tests.builders.edits import (
    BOUNDED_EDITS,
    EDITS,
    HISTORY,
    Request,
    V,
    added_to,
    edited_rows,
    edited_sampler,
    hard_logits,
    plain_tokens,
    random_mask,
    random_request,
)
from tests.builders.sampler import SHARED_SLOTS, only_replays, planned, recorded
from tests.oracles import oracle_edits
from tests.tiers import tiers
from tests.torch_states import flushing

ROWS, STEPS = 16, 6
ROUNDS = [
    ("eager", 12, EDITS),
    ("compiled", 1, BOUNDED_EDITS),
    ("reference", 1, EDITS),
    ("eager", 63, EDITS),
    ("compiled", 4, EDITS),
]


@pytest.mark.parametrize(
    ("backend", "rounds", "edits"),
    tiers(ROUNDS[:3], ROUNDS),
    ids=lambda each: len(each) if isinstance(each, tuple) else each,
)
def test_random_requests_draw_what_the_slow_truth_edits(backend, rounds, edits):
    """Of up to 63 batches of 16: each token, status and end for six steps, with masks and without."""
    source, sampler = random.Random(11), edited_sampler(backend, SHARED_SLOTS)
    plain = Sampler(V, ROWS, backend="eager")
    for _ in range(rounds):
        requests = [random_request(source, V, edits) for _ in range(ROWS)]
        with added_to(requests, sampler) as [(_, slots)]:
            plan = sampler.plan(slots)
            for _ in range(STEPS):
                logits, positions = hard_logits(source, ROWS), torch.tensor([each.position for each in requests])
                mask = random_mask(source, ROWS, V) if source.random() < 0.4 else None
                made = sampler.sample(plan, logits, positions, token_bitmask=mask)
                edited = edited_rows(logits, requests, mask)
                wanted = plain_tokens(plain, requests, edited, positions)
                assert (made.token_ids.tolist(), made.status.tolist()) == wanted
                for row, (request, token) in enumerate(zip(requests, wanted[0], strict=True)):
                    ends = oracle_edits.stops(request.given)
                    assert bool(made.finished[row]) == (token < 0 or token in ends)
                    request.output.append(token)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    tiers(
        [("eager", torch.float32)], [("eager", torch.float32), ("eager", torch.float16), ("compiled", torch.bfloat16)]
    ),
    ids=str,
)
def test_streams_with_drafts_are_those_without(backend, dtype):
    """Under match, with penalties, bad words, masks by position and stops, whatever is drafted and however many.

    Compiled, drafts have one width, padded, which other tests compile too; eager, each step the width of its drafts.
    """
    source = random.Random(3)
    requests = [random_request(source, V) for _ in range(ROWS)]
    rows = hard_logits(source, ROWS * HISTORY, dtype).view(ROWS, HISTORY, V)
    masks = random_mask(source, ROWS * HISTORY, V).view(ROWS, HISTORY, -1)
    ends = [each.position + 12 for each in requests]
    sampler, most = edited_sampler(backend, SHARED_SLOTS, logits_dtype=dtype), 2 if backend == "compiled" else 3
    least = most if backend == "compiled" else 0

    def undrafted(requests=requests, masks=masks):
        return streamed(sampler, requests, rows, masks, ends, lambda row, position: [], least)

    plain, bare = undrafted(), [each._replace(given={**each.given, "repetition_penalty": 1.0}) for each in requests]
    assert {len(each) < 12 for each in plain} == {True, False}  # the control: some end early, masks and edits act
    assert plain not in (undrafted(masks=torch.full_like(masks, -1)), undrafted(bare))
    for wrong in (0.0, 0.4, 1.0):

        def drafter(row, position, wrong=wrong):
            known = plain[row][position - requests[row].position :][: source.randrange(most + 1)]
            return [token if source.random() >= wrong else source.randrange(-1, V + 1) for token in known]

        assert streamed(sampler, requests, rows, masks, ends, drafter, least) == plain


def streamed(sampler, requests, rows, masks, ends, drafter, least=0):
    """The tokens of each request up to its end, with drafts of ``drafter(row, position)``, padded to ``least``."""
    slots = [each.added(sampler) for each in requests]
    found = [list[int]() for _ in requests]
    live = {row: request.position for row, request in enumerate(requests)}
    while live:
        batch = sorted(live)
        drafts = [drafter(row, live[row])[: ends[row] - live[row] - 1] for row in batch]
        places = [(row, live[row] + n) for row, each in zip(batch, drafts, strict=True) for n in range(len(each) + 1)]
        width = max(least, *map(len, drafts))
        plan = sampler.plan([slots[row] for row in batch], num_drafts=[len(each) for each in drafts])
        made = sampler.verify(
            plan,
            torch.stack([rows[place] for place in places]),
            torch.tensor([[*each, *[-1] * (width - len(each))] for each in drafts]).long().view(len(batch), width),
            torch.tensor([live[row] for row in batch]),
            token_bitmask=torch.stack([masks[place] for place in places]),
        )
        for row, tokens, is_over in zip(batch, made.tolist(), made.finished.tolist(), strict=True):
            found[row] += tokens
            live[row] += len(tokens)
            if is_over or live[row] >= ends[row]:
                del live[row]
    for slot in slots:
        sampler.remove_request(slot)
    return found


@pytest.fixture(scope="module")
def replaying() -> Sampler:
    """Replays steps that were recorded with edits of the library and of users, which read tensors of a call or none."""
    few, ways = (*EDITS, "GreenList", "NoDigits"), [Verification("match", 2), Verification("rejection", 2)]
    every = [few, (MASK, *few), (MASK, *EDITS, *custom_edits.EDITS)]
    return recorded(custom_sampler("eager", 4, buckets=[4], captured_edits=every, verifications=ways))


@pytest.mark.parametrize(
    ("edits", "own", "masked"),
    [
        (["penalties"], ["NoDigits"], False),
        (["logit_bias", "stops"], ["GreenList"], True),
        ([], [*custom_edits.EDITS], True),
        (EDITS, [], True),
    ],
)
def test_recorded_steps_draw_the_same_and_write_the_history(replaying, edits, own, masked):
    """Captured with all edits, replayed for batches of some of them, if these bring the same tensors."""
    source, wanted = random.Random(13), custom_sampler("eager", 4)
    requests = [random_request(source, V, edits) for _ in range(3)]
    requests = [
        each._replace(given={**each.given, "extra_args": {name: custom_edits.OF_EDIT[name] for name in own}})
        for each in requests
    ]
    with added_to(requests, replaying, wanted) as sides, only_replays(replaying, 6):
        for step in range(3):
            logits, positions = hard_logits(source, 9), torch.tensor([each.position + step for each in requests])
            drafts, mask = torch.randint(V, (3, 2)), random_mask(source, 9, V) if masked else None
            inputs, results = random_inputs(9, step), []
            few = {"token_bitmask": mask if mask is None else mask[:3]}
            few["edit_inputs"] = {name: each[:3] for name, each in inputs.items()}
            whole = {"token_bitmask": mask, "edit_inputs": inputs}
            for sampler, slots in sides:
                drawn = sampler.sample(sampler.plan(slots, "full"), logits[:3], positions, **few)
                plan = sampler.plan(slots, "full", num_drafts=[2] * 3)
                judged = sampler.verify(plan, logits, drafts, positions + 1, "rejection", **whole)
                results.append([each.tolist() for out in (drawn, judged) for each in tensors_of(out)])
            assert results[0] == results[1]


# From the beginning of a request to its end.


def test_a_request_that_is_preempted_goes_on_with_the_same_tokens():
    source = random.Random(5)
    requests = [random_request(source, V, [each for each in EDITS if each != "min_tokens"]) for _ in range(ROWS)]
    sampler = edited_sampler("eager", ROWS + 3)
    rows = hard_logits(source, ROWS * 8).view(8, ROWS, V)

    def continued(resumes: bool):
        own = [Request(each.given, each.prompt, [*each.output]) for each in requests]
        slots = [each.added(sampler) for each in own]
        for step in range(8):
            if resumes and step in (3, 5):
                for n in range(step, ROWS, 3):
                    sampler.remove_request(slots[n])
                blocker = sampler.add_request(SamplingParams(seed=1, frequency_penalty=1.0), [1] * HISTORY)
                for n in range(step, ROWS, 3):
                    slots[n] = own[n].added(sampler)
                sampler.remove_request(blocker)
            positions = torch.tensor([each.position for each in own])
            tokens = sampler.sample(sampler.plan(slots), rows[step], positions).tolist()
            for each, token in zip(own, tokens, strict=True):
                each.output.append(max(token, 0))
        for slot in slots:
            sampler.remove_request(slot)
        return [each.output for each in own]

    assert continued(True) == continued(False)


@pytest.mark.parametrize("num_requests", tiers([1_000], [1_000, 10_000]))
def test_slots_that_are_used_again_keep_nothing(num_requests):
    """Requests through three slots, whose tables and history are poisoned where no request is."""
    source = random.Random(7)
    sampler, plain = edited_sampler("eager", 3), Sampler(V, 3, backend="eager")
    slots, requests, logits = list[int](), list[Request](), torch.randn(3, V)
    for _ in range(num_requests):
        if len(slots) == 3 or (slots and source.random() < 0.4):
            slot = slots.pop(place := source.randrange(len(slots)))
            sampler.remove_request(slot)
            del requests[place]
            poison(sampler, slot)
        requests.append(random_request(source, V, ["penalties", "logit_bias", "bad_words"]))
        slots.append(requests[-1].added(sampler))
        if source.random() < 0.1:
            positions = torch.tensor([each.position for each in requests])
            drawn = sampler.sample(sampler.plan(slots), logits[: len(slots)], positions)
            edited = edited_rows(logits[: len(slots)], requests)
            assert drawn.token_ids.tolist() == plain_tokens(plain, requests, edited, positions)[0]
            for slot in slots:
                sampler.remove_request(slot)
                poison(sampler, slot)
            slots.clear()
            requests.clear()


def poison(sampler: Sampler, slot: int) -> None:
    edits = sampler._edits
    if not edits._pending and slot in edits._words:
        edits.rows[slot, : edits._words[slot]] = 7
        edits.history.table.entries[slot] = 3


@pytest.mark.parametrize("last", [{"presence_penalty": 1.0}, {"top_n_sigma": 1.0}, {}])
def test_what_a_slot_had_is_gone_though_a_request_between_never_ran(last):
    """Rows with lists are sent whole, others without theirs: what was sent and what waits must both be undone."""
    sampler, logits = Sampler(V, 2, backend="eager", history_len=8), torch.zeros(2, V)
    ran = {"allowed_token_ids": [4, 6]}
    mate = Request({"temperature": 0.0, "seed": 1, **ran}, [1, 2], [])  # its step reads the mask of each row
    slots = [sampler.add_request(mate.params, mate.prompt), -1]
    for given in (ran, {"dry_multiplier": 1.0}, {"frequency_penalty": 2.0}, last, {"typical_p": 0.5}, last):
        request = Request({"temperature": 0.5, "seed": 1, **given}, [1, 2], [])
        slots[1] = sampler.add_request(request.params, request.prompt)
        if given in (ran, last):
            edited = sampler.edited_logits(sampler.plan(slots), logits, torch.tensor([2, 2]))
            assert torch.equal(edited, edited_rows(logits, [mate, request]))
        sampler.remove_request(slots[1])


def test_tokens_of_others_are_written_by_set_history():
    """Also in several blocks; what stood behind them is forgotten, and is not seen from a later position."""
    source = random.Random(8)
    request = Request({"temperature": 0.0, "seed": 1, "frequency_penalty": 2.0}, [1, 2], [])
    sampler, logits = Sampler(V, 1, backend="eager", history_len=200), torch.randn(1, V)
    slot = request.added(sampler)
    plan, text = sampler.plan([slot]), list[int]()
    for position, number in ((2, 150), (4, 2), (5, 70), (2, 0), (2, 9)):
        tokens = [source.randrange(5) for _ in range(number)]
        sampler.set_history(slot, position, tokens)
        text = [*text[: position - 2], *tokens]
        for read in (2 + len(text), 190):
            found = sampler.edited_logits(plan, logits, torch.tensor([read]))
            assert torch.equal(found, edited_rows(logits, [request._replace(output=text)]))


def test_a_warmup_or_capture_between_steps_changes_no_history():
    """Captures run a step first; with the slots of the last batch it would write what that step draws."""
    source = random.Random(3)
    made, wanted = (edited_sampler("eager", 3, captured_edits=[EDITS], buckets=[4]) for _ in range(2))
    recorded(made)
    requests = [random_request(source, V, ["penalties", "bad_words"]) for _ in range(3)]
    slots, others = [each.added(made) for each in requests], [each.added(wanted) for each in requests]
    logits, positions = torch.zeros(3, V), torch.tensor([each.position for each in requests])
    for step in range(6):
        logits.copy_(hard_logits(source, 3))
        found = made.sample(made.plan(slots), logits, positions)
        assert found.tolist() == wanted.sample(wanted.plan(others), logits, positions).tolist()
        positions += 1
        before = made._edits.history.table.entries[slots].clone()
        if step % 2:
            made.bind(positions=positions)
        made.warmup(modes=["full"])
        assert torch.equal(made._edits.history.table.entries[slots], before)


def test_positions_out_of_range_and_padding_write_to_no_request():
    request = Request({"seed": 1, "presence_penalty": 1.0, "temperature": 0.0, "logit_bias": {3: 5.0}}, [1, 2, 3], [])
    sampler = edited_sampler("eager", 2)
    slots = [request.added(sampler), request.added(sampler)]
    plan, entries = sampler.plan([*slots, -1]), sampler._edits.history.table.entries
    before = entries[slots].clone()
    for position in (-1, -17, HISTORY, 2**40):
        sampler.sample(plan, torch.zeros(3, V), torch.tensor([position, position, 3]))
        assert torch.equal(entries[slots], before)
    logits = torch.zeros(3, V)
    sampler.sample(plan, logits, torch.tensor([3, 3, 3]), consume_logits=True)
    assert logits[:2].any(1).all()
    assert not logits[2].any()


def test_a_rejected_draft_is_in_no_later_history():
    """Also if the next step leaves a gap: the places of rejected drafts hold no token."""
    request = Request({"temperature": 0.0, "seed": 1, "repetition_penalty": 2.0**20}, [1, 2, 3], [])
    sampler, rows = edited_sampler("eager", 1), torch.zeros(4, V)
    rows[:, 30], rows[:, 21] = 2.0, 1.0
    slot = request.added(sampler)
    made = sampler.verify(sampler.plan([slot], num_drafts=[3]), rows, torch.tensor([[20, 21, 21]]), torch.tensor([3]))
    assert made.tolist() == [[30]]
    edited = sampler.edited_logits(sampler.plan([slot]), rows[:1], torch.tensor([8]))
    assert torch.equal(edited, edited_rows(rows[:1], [request._replace(output=[30])]))


@pytest.mark.parametrize("flushes", [True, False])
def test_edits_take_denormals_for_zeros_in_every_mode_of_the_cpu(flushes):
    given = {"temperature": 0.0, "seed": 1, "logit_bias": {5: -1.18e-38, 6: 0.0}, "repetition_penalty": 2.0}
    request, plain = Request(given, [7], [8]), Request({"temperature": 0.0, "seed": 2}, [], [])
    logits = torch.full((2, V), -1.0)
    logits[:, 5], logits[:, 6], logits[:, 7], logits[:, 8] = 1.2e-38, 1e-39, 1.2e-38, -1e-40
    wanted = edited_rows(logits, [request, plain])
    sampler = edited_sampler("eager", 2)
    plan = sampler.plan([request.added(sampler), plain.added(sampler)])
    with flushing(flushes):
        found = sampler.edited_logits(plan, logits, torch.tensor([2, 0]))
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
    assert found[0, 5] == 0.0
    assert found[1, 5] == logits[1, 5]


def test_a_position_beyond_the_history_is_told():
    (sampler, plan), logits = (
        planned(SamplingParams(seed=1, presence_penalty=1.0), history_len=HISTORY),
        torch.randn(1, V),
    )
    for position, is_told in ((HISTORY - 1, False), (HISTORY, False), (HISTORY + 1, True), (2**62, True)):
        status = sampler.sample(plan, logits, torch.tensor([position])).status.item()
        assert bool(status & RowStatus.HISTORY_EXCEEDED) == is_told
    plain = edited_sampler("eager", 2)
    slots = [plain.add_request(SamplingParams(seed=1), [1] * (HISTORY + 9)), plain.add_request(SamplingParams(seed=2))]
    assert plain.sample(plain.plan(slots), torch.randn(2, V), torch.tensor([HISTORY + 9, 3])).status.tolist() == [0, 0]
    plain.remove_request(slots[1])
    slots[1] = plain.add_request(SamplingParams(seed=2, presence_penalty=1.0))
    status = plain.sample(plain.plan(slots), torch.randn(2, V), torch.tensor([HISTORY + 9, 3])).status
    assert status.tolist() == [0, 0]


def test_logits_that_cannot_be_written_are_not_consumed():
    request = random_request(random.Random(1), V, ["penalties"])
    for logits in (torch.zeros(2, V, dtype=torch.bfloat16), torch.zeros(1, V).expand(2, V)):
        sampler = edited_sampler("eager", 2, logits_dtype=logits.dtype)
        plan = sampler.plan([request.added(sampler), request.added(sampler)])
        for leave in (True, "restore"):
            with pytest.raises(ValueError, match="consume_logits must be False"):
                sampler.sample(plan, logits, torch.tensor([3, 4]), consume_logits=leave)
        for leave, other in ((1, TypeError), (None, TypeError), ("restored", ValueError), ("", ValueError)):
            with pytest.raises(other, match="consume_logits must be a bool"):
                sampler.sample(plan, torch.zeros_like(logits), torch.tensor([3, 4]), consume_logits=leave)


@pytest.mark.parametrize("leave", ["consume_logits", "restore_logits"])
def test_a_warmup_leaves_bound_logits_that_edits_may_write_as_they_are(monkeypatch, leave):
    """Also while stages are listed, whose results are zeros then; to the bit, and requests have edits already."""
    monkeypatch.setattr(CompiledStages, "_compile", lambda _, code: partial(code.stage, **code.static))
    source, edits, empty = random.Random(4), (leave, *BOUNDED_EDITS), step_runner.TensorSpec.empty
    ways = {"captured_edits": [edits, edits[:1] + edits[2:]], "verifications": [Verification("match", 2)]}
    sampler, logits = edited_sampler("compiled", 4, **ways), hard_logits(source, 12)
    for _ in range(4):
        random_request(source, V, BOUNDED_EDITS).added(sampler)
    before, made = logits.view(torch.int32).clone(), list[tuple[int, ...]]()
    monkeypatch.setattr(step_runner.TensorSpec, "empty", lambda spec: made.append(spec.shape) or empty(spec))
    sampler.bind_logits(logits)
    sampler.warmup(modes=["full"])
    assert torch.equal(logits.view(torch.int32), before)
    assert logits.shape in made  # as much memory once more for stages that are listed


@pytest.mark.parametrize(
    ("params", "prompt", "match"),
    [
        ({"frequency_penalty": 0.5}, [1] * (HISTORY + 1), "history_len"),
        ({"eos_token_id": V}, [], "^eos_token_id must be below vocab_size"),
        ({"stop_token_ids": range(33)}, [], r"stops of a request must be at most 32, got 33; .*EditSizes\(stops=33\)"),
        ({"bad_words_token_ids": [[1] * 9]}, [], "bad_word_len"),
        ({"allowed_token_ids": [V, V + 5]}, [], rf"must have a token below vocab_size {V}, got {V} and above"),
        ({"logit_bias": {V: -math.inf}}, [], "logit_bias must be below vocab_size"),
        ({"frequency_penalty": 0.5}, [-1], "prompt_token_ids must be >= 0, got -1"),
    ],
)
def test_what_a_slot_has_no_room_for_is_refused_and_nothing_is_taken(params, prompt, match):
    sampler = edited_sampler("eager", 1)
    with pytest.raises(ValueError, match=match):
        sampler.add_request(SamplingParams(seed=1, **params), prompt)
    assert sampler.num_free_slots == 1


@pytest.mark.parametrize("way", ["prompt", "output", "set_history"])
def test_ids_that_no_logit_has_count_for_nothing_in_a_history_and_keep_their_positions(way):
    """Prompts of multimodal models hold placeholders of images."""
    text = [2**40, V, 9, 5, 6, V]
    laws = [
        SamplingParams(repetition_penalty=2.0, seed=1),
        SamplingParams(dry_multiplier=1.0, dry_allowed_length=1, seed=1),
        SamplingParams(bad_words_token_ids=[[6, 9], [5, 6, 8]], bad_words_scope="all", seed=1),
    ]
    changed = [{5: 0.5, 6: 0.5, 9: 0.5}, {}, {}]
    sampler = edited_sampler("eager", len(laws))
    halves = {"prompt": (text, []), "output": ([], text), "set_history": ([], [])}[way]
    slots = [sampler.add_request(law, *halves) for law in laws]
    for slot in slots if way == "set_history" else ():
        sampler.set_history(slot, 0, text)
    ends = torch.tensor([len(text)] * len(laws))
    rows = sampler.edited_logits(sampler.plan(slots), torch.ones(len(laws), V), ends)
    assert [{n: x for n, x in enumerate(row) if x != 1.0} for row in rows.tolist()] == changed
    before = sampler.edited_logits(sampler.plan(slots), torch.ones(len(laws), V), ends - 1)  # behind token 6
    assert [token for token in (8, 9) if before[2, token] == -math.inf] == [8, 9]


def test_the_allowed_tokens_that_a_logit_has_are_those_that_may_be_drawn():
    sampler, plan = planned(SamplingParams(seed=1, allowed_token_ids=[7, V, V + 31]))
    kept = sampler.edited_logits(plan, torch.zeros(1, V), torch.tensor([0])).isfinite()
    assert kept.nonzero().tolist() == [[0, 7]]


def test_edits_without_a_history_and_requests_that_stand_twice_are_refused():
    bare, sampler = Sampler(V, 1, backend="eager"), edited_sampler("eager", 1)
    with pytest.raises(ValueError, match="history_len must be > 0 for penalties"):
        bare.add_request(SamplingParams(seed=1, presence_penalty=1.0))
    slot = sampler.add_request(SamplingParams(seed=1, presence_penalty=1.0))
    with pytest.raises(ValueError, match="slots must differ"):
        sampler.plan([slot, slot])
    with pytest.raises(ValueError, match="positions must be given for penalties"):
        sampler.probs(sampler.plan([slot]), torch.zeros(1, V))
    call = sampler.plan([slot]), torch.zeros(1, V), torch.tensor([1])
    with pytest.raises(TypeError, match=r"token_bitmask must be torch\.int32"):
        sampler.sample(*call, token_bitmask=torch.ones(1, 5))
    with pytest.raises(ValueError, match=r"token_bitmask must be \[1, >= 5\]"):
        sampler.sample(*call, token_bitmask=torch.ones(1, 4).int())


@pytest.mark.parametrize("interrupted", ["row_of", "num_words_of"])
@pytest.mark.parametrize("edits", [{"logit_bias": {7: 50.0}}, {"allowed_token_ids": [7]}], ids=["bias", "allowed"])
def test_an_interrupted_request_leaves_no_edits_of_the_one_before_to_the_next(edits, interrupted):
    sampler = Sampler(97, 2, backend="eager", history_len=32)
    first = sampler.add_request(SamplingParams(temperature=0.0, **edits))
    sampler.sample(sampler.plan([first]), torch.randn(1, 97), torch.tensor([3]))
    sampler.remove_request(first)
    with mock.patch.object(RowLayout, interrupted, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        sampler.add_request(SamplingParams(frequency_penalty=0.5))
    plain = sampler.add_request(SamplingParams(temperature=0.0))
    edited = sampler.add_request(SamplingParams(temperature=0.0, **{**edits, "logit_bias": {1: 1.0}}))
    logits = torch.zeros(2, 97)
    logits[:, 3] = 0.5
    assert sampler.sample(sampler.plan([plain, edited]), logits, torch.tensor([3, 3])).token_ids[0] == 3
