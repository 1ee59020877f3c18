"""Preparing, failing to prepare, evicting and counting variants."""

import gc

import pytest
import torch

from graph_cache import CaptureError, VariantKey
from graph_cache.capture import uncollected
from tests.graph_cache.recorded import (
    SPECS,
    RecordingBackend,
    Scores,
    Spied,
    batch,
    cache_of,
    expected,
    same_bits,
)


def test_warmup_captures_the_largest_bucket_of_every_callable_first_and_reports_each() -> None:
    cache = cache_of(Spied(), RecordingBackend())
    cache.register("again", Spied(), SPECS)
    reports: list[tuple[int, int, str]] = []
    cache.warmup(buckets=[2, 8], progress=lambda *report: reports.append(report))
    labels = ["score[8]", "again[8]", "score[2]", "again[2]"]
    assert reports == [(done, 4, label) for done, label in enumerate(labels, start=1)]
    assert [str(key) for key in cache.prepared()] == labels


def test_warmup_keeps_what_is_prepared() -> None:
    backend = RecordingBackend()
    cache = cache_of(Spied(), backend)
    cache.warmup(buckets=[4])
    cache.warmup()
    cache.warmup()
    assert backend.num_captures == 3
    assert cache.statistics().captures == 3


def test_warmup_takes_only_the_named_callables() -> None:
    cache = cache_of(Spied(), RecordingBackend())
    cache.register("again", Spied(), SPECS)
    cache.warmup(names=["again"])
    assert cache.prepared() == [VariantKey("again", rows) for rows in (8, 4, 2)]


def test_the_callable_runs_twice_before_its_capture_on_the_inputs_of_the_capture() -> None:
    spied = Spied()
    cache_of(spied, RecordingBackend(), buckets=(4,)).warmup()
    assert len(spied.tensors) == 3
    assert {each["logits"].data_ptr() for each in spied.tensors} == {spied.tensors[0]["logits"].data_ptr()}
    assert all(each["logits"].shape == (4, 5) for each in spied.tensors)


def test_memory_of_the_buffers_does_not_grow_with_the_variants() -> None:
    cache = cache_of(Spied(), RecordingBackend())
    cache.warmup(buckets=[8])
    one = cache.statistics().buffer_bytes
    cache.warmup()
    assert cache.statistics().buffer_bytes == one == 8 * (5 * 4 + 4 + 8) + 8 * (8 + 5 * 4)


def test_callables_with_results_of_one_layout_share_the_buffers_and_keep_their_results_apart() -> None:
    cache = cache_of(Spied(), RecordingBackend())
    cache.warmup()
    one = cache.statistics().buffer_bytes
    cache.register("again", lambda **tensors: expected(tensors | {"scale": tensors["scale"] * 2.0}), SPECS)
    cache.warmup()
    assert cache.statistics().buffer_bytes == one
    tensors = batch(3)
    found, again = cache.run("score", tensors), cache.run("again", tensors)
    assert same_bits(found, expected(tensors))
    assert same_bits(again, expected(tensors | {"scale": tensors["scale"] * 2.0}))


def test_buffers_have_the_largest_bucket_even_when_a_smaller_one_is_prepared_first() -> None:
    cache = cache_of(Spied(), RecordingBackend())
    cache.warmup(buckets=[2])
    cache.warmup(buckets=[8])
    tensors = batch(7)
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert cache.statistics().replays == 1


def test_a_failed_capture_names_the_variant_chains_its_cause_and_leaves_the_others() -> None:
    backend = RecordingBackend()
    cache = cache_of(Spied(), backend)
    cache.warmup(buckets=[8])
    cause = RuntimeError("operation not permitted")
    backend.failures = [cause]
    with pytest.raises(CaptureError, match=r"score\[4\] could not be captured: RuntimeError: operation not") as caught:
        cache.warmup()
    assert (caught.value.name, caught.value.bucket, caught.value.__cause__) == ("score", 4, cause)
    assert cache.prepared() == [VariantKey("score", 8)]
    tensors = batch(3)
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert cache.statistics().coverage == {"score rows=3 -> score[8]": 1}


def test_captures_are_counted_as_they_are_made_also_before_one_that_fails() -> None:
    backend, counted = RecordingBackend(), []
    cache = cache_of(Spied(), backend)

    def report(done: int, total: int, label: str) -> None:
        counted.append(cache.statistics().captures)
        backend.failures = [RuntimeError("once")] if done == 2 else []

    with pytest.raises(CaptureError):
        cache.warmup(progress=report)
    assert counted == [1, 2]
    assert cache.statistics().captures == 2


