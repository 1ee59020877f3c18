"""What must not happen inside a capture on CUDA is refused there, and works afterwards; no graph copies a plan."""

import ctypes
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.batch import tensors_of
from tests.builders.sampler import same

pytestmark = pytest.mark.gpu


def step_after_a_kernel(x: Tensor, step: Callable[[], object]) -> None:
    """Without a kernel before it, the end of the capture would warn of an empty graph."""
    x + 1.0
    step()


@pytest.mark.parametrize("what", ["a request", "a new plan", "warmup"])
def test_what_a_capture_would_freeze_is_refused_inside_one(what):
    samplers = [Sampler(127, 4, device, backend="eager") for device in ("cuda", "cpu")]
    for each in samplers:
        each.add_request(SamplingParams(temperature=0.7, seed=1))
    step = {
        "a request": lambda: samplers[0].add_request(SamplingParams(temperature=0.7, seed=2)),
        "a new plan": lambda: samplers[0].plan([0, 0]),
        "warmup": samplers[0].warmup,
    }[what]
    logits = torch.randn(2, 127)
    given = logits.cuda()
    with pytest.raises(RuntimeError, match=f"^{what}.* inside a capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        step_after_a_kernel(given, step)
    assert not torch.cuda.is_current_stream_capturing()
    step()
    found, wanted = (
        each.sample(each.plan([0, 0]), rows, torch.arange(2, device=each.device))
        for each, rows in zip(samplers, (given, logits), strict=True)
    )
    assert same(found, wanted)


def test_a_plan_of_ragged_drafts_is_first_used_inside_a_capture():
    """What the plan brings, slots, counts and the places of drafts, is still there when the graph is replayed."""
    samplers = [Sampler(127, 4, device, backend="eager") for device in ("cuda", "cpu")]
    logits, draft_logits = torch.randn(7, 127), torch.randn(2, 3, 127)
    graph, wanted = torch.cuda.CUDAGraph(), None
    for each in reversed(samplers):
        for seed in range(3):
            each.add_request(SamplingParams(temperature=0.7, seed=seed))
        positions = torch.arange(3, device=each.device)
        single = each.plan([0, 1, 2])
        given = [row.to(each.device) for row in draft_logits]
        drafts = [each.draft(single, row, positions, coupled=False, offset=j) for j, row in enumerate(given)]
        plan, rows = each.plan([0, 1, 2], num_drafts=[2, 0, 2]), logits.to(each.device)
        if each.device.type == "cpu":
            wanted = each.verify(plan, rows, drafts, positions, "rejection")
            continue
        with torch.cuda.graph(graph):
            found = each.verify(plan, rows, drafts, positions, "rejection")
        for _ in range(2):
            for tensor in tensors_of(found):
                tensor.fill_(-7)
            junk = [torch.full((64,), -7).pin_memory().cuda(non_blocking=True) for _ in range(64)]
            graph.replay()
            assert same(found, wanted)
            del junk


MEMCPY, KIND_AT = 1, 152  # cudaGraphNodeTypeMemcpy, and where cudaMemcpy3DParms, of 160 bytes, has its kind
COPY_KINDS = {1: "from the host", 2: "to the host", 3: "on the device"}


def nodes(graph: torch.cuda.CUDAGraph) -> Counter[str]:
    """Nodes of a graph that was captured with ``keep_graph``: copies by where they read and write, and others."""
    assert torch.version.cuda
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")  # which torch has loaded

    def asked(name: str, *arguments: Any) -> None:
        assert getattr(runtime, name)(*arguments) == 0, name

    captured, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    asked("cudaGraphGetNodes", captured, None, ctypes.byref(count))
    every = (ctypes.c_void_p * count.value)()
    asked("cudaGraphGetNodes", captured, every, ctypes.byref(count))
    found: Counter[str] = Counter()
    for node in map(ctypes.c_void_p, every):
        kind, params = ctypes.c_int(), (ctypes.c_char * 160)()
        asked("cudaGraphNodeGetType", node, ctypes.byref(kind))
        if kind.value == MEMCPY:
            asked("cudaGraphMemcpyNodeGetParams", node, params)
            found[COPY_KINDS[ctypes.c_int.from_buffer(params, KIND_AT).value]] += 1
        else:
            found["others"] += 1
    return found


def test_the_count_of_nodes_tells_a_copy_from_the_host():
    here, graph = torch.arange(8).pin_memory(), torch.cuda.CUDAGraph(keep_graph=True)
    there = torch.zeros(8, dtype=torch.int64, device="cuda")
    with torch.cuda.graph(graph):
        there.copy_(here, non_blocking=True)
        there.add_(1)
    assert nodes(graph) == {"from the host": 1, "others": 1}


def step_of(sampler: Sampler, slots: list[int], is_read: bool) -> tuple[Callable[[], list[Tensor]], tuple[Any, ...]]:
    """A step that needs all that plans bring: slots, counts, and places of ragged drafts; and what it reads besides.

    Its plans are new, unless ``is_read``: then an engine has asked for their tensors.
    """
    generator = torch.Generator().manual_seed(7)
    rows, draft_rows = (torch.randn(count, 127, generator=generator).to(sampler.device) for count in (7, 6))
    flat, positions = (torch.tensor(ids, device=sampler.device) for ids in ([5, 80, 3, 44], [0, 1, 2]))
    sampler._plans.clear()
    plan, ragged = sampler.plan(slots), sampler.plan(slots, num_drafts=[2, 0, 2])
    if is_read:
        assert plan.slot_ids.tolist() == ragged.slot_ids.tolist() == slots
    drafting = sampler.plan(slots, mode="full")  # not the plan of the step
    drafts = [
        sampler.draft(drafting, draft_rows[3 * j : 3 * j + 3], positions, coupled=False, offset=j) for j in range(2)
    ]

    def run() -> list[Tensor]:
        results = (
            sampler.sample(plan, rows[:3], positions),
            sampler.verify(ragged, rows, flat, positions),
            sampler.verify(ragged, rows, drafts, positions, "rejection"),
        )
        return [*(each for result in results for each in tensors_of(result)), sampler.probs(ragged, rows)]

    return run, (rows, flat, positions, drafts)


@pytest.mark.parametrize("backend", ["eager", "compiled", "graph"])
def test_a_capture_copies_nothing_from_the_host(backend):
    samplers = [Sampler(127, 4, "cpu", backend="eager"), Sampler(127, 4, "cuda", backend=backend)]
    for sampler in samplers:
        for seed in range(3):
            sampler.add_request(SamplingParams(temperature=0.7, seed=seed))
    step_of(samplers[1], [1, 0, 2], False)[0]()  # compiles
    graphs = []
    for slots, is_read in (([0, 1, 2], False), ([2, 1, 0], True)):
        wanted, (run, of_engine) = step_of(samplers[0], slots, is_read)[0](), step_of(samplers[1], slots, is_read)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            found = run()
        assert nodes(graph)["from the host"] == 0
        graph.instantiate()
        graphs.append((graph, found, wanted, of_engine))
        del run  # with its plans, which the sampler keeps; what the engine brought the engine keeps
    for graph, found, wanted, _ in graphs:
        for tensor in found:
            tensor.zero_()
        junk = [torch.full((64,), -7).pin_memory().cuda(non_blocking=True) for _ in range(64)]
        graph.replay()
        assert [each.tolist() for each in found] == [each.tolist() for each in wanted]
        del junk


@pytest.mark.parametrize(("mode", "count"), [("global", 512), ("thread_local", 511)])
def test_reads_inside_a_capture_take_no_memory_of_their_own(mode, count):
    """They took pinned memory that only a new plan brought: it ran out after 256 reads of 512 slots."""
    sampler = Sampler(127, 4, "cuda", backend="eager")
    plan, graph = sampler.plan([sampler.add_request(SamplingParams(seed=1))] * count), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        found = [plan.slot_ids + 1 for _ in range(300)]
    graph.replay()
    assert torch.stack(found).unique().tolist() == [1]


@pytest.fixture(scope="module")
def replayed() -> Sampler:
    """Warmed up in the mode that covers all."""
    made = Sampler(127, 24, "cuda", buckets=[2, 4, 16])
    made.warmup(modes=["full"])
    return made


def any_params(chance: random.Random) -> SamplingParams:
    """Of some request."""
    return SamplingParams(
        temperature=chance.choice([0.0, 0.5, 1.0, 2.0]),
        top_k=chance.choice([0, 5]),
        top_p=chance.choice([1.0, 0.6]),
        min_p=chance.choice([0.0, 0.2]),
        seed=chance.randrange(2**64),
    )


def test_requests_that_come_and_go_between_replays_draw_what_they_draw_on_the_cpu(replayed):
    chance, host = random.Random(3), Sampler(127, 24, "cpu", backend="eager")
    logits = torch.randn(16, 127) * 3
    there, positions = logits.cuda(), torch.arange(16)
    there_positions = positions.cuda()
    held: list[int] = []
    made, wanted = [], []
    for _ in range(400):
        for _ in range(min(len(held), chance.choice([0, 0, 1, 2, 6]))):
            leaving = held.pop(chance.randrange(len(held)))
            replayed.remove_request(leaving)
            host.remove_request(leaving)
        for _ in range(min(24 - len(held), chance.choice([0, 1, 2, 6]))):
            params = any_params(chance)
            slots = replayed.add_request(params), host.add_request(params)
            assert slots[0] == slots[1]
            held.append(slots[0])
        batch = chance.sample(held, min(len(held), chance.choice([3, 4, 16])))
        if not batch:
            continue
        rows = len(batch)
        made.append(replayed.sample(replayed.plan(batch, mode="full"), there[:rows], there_positions[:rows]).token_ids)
        wanted.append(host.sample(host.plan(batch, mode="full"), logits[:rows], positions[:rows]).token_ids)
    assert all(torch.equal(found.cpu(), each) for found, each in zip(made, wanted, strict=True))
    assert replayed.statistics().replays > 300
    for slot in held:
        replayed.remove_request(slot)


def test_after_replays_a_request_is_flushed_before_a_capture(replayed):
    logits, positions = torch.randn(2, 127).cuda(), torch.arange(2).cuda()
    first = replayed.add_request(SamplingParams(temperature=0.9, seed=5))
    replayed.sample(replayed.plan([first, -1], mode="full"), logits, positions)  # a replay
    slots = [first, replayed.add_request(SamplingParams(temperature=0.9, seed=6))]
    plan = replayed.plan(slots, mode="full")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"flush\(\) before it begins"), torch.cuda.graph(graph):
        step_after_a_kernel(logits, lambda: replayed.sample(plan, logits, positions))
    replayed.flush()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = replayed.sample(plan, logits, positions)
    graph.replay()
    assert torch.equal(found.token_ids, replayed.sample(plan, logits, positions).token_ids)
    for slot in slots:
        replayed.remove_request(slot)


