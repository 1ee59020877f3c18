"""Tensors that come back are read and written in place, by variants that ``capture_seen`` makes for them."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from graph_cache import BufferSpec, GraphCache, VariantKey
from tests.graph_cache.recorded import SPECS, RecordingBackend, Scores, Spied, batch, cache_of, expected, same_bits


class Best(NamedTuple):
    """Results: best float32 [R]."""

    best: Tensor


def new_out(rows: int) -> Scores:
    return Scores(torch.full((rows,), 7), torch.full((rows, 5), 7.0))


def seen(cache: GraphCache) -> list[VariantKey]:
    return [key for key in cache.prepared() if key.seen]


def renew(tensors: dict[str, Tensor]) -> None:
    """Write other values where the tensors are."""
    for name, tensor in batch(tensors["scale"].shape[0]).items():
        tensors[name].copy_(tensor)


def read(spied: Spied) -> dict[str, int]:
    return {name: each.data_ptr() for name, each in spied.tensors[-1].items()}


def places(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {name: each.data_ptr() for name, each in tensors.items()}


def capture_twice_run(cache: GraphCache, tensors: dict[str, Tensor], out: Scores | None = None) -> int:
    """Run a batch twice, so that its tensors have come back; how many variants are captured then."""
    for _ in range(2):
        cache.run("score", tensors, out=out)
    return cache.capture_seen()


def test_what_came_back_is_read_and_written_in_place(cache: GraphCache, spied: Spied) -> None:
    tensors, out = batch(3), new_out(3)
    assert capture_twice_run(cache, tensors, out) == 1
    renew(tensors)
    staged = cache.input_buffer("logits").clone()
    assert cache.run("score", tensors, out=out) is out
    assert same_bits(out, expected(tensors))
    assert read(spied) == places(tensors)
    assert torch.equal(cache.input_buffer("logits"), staged)
    assert str(seen(cache)[0]) == "score[3] seen with logits, scale, shift, out"


def test_a_capture_writes_nothing_to_the_callers_memory_before_it_is_replayed(spied: Spied) -> None:
    backend = RecordingBackend()
    cache = cache_of(spied, backend)
    cache.warmup()
    tensors, out = batch(3), new_out(3)
    for _ in range(2):
        cache.run("score", tensors, out=out)
    spied.tensors.clear()
    backend.capture = lambda work: work  # what a device records is not run
    cache.capture_seen()
    warm = [each.data_ptr() for call in spied.tensors for each in call.values()]
    assert len(spied.tensors) == 2
    assert not set(warm) & set(places(tensors).values())


def test_what_came_only_once_is_not_captured(cache: GraphCache) -> None:
    kept = [(batch(3), new_out(3)) for _ in range(3)]  # so that no address can come back
    for tensors, out in kept:
        cache.run("score", tensors, out=out)
    assert cache.capture_seen() == 0


def test_only_the_tensors_that_come_back_are_read_in_place_whatever_their_strides(
    cache: GraphCache, spied: Spied
) -> None:
    logits, kept = torch.randn(6, 9)[::2, 1:8], [batch(3) for _ in range(4)]
    for each in kept:
        cache.run("score", {**each, "logits": logits})
    assert cache.capture_seen() == 1
    tensors = {**batch(3), "logits": logits}
    logits.copy_(torch.randn(3, 7))
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert read(spied)["logits"] == logits.data_ptr()
    assert spied.tensors[-1]["logits"].stride() == (18, 1)
    assert read(spied)["scale"] == cache.input_buffer("scale").data_ptr()


@pytest.mark.parametrize("other", ["elsewhere", "strides", "rows"])
def test_tensors_elsewhere_are_served_by_the_bucket(cache: GraphCache, spied: Spied, other: str) -> None:
    memory = torch.randn(4, 10)
    tensors = {**batch(3), "logits": memory[:3, :5]}
    capture_twice_run(cache, tensors)
    logits = {"elsewhere": torch.randn(3, 5), "strides": memory.view(8, 5)[:3], "rows": memory[:2, :5]}[other]
    rows = logits.shape[0]
    tensors = {name: each[:rows] for name, each in tensors.items()} | {"logits": logits}
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert read(spied)["logits"] == cache.input_buffer("logits").data_ptr()


def test_out_elsewhere_is_written_too(cache: GraphCache) -> None:
    tensors, out = batch(3), new_out(3)
    capture_twice_run(cache, tensors, out)
    other = new_out(3)
    assert same_bits(cache.run("score", tensors, out=other), expected(tensors))
    made = cache.run("score", tensors)
    assert same_bits(made, expected(tensors))
    assert made.best.data_ptr() != out.best.data_ptr()


def test_a_variant_that_was_captured_is_not_captured_again(cache: GraphCache) -> None:
    tensors = batch(3)
    assert [capture_twice_run(cache, tensors), cache.capture_seen()] == [1, 0]
    assert capture_twice_run(cache, tensors) == 0


def test_a_capture_that_fails_is_left_out_with_a_warning(cache: GraphCache) -> None:
    kept = [batch(3), batch(5)]
    for tensors in kept:
        for _ in range(2):
            cache.run("score", tensors)
    backend = cache._variants.backend
    assert isinstance(backend, RecordingBackend)
    backend.failures.append(ZeroDivisionError("broken"))
    with pytest.warns(RuntimeWarning, match=r"score\[3\] seen with .* is left out: .* broken"):
        assert cache.capture_seen() == 1
    assert [key.rows for key in seen(cache)] == [5]
    for tensors in kept:
        assert same_bits(cache.run("score", tensors), expected(tensors))


def test_no_more_than_the_bound_are_held_and_the_least_served_leave() -> None:
    cache = GraphCache("cpu", (2, 4, 8), backend=RecordingBackend(), most_seen=2)
    cache.register("score", Spied(), SPECS)
    cache.warmup()
    kept = {rows: batch(rows) for rows in (3, 4, 5)}
    for rows, runs in ((3, 2), (4, 3)):
        for _ in range(runs):
            cache.run("score", kept[rows])
    assert cache.capture_seen() == 2
    for rows, runs in ((3, 5), (4, 1), (5, 2)):
        for _ in range(runs):
            cache.run("score", kept[rows])
    assert cache.capture_seen() == 1
    assert {key.rows for key in seen(cache)} == {3, 5}
    assert cache.statistics().evictions == 1


def test_without_a_backend_nothing_is_captured() -> None:
    assert cache_of(Spied(), None).capture_seen() == 0


def test_seen_variants_outlive_a_binding_and_leave_with_all(cache: GraphCache) -> None:
    tensors = batch(3)
    capture_twice_run(cache, tensors)
    assert cache.evict(unbound=True) == 0
    assert cache.evict() == 4
    assert same_bits(cache.run("score", tensors), expected(tensors))


def test_a_bound_tensor_is_still_read_in_place_where_little_else_came_back(cache: GraphCache, spied: Spied) -> None:
    scale, kept = torch.rand(4), [batch(4) for _ in range(3)]
    for each in kept:
        cache.run("score", {**each, "scale": scale})
    assert cache.capture_seen() == 1
    logits = torch.randn(8, 5)
    cache.bind("logits", logits)
    cache.warmup()
    tensors = {**batch(4), "logits": logits[:4], "scale": scale}
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert read(spied)["logits"] == logits.data_ptr()


def test_ragged_rows_of_a_bound_tensor_are_one_batch_whatever_their_number() -> None:
    def fn(logits: Tensor, counts: Tensor) -> Best:
        ends = counts.cumsum(0).clamp(max=logits.shape[0])
        return Best(logits.max(-1).values.cumsum(0)[(ends - 1).clamp(min=0)] * (counts > 0))

    cache = GraphCache("cpu", (2, 4), backend=RecordingBackend())
    counts = BufferSpec((), torch.int64, 0)
    cache.register("best", fn, {"logits": BufferSpec((5,), torch.float32, 0.0, 3), "counts": counts})
    buffer, given, out = torch.randn(12, 5), torch.zeros(4, dtype=torch.int64), Best(torch.zeros(4))
    cache.bind("logits", buffer)
    cache.warmup()
    for rows in ([1, 2, 3, 1], [3, 3, 3, 3]):
        given.copy_(torch.tensor(rows))
        cache.run("best", {"logits": buffer[: sum(rows)], "counts": given}, out=out)
    assert cache.capture_seen() == 1
    for rows in ([2, 2, 2, 2], [1, 1, 1, 1]):
        given.copy_(torch.tensor(rows))
        cache.run("best", {"logits": buffer[: sum(rows)], "counts": given}, out=out)
        assert torch.equal(out.best, fn(buffer[: sum(rows)], given).best)
    assert [key.seen for key in cache.prepared()] == [False, False, True]
    assert cache.statistics().coverage["best rows=4 -> best[4] seen with logits, counts, out"] == 2


def test_a_covering_variant_is_captured_for_what_it_served() -> None:
    class Left(Spied):
        """What is covered, with results that tell it from the covering one."""

    covered, covering = Left(), Spied()
    cache = GraphCache("cpu", (4,), backend=RecordingBackend())
    cache.register("left", covered, SPECS)
    cache.register("score", covering, SPECS, covers=["left"])
    cache.warmup(names=["score"])
    tensors = batch(3)
    for _ in range(2):
        cache.run("left", tensors)
    cache.capture_seen()
    assert [(key.name, key.rows) for key in seen(cache)] == [("score", 3)]
    assert same_bits(cache.run("left", tensors), expected(tensors))
    assert read(covering) == places(tensors)
    assert covered.tensors == []
