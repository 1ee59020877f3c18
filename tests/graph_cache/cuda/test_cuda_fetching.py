"""Numbers that graphs fetch from pinned memory: on a device that keeps up and on one that is far behind."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from graph_cache import BufferSpec, GraphCache, HostTable
from tests.graph_cache.recorded import SPECS, Scores, on_device, same_bits, score

pytestmark = pytest.mark.gpu


FETCHED = {**SPECS, "shift": BufferSpec((), torch.int64, 3, fetched=True)}


def fetching() -> GraphCache:
    """A warmed-up cache whose shifts are fetched."""
    made = GraphCache("cuda", [2, 4, 8])
    made.register("score", score, FETCHED)
    made.warmup()
    return made


def posted(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The batch with numbers of the host for its shifts."""
    return {**tensors, "shift": tensors["shift"].cpu().numpy().tobytes()}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("cycles", [0, 200_000_000], ids=["the device keeps up", "the device is behind"])
def test_every_replay_finds_its_own_numbers_without_a_wait(no_sync: Callable[[str], None], cycles: int) -> None:
    cache = fetching()
    batches = [on_device(rows) for rows in (5, 8, 1, 2, 5, 3, 4)]
    given = [posted(each) for each in batches]
    wanted = [score(**each) for each in batches]
    torch.cuda.synchronize()
    no_sync("error")
    torch.cuda._sleep(max(cycles, 1))  # 64 entries are full long before it ends
    made = [cache.run("score", given[i % 7]) for i in range(400)]
    no_sync("default")
    assert all(same_bits(each, wanted[i % 7]) for i, each in enumerate(made))


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_numbers_that_are_fetched_are_not_copied_before_the_graph() -> None:
    cache = fetching()
    batches = [on_device(8) for _ in range(2)]
    given = [{**batches[0], "shift": posted(each)["shift"]} for each in batches]
    for _ in range(3):
        cache.run("score", given[0])
    cache.capture_seen()
    for each in given:
        cache.run("score", each)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        cache.run("score", given[0])
        torch.cuda.synchronize()
    copies = [each for each in found.events() if "HtoD" in each.name]
    assert not copies


def test_replays_on_streams_that_wait_for_each_other_find_their_numbers() -> None:
    cache = fetching()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for i in range(150):
        tensors = on_device(5)
        stream = streams[i % 2]
        stream.wait_stream(streams[1 - i % 2])
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            made = cache.run("score", posted(tensors))
        torch.cuda.current_stream().wait_stream(stream)
        assert same_bits(made, score(**tensors))


@pytest.mark.parametrize("deterministic", [False, True], ids=["as usual", "deterministic algorithms"])
def test_every_replay_reads_what_the_host_wrote_last_into_the_table(deterministic: bool) -> None:
    chance, words = np.random.default_rng(11), np.zeros(20, np.int32)
    table = HostTable(words, 2, torch.device("cuda"))
    weights = torch.arange(1, 21, device="cuda") ** 2

    def read(logits: Tensor, scale: Tensor, shift: Tensor) -> Scores:
        return score(logits, scale, shift + (table.there[:-1] * weights).sum())

    cache = GraphCache("cuda", [2, 4, 8], brings=("shift", table))
    cache.register("score", read, FETCHED)
    torch.use_deterministic_algorithms(deterministic)
    try:
        cache.warmup()
    finally:
        torch.use_deterministic_algorithms(False)
    batches = [on_device(rows) for rows in (5, 8, 1)]
    given, made, wanted = [posted(each) for each in batches], [], []
    for i in range(600):
        if i % 200 == 100:
            torch.cuda._sleep(100_000_000)
        for entry in chance.integers(10, size=chance.choice([0, 0, 1, 2, 4, 6])):
            places = np.arange(2 * entry, 2 * entry + 2)
            words[places] = chance.integers(-99, 99, 2)
            table.change(places.tobytes(), words[places].tobytes())
        number = int(chance.integers(3))
        made.append((number, cache.run("score", given[number])))
        wanted.append(words.copy())
    for (number, found), each in zip(made, wanted, strict=True):
        total = (torch.from_numpy(each).cuda() * weights).sum()
        assert same_bits(found, score(**{**batches[number], "shift": batches[number]["shift"] + total}))


def test_a_cache_that_is_given_up_while_its_graphs_run_has_read_its_own_numbers() -> None:
    wanted, made = [], []
    for _ in range(8):
        cache, tensors = fetching(), on_device(5)
        given = posted(tensors)
        wanted.append(score(**tensors))
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)
        made.append(cache.run("score", given))
        del cache
        gc.collect()
        junk = [torch.full((n,), -1).pin_memory() for n in (1 << i for i in range(8, 18))]  # takes free memory
        del junk
    assert all(same_bits(*pair) for pair in zip(made, wanted, strict=True))


def test_changes_that_wait_are_refused_inside_a_capture() -> None:
    table = HostTable(np.zeros(4, np.int32), 2, torch.device("cuda"))
    table.change(np.arange(2).tobytes(), np.ones(2, np.int32).tobytes())

    def upload() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            table.there + 1  # without a kernel the end of the capture would warn of an empty graph
            table.upload()

    with pytest.raises(RuntimeError, match="must not be pending inside a capture"):
        upload()
    table.upload()
    assert not table.is_pending
