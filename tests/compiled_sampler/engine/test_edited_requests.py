"""The edits and the history of a request from its beginning to its end: preempted, in a used slot, told by others."""

import random
from itertools import count

import torch

from compiled_sampler import RowStatus, Sampler, SamplingParams
from tests.builders_edits import (
    EDITS,
    HISTORY,
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
