"""Requests with edits draw what an unedited sampler draws from logits that the slow truth edited, on every path."""

import random

import pytest
import torch

from compiled_sampler import Sampler, SamplingParams, Verification
from compiled_sampler.batch import tensors_of
from compiled_sampler.edits.names import MASK
from tests.builders import custom_edits
from tests.builders.custom_edits import custom_sampler, random_inputs
from tests.builders.edits import (
    BOUNDED_EDITS,
    EDITS,
    HISTORY,
    V,
    added_to,
    edited_rows,
    edited_sampler,
    hard_logits,
    plain_tokens,
    random_mask,
    random_request,
)
from tests.builders.sampler import SHARED_SLOTS, only_replays, recorded
from tests.oracles import oracle_edits
from tests.tiers import tiers

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


def test_edited_logits_have_no_gradient_that_leaves_penalties_out():
    sampler = Sampler(V, 1, backend="eager", history_len=8)
    plan = sampler.plan([sampler.add_request(SamplingParams(repetition_penalty=2.0), [1, 2])])
    logits = torch.randn(1, V, requires_grad=True)
    edited = sampler.edited_logits(plan, logits, torch.tensor([2]))
    assert not edited.requires_grad
    assert not torch.equal(edited, logits)
