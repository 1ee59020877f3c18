"""Numbers of the host that a run sends: to a device that keeps up and to one that is far behind."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graph_cache import BufferSpec, GraphCache, HostMirror
from tests.graph_cache.recorded import SPECS, Scores, on_device, same_bits, score

pytestmark = pytest.mark.gpu


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
