"""The same with real graphs: bits, allocations, syncs, outer and failed captures, bound memory, numbers of the host."""

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graph_cache import BufferSpec, CaptureError, GraphCache, HostMirror, capture, keys
from tests.graph_cache.recorded import SPECS, Scores, on_device, same_bits, score

pytestmark = pytest.mark.gpu
ROWS = (8, 1, 5, 2, 8, 3, 1, 7, 4)


def real_cache(fn: Callable[..., Scores] = score) -> GraphCache:
    cache = GraphCache("cuda", (2, 4, 8))
    cache.register("score", fn, SPECS)
    return cache


@pytest.fixture
def cache() -> Iterator[GraphCache]:
    """All buckets captured; evicted afterwards."""
    made = real_cache()
    made.warmup()
    yield made
    made.evict()


def test_replays_in_any_order_equal_direct_calls(cache: GraphCache) -> None:
    batches = [on_device(rows) for rows in ROWS]
    results = [cache.run("score", tensors) for tensors in batches]
    for result, tensors in zip(results, batches, strict=True):
        assert same_bits(result, score(**tensors))
    assert cache.statistics().replays == len(ROWS)


def test_nothing_is_launched_on_another_stream() -> None:
    """Only captured: each stream that launches kernels may make graphs slower."""
    called: list[tuple[bool, bool]] = []
    here = torch.cuda.current_stream()

    def noting(**tensors: Tensor) -> Scores:
        called.append((torch.cuda.current_stream() == here, torch.cuda.is_current_stream_capturing()))
        return score(**tensors)

    real_cache(noting).warmup(buckets=[2])
    assert called == [(True, False), (True, False), (False, True)]


def test_a_graph_that_becomes_garbage_does_not_end_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[torch.cuda.CUDAGraph] = []

    def dropping(**tensors: Tensor) -> Scores:
        if torch.cuda.is_current_stream_capturing() and graphs:
            cycle: list[Any] = [graphs.pop()]
            cycle.append(cycle)
            del cycle
            [[] for _ in range(10_000)]  # enough for a collection
        return score(**tensors)

    def captured() -> GraphCache:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[0]):
            torch.zeros(1, device="cuda")
        cache = real_cache(dropping)
        cache.warmup(buckets=[8])
        assert not graphs
        return cache

    cache, tensors = captured(), on_device(8)
    assert same_bits(cache.run("score", tensors), score(**tensors))
    assert cache.statistics().replays == 1
    assert gc.isenabled()
    monkeypatch.setattr(capture, "uncollected", nullcontext)
    with pytest.raises(CaptureError):
        captured()


