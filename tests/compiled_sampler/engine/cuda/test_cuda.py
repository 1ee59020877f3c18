"""On CUDA: eager, compiled, replayed and captured in an engine's graph, all equal to eager torch on the CPU."""

import time
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from compiled_sampler import SampleOutputs, Sampler, SamplingParams
from compiled_sampler.batch import tensors_of
from compiled_sampler.lowering.compile_queue import PROCESSES_VARIABLE
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.modes import mode_table
from compiled_sampler.pipeline.sample import sample_step
from graph_cache import CaptureError
from tests.builders import sampler as builders_sampler
from tests.builders.sampler import REQUESTS, EngineGraph, new_outputs, on_cpu, same, wanted_of
from tests.cases.compared_batches import arranged, direct, num_mismatches
from tests.cases.hard_rows import Batch, mixed_batch, mixed_requests
from tests.torch_states import no_waits

pytestmark = pytest.mark.gpu

V, BUCKETS, NUM_REQUESTS = 509, (1, 4, 32), 60
MODES = list(REQUESTS)
PARAMS = mixed_requests(V, NUM_REQUESTS, seed=1)


def holding(device: str, backend: str) -> Sampler:
    """A sampler that holds ``PARAMS`` in slots 0 to 59, and the requests of ``REQUESTS`` from slot 60 on."""
    sampler = Sampler(V, 128, device, backend=backend, buckets=BUCKETS)
    for params in (*PARAMS, *REQUESTS.values()):
        sampler.add_request(params)
    return sampler


def slot_of(mode: str) -> int:
    """A slot whose request needs the mode."""
    return NUM_REQUESTS + MODES.index(mode)


@pytest.fixture(scope="module")
def reference() -> Sampler:
    """Eager on the CPU."""
    return holding("cpu", "eager")


@pytest.fixture(scope="module")
def sampler(record_testsuite_property: Callable[[str, object], None]) -> Sampler:
    """Warmed up on CUDA; the seconds it took are recorded."""
    made = holding("cuda", "graph")
    start = time.perf_counter()
    made.warmup()
    torch.cuda.synchronize()
    record_testsuite_property("warmup_seconds", round(time.perf_counter() - start, 1))
    return made


@pytest.fixture
def nothing_compiles() -> Iterator[None]:
    """A compilation during the test is an error."""
    with builders_sampler.nothing_compiles():
        yield


def mixed(mode: str, rows: int, seed: int = 0) -> Batch:
    """Hard rows for the requests that a mode covers."""
    return mixed_batch(PARAMS, mode_table(V, "top_k")[MODES.index(mode)], rows, torch.float32, seed)


def normal(rows: int, columns: int = V) -> Tensor:
    return torch.randn(rows, columns, device="cuda") * 3.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 2, 4, 31, 32, 33, 3000])
def test_every_path_equals_eager_torch_on_the_cpu(reference, sampler, mode, rows):
    batch = mixed(mode, rows)
    wanted = direct(reference)(batch, mode)
    eager = holding("cuda", "eager")
    for path in (direct(sampler), direct(eager), direct(sampler, "full"), direct(eager, "full")):
        assert same(path(batch, mode), wanted)
    other, places = arranged(batch, padding=rows // 2, seed=3)
    assert num_mismatches(wanted, direct(sampler)(other, mode), places) == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 31, 5000])
