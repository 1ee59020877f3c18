"""Edits and masks on a GPU: captured, inside an engine's graph, without a wait or an allocation, as on the CPU."""

import dataclasses
import random

import pytest
import torch

from compiled_sampler import Logprobs, SampleOutputs, Sampler, SamplingParams, Verification
from compiled_sampler.batch import tensors_of
from tests.builders.edits import EDITS, FILTERS, OF_EDIT, V, edited_sampler, hard_logits, random_mask, random_request
from tests.builders.filters import hard_rows, same_bits
from tests.builders.logprobs import differing
from tests.builders.masks import MASKED_MODES, params_of
from tests.torch_states import no_waits

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]
ROWS, STEPS = 16, 4
EVERY = [EDITS, ("token_bitmask", *EDITS)]
LISTS = ("allowed_token_ids", "logit_bias", "min_tokens", "penalties", "dry", "bad_words", "stops")


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


def test_new_plans_of_changing_requests_wait_for_nothing(captured):
    """Sampled and verified with ragged drafts; before each a request leaves for one with other edits."""
    source, before = random.Random(6), captured.statistics()
    requests = [random_request(source, V) for _ in range(ROWS)]
    sides = both(captured, requests)
    for rule in ("match", "rejection"):
        requests[5], counts = random_request(source, V), [3, *(source.randrange(4) for _ in range(ROWS - 1))]
        rows, mask = hard_logits(source, sum(counts) + ROWS), random_mask(source, sum(counts) + ROWS, V)
        positions, drafts = torch.tensor([each.position for each in requests]), torch.randint(V, (ROWS, 3))
        results = []
        for sampler, slots in sides:
            x, words, where, ids = (each.to(sampler.device) for each in (rows, mask, positions, drafts))
            torch.cuda.synchronize()
            with no_waits():
                sampler.remove_request(slots[5])
                slots[5] = requests[5].added(sampler)
                plan, plan_of = sampler.plan(slots), sampler.plan(slots, num_drafts=counts)
                drawn = sampler.sample(plan, x[:ROWS], where, token_bitmask=words[:ROWS])
                made = sampler.verify(plan_of, x, ids, where, rule, token_bitmask=words)
            results.append([each.tolist() for out in (drawn, made) for each in tensors_of(out)])
        assert results[0] == results[1]
    for sampler, slots in sides:
        for slot in slots:
            sampler.remove_request(slot)
    after = captured.statistics()
    assert (after.direct_runs, after.captures) == (before.direct_runs, before.captures)


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


@pytest.fixture(scope="module")
def restoring():
    """A sampler on the GPU whose captured steps restore the logits that lists write into, bare and masked."""
    edits = [("restore_logits", *LISTS), ("restore_logits", "token_bitmask", *LISTS)]
    ways = [Verification("match", 1), Verification("rejection", 1)]
    made = edited_sampler("graph", ROWS, device="cuda", buckets=[ROWS], captured_edits=edits, verifications=ways)
    made.warmup(modes=["greedy", "no_filter", "top_k_top_p[64]", "full"])
    return made