def test_a_later_warmup_tries_a_failed_capture_again() -> None:
    backend = RecordingBackend()
    cache = cache_of(Spied(), backend)
    backend.failures = [RuntimeError("once")]
    with pytest.raises(CaptureError):
        cache.warmup()
    assert cache.prepared() == []
    cache.warmup()
    assert [key.rows for key in cache.prepared()] == [8, 4, 2]
    assert cache.statistics().captures == 3
    tensors = batch(3)
    assert same_bits(cache.run("score", tensors), expected(tensors))


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        (torch.zeros(2), TypeError),
        ((torch.zeros(2), torch.zeros(2)), TypeError),
        (Scores(torch.zeros(2), 1.0), TypeError),  # type: ignore[arg-type]
        (Scores(torch.zeros(2), torch.zeros(3)), ValueError),
        (Scores(torch.zeros(2), torch.zeros(())), ValueError),
    ],
)
def test_a_callable_that_returns_no_rows_of_tensors_is_not_captured(result: object, cause: type[Exception]) -> None:
    cache = cache_of(lambda **_: result, RecordingBackend(), buckets=(2,))  # type: ignore[arg-type,return-value]
    with pytest.raises(CaptureError) as caught:
        cache.warmup()
    assert isinstance(caught.value.__cause__, cause)
    with pytest.raises(cause):
        cache.run("score", batch(2))


def test_warmup_inside_an_outer_capture_is_refused() -> None:
    backend = RecordingBackend()
    cache = cache_of(Spied(), backend)
    backend.outer = True
    with pytest.raises(RuntimeError, match="inside a capture"):
        cache.warmup()


def test_an_evicted_variant_serves_no_more_and_can_be_prepared_again() -> None:
    cache = cache_of(Spied(), RecordingBackend())
    cache.warmup()
    tensors = batch(3)
    cache.run("score", tensors)
    assert cache.evict(rows=4) == 1
    assert same_bits(cache.run("score", tensors), expected(tensors))
    cache.warmup()
    cache.run("score", tensors)
    assert cache.statistics().coverage == {"score rows=3 -> score[4]": 2, "score rows=3 -> score[8]": 1}
    assert cache.statistics().evictions == 1


def test_eviction_removes_what_meets_every_condition() -> None:
    cache = cache_of(Spied(), RecordingBackend())
    cache.register("again", Spied(), SPECS)
    cache.warmup()
    assert cache.evict("again", rows=4) == 1
    assert cache.evict("again", rows=4) == 0
    assert cache.evict("again") == 2
    assert cache.evict(rows=8) == 1
    assert cache.prepared() == [VariantKey("score", 4), VariantKey("score", 2)]
    assert cache.evict() == 2
    assert cache.prepared() == []


def test_the_pool_is_given_back_with_the_last_variant_only() -> None:
    backend = RecordingBackend()
    cache = cache_of(Spied(), backend)
    cache.warmup()
    cache.evict(rows=4)
    assert backend.num_resets == 0
    cache.evict()
    assert backend.num_resets == 1


def test_statistics_count_runs_and_a_reset_keeps_the_variants() -> None:
    cache = cache_of(Spied(), RecordingBackend())
    cache.warmup()
    for rows in (1, 3, 3, 9):
        cache.run("score", batch(rows))
    statistics = cache.statistics()
    assert (statistics.variants, statistics.captures, statistics.replays, statistics.direct_runs) == (3, 3, 3, 1)
    assert statistics.coverage == {
        "score rows=1 -> score[2]": 1,
        "score rows=3 -> score[4]": 2,
        "score rows=9 -> direct": 1,
    }
    assert statistics.pool_bytes == 3000
    assert cache.statistics() == statistics
    cache.reset_statistics()
    cleared = cache.statistics()
    assert (cleared.variants, cleared.captures, cleared.replays, cleared.direct_runs) == (3, 0, 0, 0)
    assert cleared.coverage == cleared.fallbacks == {}
    cache.run("score", batch(3))
    assert cache.statistics().coverage == {"score rows=3 -> score[4]": 1}


def test_a_run_that_is_refused_is_not_counted() -> None:
    cache = cache_of(Spied(), RecordingBackend())
    cache.warmup()
    with pytest.raises(TypeError):
        cache.run("score", batch(3), out=Scores(torch.zeros(3), torch.zeros(3, 5)))
    assert cache.statistics().replays == 0


@pytest.mark.parametrize("before", [True, False])
def test_collection_is_off_while_a_capture_lasts_and_then_as_before(before: bool) -> None:
    seen: list[bool] = []

    @uncollected()
    def failing() -> None:
        seen.append(gc.isenabled())
        raise KeyError

    (gc.enable if before else gc.disable)()
    try:
        with pytest.raises(KeyError):
            failing()
        assert [*seen, gc.isenabled()] == [False, before]
    finally:
        gc.enable()
