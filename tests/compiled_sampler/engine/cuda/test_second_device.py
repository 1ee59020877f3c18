"""A sampler on the second of two GPUs while the first is the current one: tokens of the CPU, memory of its own GPU."""

import random

import pytest
import torch

from compiled_sampler import Logprobs, Sampler, Verification
from compiled_sampler.modes import RULES
from tests.builders.edits import BOUNDED_EDITS, V, edited_sampler, hard_logits, random_mask, random_request
from tests.builders.logprobs import differing
from tests.builders.sampler import REQUESTS, drawn, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
FIRST, SECOND, ROWS, K = "cuda:0", "cuda:1", 12, 2


@pytest.fixture
def nothing_on_the_first():
    """The test leaves the current device and the memory of the first one as they were."""
    torch.zeros(1, device=FIRST)
    before = torch.cuda.memory_allocated(FIRST)
    yield
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(FIRST) <= before  # what another test left there may go meanwhile


@pytest.mark.usefixtures("nothing_on_the_first")
@pytest.mark.parametrize("backend", ["eager", "compiled", "graph"])
@pytest.mark.parametrize("mode", list(REQUESTS))
def test_every_mode_draws_there_what_the_cpu_draws(mode, backend):
    logits = 3 * torch.randn(ROWS, V, generator=torch.Generator().manual_seed(1))
    made, reference = Sampler(V, ROWS, SECOND, backend=backend, buckets=[ROWS]), Sampler(V, ROWS, backend="eager")
    if backend == "graph":
        made.warmup(modes=[mode])
    for shift in (0, 5):
        requests = [REQUESTS[mode]] * ROWS, logits.roll(shift, 1), torch.arange(ROWS) + shift, mode
        assert same(drawn(made, *requests), drawn(reference, *requests))


@pytest.mark.usefixtures("nothing_on_the_first")
@pytest.mark.parametrize("backend", ["eager", "compiled", "graph"])
def test_edits_masks_logprobs_and_each_rule_give_there_what_the_cpu_gives(backend):
    source, wanted = random.Random(backend), Logprobs(top=3, of="filtered", rank=True)
    options = {}
    if backend == "graph":
        options = {
            "captured_edits": [("token_bitmask", *BOUNDED_EDITS)],
            "captured_logprobs": [wanted],
            "verifications": [Verification(rule, K) for rule in RULES],
        }
    there = edited_sampler(backend, ROWS, device=SECOND, buckets=[ROWS], **options)
    if backend == "graph":
        there.warmup(modes=["full"])
    requests = [random_request(source, V, BOUNDED_EDITS) for _ in range(ROWS)]
    x, mask = hard_logits(source, ROWS * (K + 1)), random_mask(source, ROWS * (K + 1), V)
    drafts, positions = torch.randint(-1, V + 1, (ROWS, K)), torch.tensor([each.position for each in requests])
    results = []
    for sampler in (there, edited_sampler("eager", ROWS)):
        slots = [each.added(sampler) for each in requests]
        given = [each.to(sampler.device) for each in (x, mask, drafts, positions)]
        asked = {"token_bitmask": given[1][:ROWS], "logprobs": wanted}
        made = [sampler.sample(sampler.plan(slots), given[0][:ROWS], given[3], **asked)]
        plan = sampler.plan(slots, num_drafts=[K] * ROWS)
        for rule in RULES:
            made.append(
                sampler.verify(plan, given[0], given[2], given[3], rule, token_bitmask=given[1], logprobs=wanted)
            )
        results.append(made)
    for found, told in zip(*results, strict=True):
        assert {each.device for each in found[:2]} == {torch.device(SECOND)}
        assert [each.tolist() for each in found[:2]] == [each.tolist() for each in told[:2]]
        assert differing(found.logprobs, told.logprobs) == []


def test_a_sampler_on_each_of_two_devices_in_turns():
    logits = 3 * torch.randn(ROWS, V, generator=torch.Generator().manual_seed(2))
    params = [REQUESTS[mode] for mode in REQUESTS] * 2
    reference = drawn(Sampler(V, ROWS, backend="eager"), params, logits)
    both = [Sampler(V, ROWS, device, backend="graph", buckets=[ROWS]) for device in (SECOND, FIRST)]
    for sampler in both:
        sampler.warmup(modes=["full"])
    for _ in range(3):
        for sampler in both:
            assert same(drawn(sampler, params, logits), reference)