@pytest.mark.parametrize("top_k", [20, 100])  # 100 has kernels that are written by hand
def test_without_a_wait_a_step_begins_in_eager_torch_and_is_replayed_once_its_stages_are_compiled(top_k):
    samplers = [Sampler(1009, 4, device, backend=backend) for device, backend in (("cuda", "graph"), ("cpu", "eager"))]
    requests = SamplingParams(temperature=0.7, seed=1), SamplingParams(top_k=top_k, top_p=0.9, seed=2)
    sampler, other = samplers
    plans = [each.plan([each.add_request(params) for params in requests]) for each in samplers]
    sampler.warmup(modes=[plans[0].mode.name], wait=False)
    assert sampler.statistics().variants == 0
    end = time.monotonic() + 240
    position, replays = 0, 0
    while replays < 2 and time.monotonic() < end:
        logits, positions = torch.randn(2, 1009), torch.full((2,), position)
        drawn = sampler.sample(plans[0], logits.cuda(), positions.cuda())
        assert drawn.tolist() == other.sample(plans[1], logits, positions).tolist()
        position, replays = position + 1, sampler.statistics().replays
        time.sleep(0.01)
    found = sampler.statistics()
    assert (found.replays, found.captures) == (2, 1)
    assert not found.lowering.queued_stages
