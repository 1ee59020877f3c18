"""Numbers of the host are sent only when they are not what the buffer holds, through pinned memory that was read."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graph_cache import BufferSpec, GraphCache, PinnedRing
from tests.graph_cache.recorded import SPECS, RecordingBackend, Spied, batch, cache_of, expected, same_bits


def held(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The batch with numbers of the host for its scales."""
    return {**tensors, "scale": tensors["scale"].numpy().tobytes()}


def test_numbers_are_sent_once(cache: GraphCache, spied: Spied) -> None:
    given = held(tensors := batch(3))
    cache.run("score", given)
    spied.tensors[-1]["scale"][:3] = 9.0  # shows whether it is written again
    again = cache.run("score", given)
    assert same_bits(again, expected({**tensors, "scale": torch.full((3,), 9.0)}))


def test_numbers_are_sent_each_time_once_the_caller_has_the_buffer(cache: GraphCache) -> None:
    given = held(tensors := batch(3))
    cache.run("score", given)
    buffer = cache.input_buffer("scale")
    for number in (9.0, 8.0, 7.0):
        buffer[:3] = number
        assert same_bits(cache.run("score", given), expected(tensors))


def test_rows_behind_numbers_hold_the_fill_whatever_the_caller_wrote(cache: GraphCache, spied: Spied) -> None:
    buffer, tensors = cache.input_buffer("scale"), batch(3)
    for given in (held(tensors), held(tensors), tensors, tensors):
        buffer[:] = torch.nan
        cache.run("score", given)
        assert spied.values[-1]["scale"].tolist()[3:] == [1.0]
    buffer[:] = torch.nan
    cache.evict(rows=4)
    cache.warmup(buckets=[4])
    cache.run("score", held(tensors))
    assert spied.values[-1]["scale"].tolist()[3:] == [1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool])
def test_numbers_of_any_dtype_are_sent(dtype: torch.dtype) -> None:
    made, scale = GraphCache("cpu", [4], backend=RecordingBackend()), torch.tensor([2.0, 0.0, 1.0]).to(dtype)
    made.register("score", Spied(), {**SPECS, "scale": BufferSpec((), dtype, 1)})
    made.warmup()
    tensors = {**batch(3), "scale": scale}
    given: dict[str, Any] = {**tensors, "scale": scale.view(torch.uint8).numpy().tobytes()}
    assert same_bits(made.run("score", given), expected(tensors))
    assert made.statistics().replays == 1


def test_other_numbers_are_sent(cache: GraphCache) -> None:
    batches = [batch(3), batch(3)]
    given = [held(each) for each in batches]
    for which in (0, 1, 0):
        assert same_bits(cache.run("score", given[which]), expected(batches[which]))


def test_more_rows_of_numbers_that_are_there_are_sent(cache: GraphCache) -> None:
    given = held(tensors := batch(4))
    for rows in (2, 4, 2, 3):
        assert same_bits(cache.run("score", given, rows=rows), expected(tensors, rows))


def test_numbers_are_sent_again_after_a_tensor_was_copied_there(cache: GraphCache) -> None:
    given = held(first := batch(3))
    cache.run("score", given)
    cache.run("score", batch(4))
    assert same_bits(cache.run("score", given), expected(first))


def test_rows_behind_numbers_are_filled_for_a_larger_bucket(cache: GraphCache, spied: Spied) -> None:
    cache.run("score", held(batch(8)))
    given = held(batch(3))
    cache.run("score", given)
    assert spied.values[-1]["scale"].tolist()[3:] == [1.0]
    cache.evict(rows=4)
    cache.run("score", given)
    assert spied.values[-1]["scale"].tolist()[3:] == [1.0] * 5


def test_numbers_whose_copy_fails_are_sent_again(cache: GraphCache, monkeypatch: pytest.MonkeyPatch) -> None:
    given = held(tensors := batch(3))
    with monkeypatch.context() as patched:
        patched.setattr(PinnedRing, "send", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.run("score", given)
    assert same_bits(cache.run("score", given), expected(tensors))


def test_a_direct_call_takes_numbers_of_the_host_too() -> None:
    tensors = batch(3)
    assert same_bits(cache_of(Spied(), None).run("score", held(tensors)), expected(tensors))


@pytest.mark.parametrize(
    ("name", "given", "error", "words"),
    [
        ("logits", bytes(60), TypeError, "got bytes; bytes have one torch.float32 for each row"),
        ("scale", bytes(11), TypeError, "got bytes; bytes have one torch.float32 for each row"),
        ("scale", bytes(8), ValueError, "the same number of rows"),
        ("scale", b"", ValueError, "the same number of rows"),
        ("scale", np.zeros(3, np.float32), TypeError, r"must be a tensor, got ndarray; .* array\.tobytes"),
    ],
)
def test_what_does_not_fit_is_refused(
    cache: GraphCache, name: str, given: Any, error: type[Exception], words: str
) -> None:
    tensors = batch(3)
    with pytest.raises(error, match=words):
        cache.run("score", {**tensors, name: given})
    assert same_bits(cache.run("score", tensors), expected(tensors))


class Pretended:
    """An event of a device that has read what was sent, or not."""

    done = True

    def record(self, stream: object) -> None:
        """Nothing to record."""

    def query(self) -> bool:
        """What the test says."""
        return Pretended.done


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("done", [True, False], ids=["the device keeps up", "the device is behind"])
def test_a_ring_overwrites_only_what_was_read(monkeypatch: pytest.MonkeyPatch, done: bool, dtype: torch.dtype) -> None:
    def unpinned(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.zeros(*shape, **options)

    monkeypatch.setattr(Pretended, "done", done)
    monkeypatch.setattr(torch.cuda, "Event", Pretended)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    ring, sent = PinnedRing(4, dtype, torch.device("cpu")), []
    for each in (ring, ring._halves):
        monkeypatch.setattr(each, "_device", torch.device("cuda"))
    monkeypatch.setattr(torch, "empty", unpinned)
    memories = []
    for i in range(200):
        numbers = torch.arange(i, i + i % 4 + 1).to(dtype)
        target = torch.zeros_like(numbers)
        ring.send(numbers.view(torch.uint8).numpy().tobytes(), target)
        assert torch.equal(target, numbers)
        memory = ring._memory
        assert memory is not None
        if all(memory is not each for each in memories):
            memories.append(memory)
        sent.append((memory.data_ptr(), i))
    assert len(memories) == (1 if done else -(-200 // 32))


def test_a_ring_of_large_arrays_has_few_entries() -> None:
    assert PinnedRing(1 << 30, torch.int64, torch.device("cpu"))._half == 1
    assert PinnedRing(8, torch.int64, torch.device("cpu"))._half == 16
