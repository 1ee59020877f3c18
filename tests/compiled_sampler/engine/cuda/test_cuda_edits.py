"""Edits on a GPU: captured, inside an engine's graph, without a wait or an allocation, as on the CPU."""

import random

import pytest
import torch

from compiled_sampler import SampleOutputs, Sampler, SamplingParams, Verification
from compiled_sampler.batch import tensors_of
from tests.builders.edits import EDITS, FILTERS, OF_EDIT, V, edited_sampler, hard_logits, random_mask, random_request
from tests.builders.filters import hard_rows, same_bits
from tests.no_waits import no_waits

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]
ROWS, STEPS = 16, 4
EVERY = [EDITS, ("token_bitmask", *EDITS)]


@pytest.fixture(scope="module")
def captured():
    """A sampler on the GPU whose steps are captured with all edits, in the mode that covers every request."""
    ways = [Verification("match", 3), Verification("rejection", 3)]
    made = edited_sampler("graph", ROWS, device="cuda", buckets=[ROWS], captured_edits=EVERY, verifications=ways)
    made.warmup(modes=["full"])
    return made


def both(captured, requests):
    """The sampler on the GPU and one on the CPU, each with the slots of the requests."""
    wanted = edited_sampler("eager", ROWS)
    return (captured, [each.added(captured) for each in requests]), (wanted, [each.added(wanted) for each in requests])


@pytest.mark.parametrize(
    "edits", [EDITS, ("penalties",), ("logit_bias", "stops"), ("bad_words", "min_tokens"), FILTERS]
)
def test_captured_steps_draw_what_the_cpu_draws(captured, edits):
    source = random.Random(str(edits))
    requests = [random_request(source, V, edits) for _ in range(ROWS)]
    sides = both(captured, requests)
    before = captured.statistics()
    for step in range(STEPS):
        positions = torch.tensor([each.position + 4 * step for each in requests])
        mask, drafts = random_mask(source, 4 * ROWS, V), torch.randint(-1, V + 1, (ROWS, 3))
        rows = hard_logits(source, 4 * ROWS)
        results = []
        for sampler, slots in sides:
            there = sampler.device
            plan, plan_of = sampler.plan(slots), sampler.plan(slots, num_drafts=[3] * ROWS)
            given = [each.to(there) for each in (rows, positions, mask, drafts)]
            drawn = sampler.sample(plan, given[0][:ROWS], given[1], token_bitmask=given[2][:ROWS])
            plain = sampler.sample(plan, given[0][:ROWS], given[1]) if step % 2 else drawn
            rule = ("match", "rejection")[step % 2]
            made = sampler.verify(plan_of, given[0], given[3], given[1], rule, token_bitmask=given[2])
            results.append([each.tolist() for out in (drawn, plain, made) for each in tensors_of(out)])
        assert results[0] == results[1]
    after = captured.statistics()
    assert after.direct_runs == before.direct_runs
    assert after.captures == before.captures
    for sampler, slots in sides:
        for slot in slots:
            sampler.remove_request(slot)


def test_a_captured_step_neither_waits_nor_allocates(captured):
    source = random.Random(1)
    requests = [random_request(source, V) for _ in range(ROWS)]
    slots = [each.added(captured) for each in requests]
    plan, logits = captured.plan(slots), torch.randn(ROWS, V, device="cuda")
    positions = torch.tensor([each.position for each in requests], device="cuda")
    fields = [torch.zeros(ROWS, dtype=dtype, device="cuda") for dtype in (torch.int64, torch.int32, torch.bool)]
    out = SampleOutputs(*fields)
    captured.sample(plan, logits, positions, out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_waits():
        for _ in range(3):
            captured.sample(plan, logits, positions, out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    for slot in slots:
        captured.remove_request(slot)


def test_a_step_inside_an_engines_graph_reads_and_writes_the_history():
    source = random.Random(4)
    requests = [random_request(source, V) for _ in range(ROWS)]
    made, wanted = edited_sampler("compiled", ROWS, device="cuda"), edited_sampler("eager", ROWS)
    slots, others = [each.added(made) for each in requests], [each.added(wanted) for each in requests]
    plan, logits = made.plan(slots), torch.zeros(ROWS, V, device="cuda")
    positions = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
    made.sample(plan, logits, positions + 40)
    for request, slot in zip(requests, slots, strict=True):  # what that call wrote is of no text
        made.set_history(slot, 0, [*request.prompt, *request.output])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = made.sample(plan, logits, positions)
    for step in range(5):
        rows, where = hard_logits(source, ROWS), torch.tensor([each.position + step for each in requests])
        logits.copy_(rows)
        positions.copy_(where)
        graph.replay()
        told = wanted.sample(wanted.plan(others), rows, where)
        assert [each.tolist() for each in tensors_of(out)] == [each.tolist() for each in tensors_of(told)]


@pytest.mark.parametrize("vocab_size", [127, 129, 50_257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filters_of_whole_rows_keep_what_the_cpu_keeps(vocab_size, dtype):
    given = [{}, *(OF_EDIT[name] for name in FILTERS), {k: v for name in FILTERS for k, v in OF_EDIT[name].items()}]
    logits = hard_rows(vocab_size, dtype)
    positions, found = torch.arange(len(logits)), []
    for device, backend in (("cuda", "compiled"), ("cpu", "eager")):
        sampler = Sampler(vocab_size, len(given), device, dtype, backend)
        slots = [sampler.add_request(SamplingParams(seed=n, temperature=1.5, **each)) for n, each in enumerate(given)]
        for turn in range(len(given)):
            plan = sampler.plan([slots[(turn + row) % len(slots)] for row in range(len(logits))])
            found.append(sampler.edited_logits(plan, logits.to(device), positions.to(device)).cpu())
    half = len(found) // 2
    assert all(same_bits(*pair) for pair in zip(found[:half], found[half:], strict=True))
