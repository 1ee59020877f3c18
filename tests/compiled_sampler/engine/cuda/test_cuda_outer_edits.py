"""Every call with edits, a mask and logprobs inside an engine's graph: laws, drafts and each rule, as on the CPU."""

import functools
import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from compiled_sampler import Logprobs, Plan, SampleOutputs, Sampler, VerifyOutputs
from compiled_sampler.modes import RULES
from tests.builders.edits import BOUNDED_EDITS, Request, V, edited_sampler, hard_logits, random_mask, random_request
from tests.builders.logprobs import differing

pytestmark = pytest.mark.gpu
ROWS, K, REPLAYS = 12, 2, 4
COUNTS = [2, 0, 1, 2, 2, 1, 0, 2, 2, 1, 2, 2]
"""Drafts of each request."""
ALL_ROWS, PROPOSED = ROWS + sum(COUNTS), sum(COUNTS)
ASKED = Logprobs(top=2, of="filtered", rank=True)
EDITS = (*BOUNDED_EDITS, "xtc", "top_n_sigma")


class Given(NamedTuple):
    """What a call reads, in tensors that an engine writes before each replay."""

    logits: Tensor
    """``[ALL_ROWS, V]``."""
    proposed: Tensor
    """``[PROPOSED, V]``."""
    mask: Tensor
    drafts: Tensor
    positions: Tensor

    def on(self, device: torch.device) -> "Given":
        """Copies there."""
        return Given(*(each.to(device, copy=True) for each in self))


class Side(NamedTuple):
    """A sampler that holds the requests."""

    sampler: Sampler
    slots: list[int]
    plans: tuple[Plan, Plan, Plan]
    """Without drafts, with ``COUNTS`` and with one draft of each request."""


def side(sampler: Sampler, requests: list[Request]) -> Side:
    """The sampler with the requests."""
    slots = [each.added(sampler) for each in requests]
    plans = sampler.plan(slots), sampler.plan(slots, num_drafts=COUNTS), sampler.plan(slots, num_drafts=[1] * ROWS)
    return Side(sampler, slots, plans)


def random_given(source: random.Random, requests: list[Request], step: int) -> Given:
    """The inputs of a step, of requests that have got as many tokens."""
    return Given(
        hard_logits(source, ALL_ROWS),
        hard_logits(source, PROPOSED),
        random_mask(source, ALL_ROWS, V),
        torch.tensor([[source.randrange(-1, V + 1) for _ in range(K)] for _ in range(ROWS)]),
        torch.tensor([each.position + step for each in requests]),
    )


def sample(on: Side, given: Given) -> Any:
    """Tokens and logprobs of the first row of logits for each request."""
    few = {"token_bitmask": given.mask[:ROWS], "logprobs": ASKED}
    return on.sampler.sample(on.plans[0], given.logits[:ROWS], given.positions, **few)


def probs(on: Side, given: Given) -> Any:
    """The law of every row."""
    law = on.sampler.probs(on.plans[1], given.logits, positions=given.positions, token_bitmask=given.mask)
    return (law,)


def verify(on: Side, given: Given, rule: str, *, of_logits: bool) -> Any:
    """Drafts that the caller names, judged; with or without the logits that they came from."""
    more = {"token_bitmask": given.mask, "logprobs": ASKED}
    if of_logits:
        more["draft_logits"] = given.proposed
    return on.sampler.verify(on.plans[1], given.logits, given.drafts, given.positions, rule, **more)


def draft_and_verify(on: Side, given: Given, rule: str) -> Any:
    """A draft for each request from the drafter's logits, then the target's judgement of it."""
    proposed, target = given.proposed[:ROWS], given.logits[: 2 * ROWS]
    few = {"token_bitmask": given.mask[: 2 * ROWS : 2].contiguous()}
    draft = on.sampler.draft(on.plans[0], proposed, given.positions, rule == "match", **few)
    more = {"token_bitmask": given.mask[: 2 * ROWS]}
    judged = on.sampler.verify(on.plans[2], target, [draft], given.positions, rule, **more)
    return *draft.drawn[:2], *judged


CALLS = {
    "sample": sample,
    "probs": probs,
    **{rule: functools.partial(verify, rule=rule, of_logits=False) for rule in RULES},
    "block of logits": functools.partial(verify, rule="block", of_logits=True),
    **{f"draft and {rule}": functools.partial(draft_and_verify, rule=rule) for rule in RULES},
}


@pytest.fixture(scope="module")
def samplers() -> tuple[Sampler, Sampler]:
    """One on the GPU and one on the CPU."""
    return edited_sampler("compiled", ROWS, device="cuda"), edited_sampler("eager", ROWS)


def listed(results: Any) -> Any:
    """Integers and laws as lists."""
    return [each.tolist() for each in results if isinstance(each, Tensor)]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_inside_an_engines_graph_returns_what_the_cpu_returns(samplers, call):
    source, step = random.Random(call), CALLS[call]
    requests = [random_request(source, V, EDITS) for _ in range(ROWS)]
    made, wanted = (side(each, requests) for each in samplers)
    given = random_given(source, requests, 0)
    held = given.on(made.sampler.device)
    step(made, held)  # compiles; what it wrote into the history is of no text
    for request, slot in zip(requests, made.slots, strict=True):
        made.sampler.set_history(slot, 0, [*request.prompt, *request.output])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(made, held)
    seen = set()
    for number in range(REPLAYS):
        given = random_given(source, requests, number)
        for there, here in zip(held, given, strict=True):
            there.copy_(here)
        graph.replay()
        told = step(wanted, given)
        assert listed(out) == listed(told), number
        if isinstance(out, SampleOutputs | VerifyOutputs) and out.logprobs is not None:
            assert differing(out.logprobs, told.logprobs) == [], number
        seen.add(str(listed(told)))
    assert len(seen) == REPLAYS
    for on in (made, wanted):
        for slot in on.slots:
            on.sampler.remove_request(slot)