def test_a_batch_has_the_same_bits_in_every_bucket(cache: GraphCache) -> None:
    tensors = on_device(2)
    wanted = score(**tensors)
    for bucket in (2, 4, 8):
        assert same_bits(cache.run("score", tensors), wanted)
        cache.evict(rows=bucket)
    assert cache.statistics().coverage == {f"score rows=2 -> score[{bucket}]": 1 for bucket in (2, 4, 8)}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_replay_into_out_neither_allocates_nor_waits(cache: GraphCache, no_sync: Callable[[str], None]) -> None:
    tensors = {rows: on_device(rows) for rows in ROWS}
    outs = {rows: Scores(*(torch.empty_like(each) for each in score(**tensors[rows]))) for rows in ROWS}
    no_sync("error")
    with pytest.raises(RuntimeError, match="synchroniz"):
        outs[8].best.sum().item()
    torch.cuda.synchronize()
    num_allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    for rows in ROWS:
        cache.run("score", tensors[rows], out=outs[rows])
    no_sync("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == num_allocations
    assert cache.statistics().replays == len(ROWS)
    for rows in ROWS:
        assert same_bits(outs[rows], score(**tensors[rows]))


def test_a_replay_runs_on_the_current_stream(cache: GraphCache) -> None:
    side = torch.cuda.Stream()
    tensors = on_device(3)
    wanted = score(**tensors)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        before = tensors["logits"].clone()
        tensors["logits"].mul_(2.0)
        result = cache.run("score", tensors)
    side.synchronize()
    assert not same_bits(result, wanted)
    assert same_bits(result, score(**{**tensors, "logits": before * 2.0}))


def test_an_outer_capture_gets_the_kernels(cache: GraphCache) -> None:
    tensors = on_device(3)
    out = Scores(*(torch.zeros_like(each) for each in score(**tensors)))
    outer = torch.cuda.CUDAGraph()
    with torch.cuda.graph(outer, capture_error_mode="thread_local"):
        fresh = cache.run("score", tensors)
        cache.run("score", tensors, out=out)
    for _ in range(2):
        tensors["logits"].normal_()
        outer.replay()
        assert same_bits(fresh, score(**tensors))
        assert same_bits(out, score(**tensors))
    assert cache.statistics().replays == 0


class Waiting:
    """``score``, which waits for the device in the middle when told to."""

    def __init__(self) -> None:
        self.waits = True

    def __call__(self, logits: Tensor, scale: Tensor, shift: Tensor) -> Scores:
        """A wait is allowed in the warm-up and ends a capture."""
        doubled = logits * 2.0
        if self.waits:
            doubled.sum().item()
        return score(doubled / 2.0, scale, shift)


def test_after_a_failed_capture_everything_still_works() -> None:
    waiting = Waiting()
    cache = real_cache(waiting)
    cache.register("score_too", score, SPECS)
    cache.warmup(["score_too"])
    stream = torch.cuda.current_stream()
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"score\[8\] could not be captured") as caught:
            cache.warmup()
        assert "captur" in str(caught.value.__cause__)
    assert torch.cuda.current_stream() == stream
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.rand(4, device="cuda").sum().item() > 0.0

    tensors = on_device(3)
    wanted = score(**tensors)
    assert same_bits(cache.run("score_too", tensors), wanted)
    assert same_bits(cache.run("score", tensors), wanted)
    assert cache.statistics().fallbacks == {"score rows=3: no variant": 1}

    waiting.waits = False
    cache.warmup()
    for name in ("score_too", "score") * 2:
        tensors = on_device(3)
        assert same_bits(cache.run(name, tensors), score(**tensors))
    assert cache.statistics().variants == 6


def test_a_callable_that_raises_while_captured_does_no_harm() -> None:
    calls = []

    def raising(logits: Tensor, scale: Tensor, shift: Tensor) -> Scores:
        calls.append(logits)
        if len(calls) == 3:
            raise KeyError("third call")
        return score(logits, scale, shift)

    cache = real_cache(raising)
    with pytest.raises(CaptureError) as caught:
        cache.warmup()
    assert isinstance(caught.value.__cause__, KeyError)
    cache.warmup()
    tensors = on_device(8)
    assert same_bits(cache.run("score", tensors), score(**tensors))
    assert cache.statistics().replays == 1


def test_memory_freed_after_a_failed_capture_is_used_again() -> None:
    with pytest.raises(CaptureError):
        real_cache(Waiting()).warmup()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    block.record_stream(side)
    pointer = block.data_ptr()
    del block
    torch.cuda.synchronize()
    assert torch.empty(64 << 20, dtype=torch.uint8, device="cuda").data_ptr() == pointer


def test_bound_tensors_of_any_strides_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_FEW", 4)  # rows of logits are long, and get no owned buffer
    cache = real_cache()
    for bound in (torch.randn(8, 9, device="cuda"), torch.randn(9, 8, device="cuda").T):
        cache.bind("logits", bound)
        cache.warmup()
        for rows in ROWS:
            bound.copy_(torch.randn(8, 9))
            tensors = {**on_device(rows), "logits": bound[:rows]}
            assert same_bits(cache.run("score", tensors), score(**{**tensors, "logits": bound[:rows, :5]}))
    statistics = cache.statistics()
    assert (statistics.replays, statistics.fallbacks) == (2 * len(ROWS), {})
    assert statistics.buffer_bytes == 8 * (4 + 8) + 8 * (8 + 5 * 4)
    assert cache.evict(unbound=True) == 3


def test_the_pool_is_measured_and_given_back(cache: GraphCache) -> None:
    assert cache.statistics().pool_bytes > 0
    assert cache.evict() == 3
    assert cache.statistics().pool_bytes == 0
    cache.warmup()
    tensors = on_device(3)
    assert same_bits(cache.run("score", tensors), score(**tensors))
    assert cache.statistics().replays == 1


def test_a_captured_compiled_callable_equals_its_direct_call() -> None:
    compiled = torch.compile(score, fullgraph=True)
    cache = real_cache(compiled)
    cache.warmup(buckets=[4])
    tensors = on_device(4)
    assert same_bits(cache.run("score", tensors), compiled(**tensors))
    assert cache.statistics().replays == 1


