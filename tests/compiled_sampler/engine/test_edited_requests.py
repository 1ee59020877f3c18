"""The edits and the history of a request from its beginning to its end: preempted, in a used slot, told by others."""

import random
from itertools import count

import pytest
import torch

from compiled_sampler import RowStatus, Sampler, SamplingParams
from compiled_sampler.batch import tensors_of
from tests.builders_edits import (
    EDITS,
    HISTORY,
    OF_EDIT,
    Request,
    V,
    edited_rows,
    edited_sampler,
    hard_logits,
    plain_tokens,
    random_request,
)

ROWS = 16


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
            for each, token in zip(
                own, sampler.sample(sampler.plan(slots), rows[step], positions).tolist(), strict=True
            ):
                each.output.append(max(token, 0))
        for slot in slots:
            sampler.remove_request(slot)
        return [each.output for each in own]

    assert continued(True) == continued(False)


def test_slots_that_are_used_again_keep_nothing():
    """10,000 requests through three slots, whose tables and history are poisoned where no request is."""
    source = random.Random(7)
    sampler, plain = edited_sampler("eager", 3), Sampler(V, 3, backend="eager")
    slots, requests, logits = list[int](), list[Request](), torch.randn(3, V)
    seen = count()
    while next(seen) < 10_000:
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
    edits = sampler._planner._edits
    if not edits.is_pending and slot in edits._edited:
        edits.rows[slot] = 7
        edits.history.table.entries[slot] = 3


def test_tokens_of_others_are_written_by_set_history():
    request = Request({"temperature": 0.0, "seed": 1, "frequency_penalty": 2.0}, [1, 2], [])
    sampler, logits = edited_sampler("eager", 1), torch.zeros(1, V)
    slot = request.added(sampler)
    sampler.set_history(slot, 2, [0] * 70 if HISTORY > 72 else [0] * 20)
    sampler.set_history(slot, 4, [5, 0])
    plan = sampler.plan([slot])
    logits[0, 0] = 5.0
    told = sampler.probs(plan, logits, positions=torch.tensor([6]))
    wanted = edited_rows(logits, [request._replace(output=[0, 0, 5, 0])])
    assert told.argmax() == wanted.argmax()
    assert sampler.sample(plan, logits, torch.tensor([6])).token_ids.item() == int(wanted.argmax())
    later = sampler.probs(plan, logits, positions=torch.tensor([20]))  # what stood behind is forgotten
    assert later.argmax() == edited_rows(logits, [request._replace(output=[0, 0, 5, 0, int(wanted.argmax())])]).argmax()


def test_a_position_beyond_the_history_is_told():
    sampler = edited_sampler("eager", 1)
    slot = sampler.add_request(SamplingParams(seed=1, presence_penalty=1.0))
    plan, logits = sampler.plan([slot]), torch.randn(1, V)
    for position, is_told in ((HISTORY - 1, False), (HISTORY, False), (HISTORY + 1, True), (2**62, True)):
        status = sampler.sample(plan, logits, torch.tensor([position])).status.item()
        assert bool(status & RowStatus.HISTORY_EXCEEDED) == is_told


@pytest.mark.parametrize("edits", [["penalties", "logit_bias"], ["allowed_token_ids", "penalties"]])
def test_logits_that_may_be_consumed_give_the_same_tokens(edits):
    """Written in place where nothing is masked, else left as they are."""
    source = random.Random(2)
    requests = [random_request(source, V, edits)._replace(given={**OF_EDIT[edits[0]], "seed": n}) for n in range(4)]
    sampler, logits = edited_sampler("eager", 4), torch.randn(4, V + 3)
    rows, positions = torch.randn(12, V), torch.tensor([each.position for each in requests])
    slots = [each.added(sampler) for each in requests]
    plan, plan_of = sampler.plan(slots), sampler.plan(slots, num_drafts=[2] * 4)
    drafts = torch.randint(V, (4, 2))
    for given, call in (
        (logits, lambda x, **options: sampler.sample(plan, x, positions, **options)),
        (rows, lambda x, **options: sampler.verify(plan_of, x, drafts, positions, "rejection", **options)),
    ):
        wanted, consumed = call(given.clone()), given.clone()
        found = call(consumed, consume_logits=True)
        assert [each.tolist() for each in tensors_of(found)] == [each.tolist() for each in tensors_of(wanted)]
        assert torch.equal(consumed, given) == ("allowed_token_ids" in edits)
        assert torch.equal(consumed[:, V:], given[:, V:])


def test_logits_that_cannot_be_written_are_not_consumed():
    request = random_request(random.Random(1), V, ["penalties"])
    for dtype, logits, error in (
        (torch.bfloat16, torch.zeros(2, V, dtype=torch.bfloat16), ValueError),
        (torch.float32, torch.zeros(1, V).expand(2, V), ValueError),
    ):
        sampler = edited_sampler("eager", 2, logits_dtype=dtype)
        plan = sampler.plan([request.added(sampler), request.added(sampler)])
        with pytest.raises(error, match="consume_logits must be False"):
            sampler.sample(plan, logits, torch.tensor([3, 4]), consume_logits=True)
        with pytest.raises(TypeError, match="consume_logits must be a bool"):
            sampler.sample(plan, torch.zeros(2, V, dtype=dtype), torch.tensor([3, 4]), consume_logits=1)


@pytest.mark.parametrize(
    ("params", "prompt", "match"),
    [
        ({"frequency_penalty": 0.5}, [1] * (HISTORY + 1), "history_len"),
        ({"frequency_penalty": 0.5}, [V], "prompt_token_ids must be below vocab_size"),
        ({"logit_bias": {V: 1.0}}, [], "logit_bias must be below vocab_size"),
        ({"stop_token_ids": range(33)}, [], r"stops of a request must be at most 32, got 33; .*EditSizes\(stops=33\)"),
        ({"bad_words_token_ids": [[1] * 9]}, [], "bad_word_len"),
        ({"allowed_token_ids": [1, V]}, [], "allowed_token_ids"),
    ],
)
def test_what_a_slot_has_no_room_for_is_refused_and_nothing_is_taken(params, prompt, match):
    sampler = edited_sampler("eager", 1)
    with pytest.raises(ValueError, match=match):
        sampler.add_request(SamplingParams(seed=1, **params), prompt)
    assert sampler.num_free_slots == 1


def test_edits_without_a_history_and_requests_that_stand_twice_are_refused():
    bare, sampler = Sampler(V, 1, backend="eager"), edited_sampler("eager", 1)
    with pytest.raises(ValueError, match="history_len must be > 0 for penalties"):
        bare.add_request(SamplingParams(seed=1, presence_penalty=1.0))
    slot = sampler.add_request(SamplingParams(seed=1, presence_penalty=1.0))
    with pytest.raises(ValueError, match="slots must differ"):
        sampler.plan([slot, slot])
    with pytest.raises(ValueError, match="positions must be given for penalties"):
        sampler.probs(sampler.plan([slot]), torch.zeros(1, V))
    with pytest.raises(TypeError, match=r"token_bitmask must be torch\.int32"):
        sampler.sample(sampler.plan([slot]), torch.zeros(1, V), torch.tensor([1]), token_bitmask=torch.ones(1, 5))
    mask = torch.ones(1, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"token_bitmask must be \[1, >= 5\]"):
        sampler.sample(sampler.plan([slot]), torch.zeros(1, V), torch.tensor([1]), token_bitmask=mask)