def test_before_a_warmup_no_kernel_of_triton_is_launched(reference, mode, rows, monkeypatch):
    monkeypatch.setattr(CompiledStages, "compiles_at_calls", False)  # as users have it
    monkeypatch.setenv(PROCESSES_VARIABLE, "0")
    monkeypatch.setattr(
        pytest.importorskip("triton").JITFunction, "run", mock.Mock(side_effect=AssertionError("a kernel of Triton"))
    )
    batch = mixed(mode, rows)
    assert same(direct(holding("cuda", "compiled"))(batch, mode), direct(reference)(batch, mode))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_equal_eager_torch_on_the_cpu(dtype):
    samplers = [Sampler(V, NUM_REQUESTS, device, dtype, "eager") for device in ("cpu", "cuda")]
    samplers.append(Sampler(V, NUM_REQUESTS, "cuda", dtype, "compiled"))
    for each in samplers:
        for params in PARAMS:
            each.add_request(params)
    batch = mixed("full", 500)._replace(logits=mixed("full", 500).logits.to(dtype))
    wanted, eager, compiled = (direct(each)(batch, "full") for each in samplers)
    assert same(eager, wanted)
    assert same(compiled, wanted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_an_outer_graph_reads_slots_and_positions_at_each_replay(reference, sampler, mode, rows):
    outer, before = EngineGraph(sampler, mode, rows), sampler.statistics().replays
    for seed in range(3):
        batch = mixed(mode, rows, seed)
        assert same(outer(batch), direct(reference)(batch, mode))
    assert sampler.statistics().replays == before


def test_randomness_is_not_frozen_in_a_graph(reference, sampler):
    slot, logits = slot_of("no_filter"), torch.zeros(4, V, device="cuda")
    outer, plan, seen = EngineGraph(sampler, "no_filter", 4), sampler.plan([slot] * 4), set()
    for step in range(50):
        positions = torch.arange(4, device="cuda") + 4 * step
        replayed = on_cpu(sampler.sample(plan, logits, positions))
        assert same(outer(Batch(logits, plan.slot_ids, positions)), replayed)
        assert same(replayed, wanted_of(reference, [slot] * 4, logits, positions))
        seen |= set(replayed.token_ids.tolist())
    assert len(seen) > 100
    assert sampler.statistics().replays >= 50


def test_replays_out_of_order_and_in_interleaved_modes(reference, sampler):
    before = sampler.statistics()
    jobs = [(mode, rows) for rows in (32, 1, 4, 3, 17, 2) for mode in MODES for _ in range(2)]
    inputs = [(normal(rows), torch.randint(10**12, (rows,), device="cuda")) for _, rows in jobs]
    results = [
        sampler.sample(sampler.plan([slot_of(mode)] * rows), logits, positions)
        for (mode, rows), (logits, positions) in zip(jobs, inputs, strict=True)
    ]
    for (mode, rows), each, out in zip(jobs, inputs, results, strict=True):
        assert same(on_cpu(out), wanted_of(reference, [slot_of(mode)] * rows, *each))
    after = sampler.statistics()
    assert (after.replays - before.replays, after.direct_runs) == (len(jobs), before.direct_runs)


def test_a_reused_slot_takes_effect_in_captured_graphs(reference, sampler):
    logits, positions = normal(4), torch.arange(4, device="cuda")
    outer = EngineGraph(sampler, "full", 4)
    for params in (SamplingParams(temperature=3.0, top_p=0.9, seed=11), SamplingParams(temperature=0.0, seed=1)):
        slots = [sampler.add_request(params)] * 4
        assert [reference.add_request(params)] * 4 == slots
        wanted, plan = wanted_of(reference, slots, logits, positions), sampler.plan(slots)
        assert same(on_cpu(sampler.sample(plan, logits, positions)), wanted)
        assert same(outer(Batch(logits, plan.slot_ids, positions)), wanted)
        for each in (sampler, reference):
            each.remove_request(slots[0])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize("mode", MODES)
def test_a_replay_into_out_neither_allocates_nor_waits_nor_compiles(reference, sampler, mode):
    sizes = (32, 1, 5, 4, 32, 2)
    plans = [sampler.plan([slot_of(mode)] * rows) for rows in sizes]
    inputs = [(normal(rows), torch.arange(rows, device="cuda")) for rows in sizes]
    outs = [new_outputs(rows, "cuda") for rows in sizes]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_waits():
        for plan, (logits, positions), out in zip(plans, inputs, outs, strict=True):
            assert sampler.sample(plan, logits, positions, out=out) is out
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    for rows, each, out in zip(sizes, inputs, outs, strict=True):
        assert same(on_cpu(out), wanted_of(reference, [slot_of(mode)] * rows, *each))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize("state", [torch.no_grad, torch.inference_mode], ids=lambda each: each.__name__)
@pytest.mark.parametrize("rows", [4, 100])
def test_an_engine_under_inference_mode_neither_waits_nor_compiles(reference, sampler, state, rows):
    plan = sampler.plan([slot_of("full")] * rows)
    with state():
        logits, positions = normal(rows), torch.arange(rows, device="cuda")
        with no_waits():
            out = sampler.sample(plan, logits, positions)
        wanted = wanted_of(reference, plan.slots, logits, positions)
        assert same(on_cpu(out), wanted)


def test_a_bound_buffer_of_odd_stride_is_read_in_place(reference):
    sampler, buffer = holding("cuda", "graph"), torch.full((32, V + 10), torch.nan, device="cuda")[:, 2:]
    sampler.bind_logits(buffer)
    sampler.warmup()
    assert buffer.stride(0) % 2 == 1
    assert buffer.data_ptr() % 16 == 8
    for mode in MODES:
        for rows in (1, 3, 32):
            buffer[:, :V] = normal(32)
            slots, positions = [slot_of(mode)] * rows, torch.arange(rows, device="cuda")
            out = sampler.sample(sampler.plan(slots), buffer[:rows], positions)
            assert same(on_cpu(out), wanted_of(reference, slots, buffer[:rows], positions))
    statistics = sampler.statistics()
    assert (statistics.replays, statistics.direct_runs, statistics.fallbacks) == (3 * len(MODES), 0, {})
    assert all("bound to logits" in served for served in statistics.coverage)
    assert statistics.buffer_bytes < buffer[:, :V].nbytes
    graph, positions, slots = torch.cuda.CUDAGraph(), torch.arange(32, device="cuda"), [slot_of("full")] * 32
    with torch.cuda.graph(graph):
        out = sampler.sample(sampler.plan(slots), buffer, positions)
    buffer[:, :V] = normal(32)
    graph.replay()
    assert same(on_cpu(out), wanted_of(reference, slots, buffer, positions))


@pytest.mark.parametrize("first", [1, 2, 4])
def test_an_outer_graph_reads_rows_that_start_anywhere(reference, sampler, first):
    memory, positions, graph = normal(40), torch.arange(50, device="cuda"), torch.cuda.CUDAGraph()
    logits, where, slots = memory[first : first + 20], positions[first : first + 20], [slot_of("full")] * 20
    plan = sampler.plan(slots)
    with torch.cuda.graph(graph):
        out = sampler.sample(plan, logits, where)
    graph.replay()
    assert same(on_cpu(out), wanted_of(reference, slots, logits, where))


def test_without_variants_the_bytes_are_the_same_and_it_is_counted(reference):
    sampler, logits, positions = holding("cuda", "graph"), normal(33), torch.arange(33, device="cuda")
    for rows in (3, 33, 3):
        slots = [slot_of("no_filter")] * rows
        out = sampler.sample(sampler.plan(slots), logits[:rows], positions[:rows])
        assert same(on_cpu(out), wanted_of(reference, slots, logits[:rows], positions[:rows]))
    statistics = sampler.statistics()
    assert (statistics.replays, statistics.direct_runs) == (0, 3)
    assert statistics.fallbacks == {
        "no_filter rows=3: no variant": 2,
        "no_filter rows=33: more rows than the largest bucket 32": 1,
    }


def test_after_a_failed_capture_the_sampler_works_and_a_later_warmup_succeeds(reference, monkeypatch):
    def waiting(*arguments: object) -> SampleOutputs:
        out = sample_step(*arguments)
        if torch.cuda.is_current_stream_capturing():
            out.token_ids.sum().item()
        return out

    sampler, slots = holding("cuda", "graph"), [slot_of("min_p")] * 3
    logits, positions = normal(3), torch.arange(3, device="cuda")
    wanted = wanted_of(reference, slots, logits, positions)
    with monkeypatch.context() as patched:
        patched.setattr("compiled_sampler.engine.step_executor.sample_step", waiting)
        for _ in range(2):
            with pytest.raises(CaptureError, match="could not be captured"):
                sampler.warmup()
    assert same(on_cpu(sampler.sample(sampler.plan(slots), logits, positions)), wanted)
    assert (sampler.statistics().replays, sampler.statistics().variants) == (0, 0)
    sampler.warmup()
    assert same(on_cpu(sampler.sample(sampler.plan(slots), logits, positions)), wanted)
    assert (sampler.statistics().replays, sampler.statistics().variants) == (1, len(MODES) * len(BUCKETS))


@pytest.mark.parametrize("mode", MODES)
def test_an_outer_capture_of_an_unprepared_layout_names_the_way_out(reference, sampler, mode):
    slots, positions, strided = [slot_of(mode)] * 4, torch.arange(4, device="cuda"), normal(4, V + 3)
    refused = pytest.raises(RuntimeError, match=r"not compiled for such a call.*warmup\(\).*bind\(logits=\)")
    plan = sampler.plan(slots)
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        sampler.sample(plan, strided[:, :V], positions + 0)  # a graph without a kernel would warn
    assert not torch.cuda.is_current_stream_capturing()
    wanted = wanted_of(reference, slots, strided, positions)
    assert same(on_cpu(sampler.sample(sampler.plan(slots), strided, positions)), wanted)
    assert same(EngineGraph(sampler, mode, 4)(Batch(strided[:, :V], torch.tensor(slots), positions)), wanted)


def test_rows_beyond_two_to_the_31_logits_are_their_own():
    vocab_size, rows, dtype = 151_936, 14_200, torch.bfloat16
    assert rows * vocab_size > 2**31
    logits = torch.randn(rows, vocab_size, dtype=dtype, device="cuda")
    looked_at = [0, 7_000, 14_133, 14_134, 14_199]
    layouts = (("cuda", "compiled"), ("cpu", "eager"))
    samplers = [Sampler(vocab_size, 8, device, dtype, backend) for device, backend in layouts]
    for params in REQUESTS.values():
        slots = [each.add_request(params) for each in samplers]
        where = torch.arange(rows, device="cuda")
        samplers[0].sample(samplers[0].plan([slots[0]] * 200), logits[:200], where[:200])  # kernels made for few rows
        out = on_cpu(samplers[0].sample(samplers[0].plan([slots[0]] * rows), logits, where))
        wanted = wanted_of(samplers[1], [slots[1]] * len(looked_at), logits[looked_at], where[looked_at])
        assert same(SampleOutputs(*(each[looked_at] for each in tensors_of(out))), wanted)


def test_all_variants_need_little_more_memory_than_the_largest():
    totals = []
    for buckets in ((256,), (1, 8, 64, 256)):
        sampler = Sampler(4099, 8, "cuda", torch.bfloat16, "graph", buckets=buckets)
        sampler.warmup()
        statistics = sampler.statistics()
        assert statistics.variants == len(MODES) * len(buckets)
        assert statistics.buffer_bytes >= 256 * 4099 * 2
        totals.append(statistics.pool_bytes + statistics.buffer_bytes)
    assert totals[1] < 1.1 * totals[0]