# Numbers of the host that a run sends: to a device that keeps up and to one that is far behind.


ON_HOST = {**SPECS, "shift": BufferSpec((), torch.int64, 3, on_host=True)}


def on_host() -> GraphCache:
    """A warmed-up cache whose shifts the host brings."""
    made = GraphCache("cuda", [2, 4, 8], mirror=HostMirror(64, torch.device("cuda")))
    made.register("score", score, ON_HOST)
    made.warmup()
    return made


def of_host(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The batch with numbers of the host for its shifts."""
    return {**tensors, "shift": tensors["shift"].cpu().numpy().tobytes()}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("cycles", [0, 200_000_000], ids=["the device keeps up", "the device is behind"])
def test_every_replay_finds_its_own_numbers_without_a_wait(no_sync: Callable[[str], None], cycles: int) -> None:
    cache = on_host()
    batches = [on_device(rows) for rows in (5, 8, 1, 2, 5, 3, 4)]
    given = [of_host(each) for each in batches]
    wanted = [score(**each) for each in batches]
    torch.cuda.synchronize()
    no_sync("error")
    torch.cuda._sleep(max(cycles, 1))  # the ring has gone round long before it ends
    made = [cache.run("score", given[i % 7]) for i in range(400)]
    no_sync("default")
    assert all(same_bits(each, wanted[i % 7]) for i, each in enumerate(made))


def test_replays_on_streams_that_wait_for_each_other_find_their_numbers() -> None:
    cache = on_host()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for i in range(150):
        tensors = on_device(5)
        stream = streams[i % 2]
        stream.wait_stream(streams[1 - i % 2])
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            made = cache.run("score", of_host(tensors))
        torch.cuda.current_stream().wait_stream(stream)
        assert same_bits(made, score(**tensors))


def test_every_replay_reads_what_the_host_wrote_last_into_the_table() -> None:
    chance, mirror = np.random.default_rng(11), HostMirror(64, torch.device("cuda"))
    start = mirror.take(20)
    words, weights = mirror.here[start : start + 20], torch.arange(1, 21, device="cuda") ** 2

    def read(logits: Tensor, scale: Tensor, shift: Tensor) -> Scores:
        return score(logits, scale, shift + (mirror.there[start : start + 20] * weights).sum())

    cache = GraphCache("cuda", [2, 4, 8], mirror=mirror)
    cache.register("score", read, ON_HOST)
    cache.warmup()
    batches = [on_device(rows) for rows in (5, 8, 1)]
    given, made, wanted = [of_host(each) for each in batches], [], []
    for i in range(600):
        if i % 200 == 100:
            torch.cuda._sleep(100_000_000)
        for place in chance.integers(20, size=chance.choice([0, 0, 1, 2, 4, 6])):
            words[place] = chance.integers(-99, 99)
            mirror.note(start + place, start + place + 1)
        number = int(chance.integers(3))
        made.append((number, cache.run("score", given[number])))
        wanted.append(words.copy())
    for (number, found), each in zip(made, wanted, strict=True):
        total = (torch.from_numpy(each).cuda() * weights).sum()
        assert same_bits(found, score(**{**batches[number], "shift": batches[number]["shift"] + total}))


def test_a_cache_that_is_given_up_while_its_graphs_run_has_read_its_own_numbers() -> None:
    wanted, made = [], []
    for _ in range(8):
        cache, tensors = on_host(), on_device(5)
        given = of_host(tensors)
        wanted.append(score(**tensors))
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)
        made.append(cache.run("score", given))
        del cache
        gc.collect()
        junk = [torch.full((n,), -1).pin_memory() for n in (1 << i for i in range(8, 18))]  # takes free memory
        del junk
    assert all(same_bits(*pair) for pair in zip(made, wanted, strict=True))


def test_words_that_are_pending_are_refused_inside_a_capture() -> None:
    mirror = HostMirror(16, torch.device("cuda"))
    mirror.here[3] = 1
    mirror.note(3, 4)

    def upload() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            mirror.there + 1  # without a kernel the end of the capture would warn of an empty graph
            mirror.upload()

    with pytest.raises(RuntimeError, match="must not be pending inside a capture"):
        upload()
    mirror.upload()
    assert not mirror.is_pending
