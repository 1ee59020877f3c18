"""Numbers that graphs fetch from pinned memory: on a device that keeps up and on one that is far behind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from graph_cache import BufferSpec, GraphCache
from tests.graph_cache.cuda.on_device import on_device, score
from tests.graph_cache.recorded import SPECS, same_bits

pytestmark = pytest.mark.gpu


def fetching() -> GraphCache:
    """A warmed-up cache whose shifts are fetched."""
    made = GraphCache("cuda", [2, 4, 8])
    made.register("score", score, {**SPECS, "shift": BufferSpec((), torch.int64, 3, fetched=True)})
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
