"""With real graphs: what came back is read and written where it is, and arrays of the host are sent without a wait."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graph_cache import GraphCache, PinnedRing
from graph_cache.addresses import Binding, tensor_at
from tests.graph_cache.recorded import SPECS, Scores, on_device, same_bits, score

pytestmark = pytest.mark.gpu


@pytest.fixture
def cache() -> Iterator[GraphCache]:
    """All buckets captured; evicted afterwards."""
    made = GraphCache("cuda", (2, 4, 8))
    made.register("score", score, SPECS)
    made.warmup()
    yield made
    made.evict()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_what_came_back_is_read_and_written_in_place_and_nothing_else_is_launched(
    cache: GraphCache, no_sync: Callable[[str], None]
) -> None:
    tensors, out = on_device(5), Scores(torch.zeros(5, dtype=torch.int64).cuda(), torch.zeros(5, 5).cuda())
    for _ in range(2):
        cache.run("score", tensors, out=out)
    kept = [each.clone() for each in out]
    for each in out:
        each.zero_()
    assert cache.capture_seen() == 1
    torch.cuda.synchronize()
    assert all(not each.any() for each in out)  # a capture writes nothing
    staged = cache.input_buffer("logits").clone()
    no_sync("error")
    cache.run("score", tensors, out=out)
    no_sync("default")
    assert all(map(torch.equal, out, kept))
    tensors["logits"].copy_(torch.randn(5, 5))
    cache.run("score", tensors, out=out)
    assert same_bits(out, score(**tensors))
    assert torch.equal(cache.input_buffer("logits"), staged)
    assert cache.statistics().coverage["score rows=5 -> score[5] seen with logits, scale, shift, out"] == 2


def test_memory_that_was_given_back_to_the_driver_is_not_touched(cache: GraphCache) -> None:
    tensors = on_device(5)
    tensors["logits"] = torch.zeros(1 << 24, 5, device="cuda")[:5]  # a segment of its own
    for _ in range(2):
        cache.run("score", tensors)
    torch.cuda.synchronize()
    del tensors["logits"]
    torch.cuda.empty_cache()
    cache.capture_seen()
    tensors = on_device(5)
    assert same_bits(cache.run("score", tensors), score(**tensors))
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int32])
def test_a_tensor_at_an_address_of_the_device(dtype: torch.dtype) -> None:
    there = torch.arange(60, device="cuda").view(6, 10).to(dtype)[1::2, 2:7]
    found = tensor_at(Binding.of("there", there), there.device)
    assert torch.equal(found, there)
    found.fill_(1)
    assert there.eq(1).all()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_numbers_of_the_host_are_sent_through_pinned_memory_without_a_wait(
    cache: GraphCache, no_sync: Callable[[str], None]
) -> None:
    batches = [on_device(5) for _ in range(3)]
    given: list[dict[str, Any]] = [{**each, "shift": each["shift"].cpu().numpy().tobytes()} for each in batches]
    cache.run("score", given[0])  # pins the memory
    torch.cuda.synchronize()
    no_sync("error")
    made = [cache.run("score", given[i % 3]) for i in range(100)]
    no_sync("default")
    wanted = [score(**each) for each in batches]
    assert all(same_bits(each, wanted[i % 3]) for i, each in enumerate(made))


def test_bfloat16_numbers_of_the_host_are_sent_through_pinned_memory() -> None:
    ring, target = PinnedRing(4, torch.bfloat16, torch.device("cuda")), torch.zeros(3, dtype=torch.bfloat16).cuda()
    numbers = torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16)
    ring.send(numbers.view(torch.uint8).numpy().tobytes(), target)
    assert torch.equal(target.cpu(), numbers)