@pytest.mark.parametrize("law", [{"temperature": 0.0}, {}, {"top_k": 20, "top_p": 0.9}, {"top_p": 0.9}])
def test_captured_steps_restore_the_logits(restoring, law):
    """Of a single row, too, which is padded; twice, as the second call reads what the first one left."""
    source = random.Random(str(law))
    requests = [random_request(source, V, LISTS) for _ in range(ROWS)]
    requests = [each._replace(given={**each.given, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **law})
                for each in requests]  # fmt: skip
    sides = both(restoring, requests)
    before = restoring.statistics()
    for step in range(STEPS):
        count = 1 if step == 2 else ROWS
        rows, mask, drafts = hard_logits(source, 2 * count), None, torch.randint(V, (count, 1))
        positions = torch.tensor([each.position + step for each in requests[:count]])
        if step % 2:
            mask = random_mask(source, 2 * count, V)
        results = []
        for sampler, slots in sides:
            there, leave = sampler.device, {"consume_logits": "restore"} if sampler is restoring else {}
            logits, where = rows.to(there), positions.to(there)
            masks = [None, None] if mask is None else [mask[:count].to(there), mask.to(there)]
            plan, drafted = sampler.plan(slots[:count]), sampler.plan(slots[:count], num_drafts=[1] * count)
            for _ in range(2):
                drawn = sampler.sample(plan, logits[:count], where, token_bitmask=masks[0], **leave)
            rule = ("match", "rejection")[step // 2]
            made = sampler.verify(drafted, logits, drafts.to(there), where, rule, token_bitmask=masks[1], **leave)
            results.append([each.tolist() for out in (drawn, made) for each in tensors_of(out)])
            assert same_bits(logits.cpu(), rows)
        assert results[0] == results[1]
    assert restoring.statistics().direct_runs == before.direct_runs
    for sampler, slots in sides:
        for slot in slots:
            sampler.remove_request(slot)


def test_a_step_inside_an_engines_graph_restores_the_logits():
    """With logprobs of what they held before the edits."""
    source, asked = random.Random(9), Logprobs(rank=True, num_kept=True)
    requests = [random_request(source, V, LISTS) for _ in range(ROWS)]
    made, wanted = edited_sampler("compiled", ROWS, device="cuda"), edited_sampler("eager", ROWS)
    slots, others = [each.added(made) for each in requests], [each.added(wanted) for each in requests]
    plan, logits = made.plan(slots), torch.zeros(ROWS, V, device="cuda")
    positions = torch.tensor([each.position for each in requests])
    there, leave = positions.cuda(), {"logprobs": asked, "consume_logits": "restore"}
    made.sample(plan, logits, there, **leave)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = made.sample(plan, logits, there, **leave)
    for _ in range(3):
        rows = hard_logits(source, ROWS)
        logits.copy_(rows)
        graph.replay()
        told = wanted.sample(wanted.plan(others), rows, positions, logprobs=asked)
        assert out.tolist() == told.tolist()
        assert differing(out.logprobs, told.logprobs) == []
        assert same_bits(logits.cpu(), rows)


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


# Masks alone: read beside the logits, in every mode, as the CPU reads a masked copy.


SIZES = (1, 2, 127, 129, 1000)


def samplers(mode: str, vocab_size: int, dtype: torch.dtype, backend: str, rows: int, *, allowed: bool):
    """A sampler on the GPU and one on the CPU, each with a plan of rows, some of padding."""
    source, found = random.Random(vocab_size), []
    params = params_of(mode)
    if allowed:
        most = max(vocab_size // 2, 1)
        params = [
            dataclasses.replace(each, allowed_token_ids=source.sample(range(vocab_size), most)) for each in params
        ]
    for device, way in (("cuda", backend), ("cpu", "eager")):
        sampler = Sampler(vocab_size, rows, device, dtype, way)
        slots = [sampler.add_request(each) for each in params]
        places = [-1 if row % 7 == 6 else slots[row % len(slots)] for row in range(rows)]
        found.append((sampler, sampler.plan(places, mode)))
    return found


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["eager", "compiled"])
@pytest.mark.parametrize("mode", MASKED_MODES)
def test_masked_rows_draw_what_the_cpu_draws(mode, backend, dtype, allowed):
    for vocab_size in SIZES:
        logits = hard_rows(vocab_size, dtype)
        rows = len(logits)
        made, wanted = samplers(mode, vocab_size, dtype, backend, rows, allowed=allowed)
        mask = random_mask(random.Random(mode), rows, vocab_size)
        mask[0] = 0
        check(made, wanted, logits, mask)


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("mode", ["greedy", "no_filter", "min_p", "full"])
def test_masked_rows_of_a_large_batch_draw_what_the_cpu_draws(mode, allowed):
    """Of as many rows as race by bounds, with min-p so flat that some rows race over all their tokens."""
    rows, vocab_size = 64, 151_936
    made, wanted = samplers(mode, vocab_size, torch.float32, "compiled", rows, allowed=allowed)
    logits = (1 if mode == "min_p" else 3) * torch.randn(rows, vocab_size)
    check(made, wanted, logits, random_mask(random.Random(mode), rows, vocab_size))


def check(made, wanted, logits, mask):
    found = []
    for sampler, plan in (made, wanted):
        given = [each.to(sampler.device) for each in (logits, torch.arange(len(logits)), mask)]
        drawn = sampler.sample(plan, *given[:2], token_bitmask=given[2])
        found.append([each.tolist() for each in tensors_of(drawn)])
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", MASKED_MODES)
def test_a_masked_step_inside_an_engines_graph_reads_the_mask_of_each_replay(mode):
    vocab_size, source = 129, random.Random(mode)
    logits = hard_rows(vocab_size)
    rows = len(logits)
    made, wanted = samplers(mode, vocab_size, torch.float32, "compiled", rows, allowed=True)
    held = [each.cuda() for each in (logits, torch.arange(rows), random_mask(source, rows, vocab_size))]
    made[0].sample(made[1], *held[:2], token_bitmask=held[2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = made[0].sample(made[1], *held[:2], token_bitmask=held[2])
    for _ in range(4):
        mask = random_mask(source, rows, vocab_size)
        held[2].copy_(mask)
        graph.replay()
        told = wanted[0].sample(wanted[1], logits, torch.arange(rows), token_bitmask=mask)
        assert [each.tolist() for each in tensors_of(out)] == [each.tolist() for each in tensors_of(told)]
