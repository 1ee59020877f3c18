"""Preparing, failing to prepare, evicting and counting variants."""

import contextlib
import gc
import logging
from unittest import mock

import pytest
import torch

from graph_cache import CaptureError, LateCaptures, VariantKey, buffers
from graph_cache.capture import uncollected
from tests.graph_cache.recorded import SPECS, RecordingBackend, Scores, Spied, batch, cache_of, expected, same_bits


def test_warmup_captures_the_largest_bucket_of_every_callable_first_and_keeps_what_is_prepared(backend):
    cache = cache_of(Spied(), backend)
    cache.register("again", Spied(), SPECS)
    reports: list[tuple[int, int, str]] = []
    cache.warmup(buckets=[2, 8], progress=lambda *report: reports.append(report))
    labels = ["score[8]", "again[8]", "score[2]", "again[2]"]
    assert reports == [(done, 4, label) for done, label in enumerate(labels, start=1)]
    assert [str(key) for key in cache.prepared()] == labels
    for _ in range(2):
        cache.warmup(names=["again"])
    assert [str(key) for key in cache.prepared()] == [*labels, "again[4]"]
    assert cache.statistics().captures == backend.num_captures == 5


def test_the_callable_runs_twice_before_its_capture_on_the_inputs_of_the_capture(spied):
    cache = cache_of(spied, RecordingBackend())
    cache.warmup()
    assert [each["logits"].shape for each in spied.tensors] == [(rows, 5) for rows in (8, 4, 2) for _ in range(3)]
    pointers = {each["logits"].data_ptr() for each in spied.tensors}
    assert pointers == {cache.input_buffer("logits").data_ptr()}


def test_a_recorded_capture_writes_nothing_as_one_on_a_device():
    target, kept = torch.zeros(3), [torch.zeros(2), torch.zeros(2)]

    def work():
        torch.add(target, 1.0, out=target)
        torch._foreach_add_(kept, 2.0)

    replay = RecordingBackend().capture(work)
    assert [target.tolist(), *(each.tolist() for each in kept)] == [[0.0] * 3, [0.0] * 2, [0.0] * 2]
    replay()
    assert [target.tolist(), *(each.tolist() for each in kept)] == [[1.0] * 3, [2.0] * 2, [2.0] * 2]


@pytest.mark.parametrize("failures", [0, 1])
def test_what_the_caller_wrote_into_a_lent_buffer_outlasts_a_capture(backend, failures):
    """The padding of a capture once stayed there, and the batch was lost."""
    cache = cache_of(Spied(), backend)
    tensors = batch(2)
    for name in ("scale", "shift"):
        own = cache.input_buffer(name)
        own[:2] = tensors[name]
        tensors[name] = own[:2]
    wanted = expected(tensors)
    backend.failures = [RuntimeError("planted")] * failures
    with pytest.raises(CaptureError) if failures else contextlib.nullcontext():
        assert cache.capture_for("score", tensors)
    assert same_bits(cache.run("score", tensors), wanted)


def test_a_variant_that_cannot_be_captured_later_is_given_up_for_all_batches_that_it_would_serve(backend, caplog):
    cache = cache_of(Spied(), backend)
    late = LateCaptures(cache, lambda: True, logging.getLogger("late"))
    backend.failures = [RuntimeError("planted") for _ in range(9)]
    assert [late.capture("score", batch(rows), rows) for rows in (3, 4, 3, 4)] == [None, False, False, False]
    assert (len(backend.failures), caplog.text.count("score runs without a graph")) == (7, 1)
    backend.failures.clear()
    assert late.capture("score", batch(1), 1)


def test_variants_and_callables_with_results_of_one_layout_share_buffers_of_the_largest_bucket():
    cache = cache_of(Spied(), RecordingBackend())
    cache.register("again", lambda **tensors: expected(tensors | {"scale": tensors["scale"] * 2.0}), SPECS)
    for names, buckets in ((["score"], [2]), (["score"], None), (None, None)):
        cache.warmup(names=names, buckets=buckets)
        assert cache.statistics().buffer_bytes == 8 * (5 * 4 + 4 + 8) + 8 * (8 + 5 * 4)
    tensors = batch(7)
    results, again = cache.run("score", tensors), cache.run("again", tensors)
    assert same_bits(results, expected(tensors))
    assert same_bits(again, expected(tensors | {"scale": tensors["scale"] * 2.0}))
    assert cache.statistics().replays == 2


def test_a_failed_capture_names_the_variant_leaves_the_others_and_is_tried_again(backend):
    cache = cache_of(Spied(), backend)
    cause, tensors = RuntimeError("operation not permitted"), batch(3)
    with pytest.raises(CaptureError, match=r"score\[4\] could not be captured: RuntimeError: operation not") as caught:
        cache.warmup(progress=lambda *_: backend.failures.append(cause))  # after the first one
    assert (caught.value.name, caught.value.bucket, caught.value.__cause__) == ("score", 4, cause)
    assert cache.prepared() == [VariantKey("score", 8)]
    assert cache.statistics().captures == 1
    assert same_bits(cache.run("score", tensors), expected(tensors))
    cache.warmup()
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert cache.statistics().coverage == {f"score rows=3 -> score[{bucket}]": 1 for bucket in (8, 4)}


def test_a_buffer_that_finds_no_memory_is_a_failed_capture(backend):
    cache, tensors, full = cache_of(Spied(), backend), batch(3), torch.OutOfMemoryError("no memory")
    with mock.patch.object(buffers, "InputBuffer", side_effect=full), pytest.raises(CaptureError) as caught:
        cache.warmup()
    assert caught.value.__cause__ is full
    cache.warmup()
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
def test_a_callable_that_returns_no_rows_of_tensors_is_not_captured(result, cause):
    cache = cache_of(lambda **_: result, RecordingBackend(), buckets=(2,))  # type: ignore[arg-type,return-value]
    with pytest.raises(CaptureError) as caught:
        cache.warmup()
    assert isinstance(caught.value.__cause__, cause)
    with pytest.raises(cause):
        cache.run("score", batch(2))


def test_a_capture_inside_an_outer_one_is_refused(cache, backend):
    backend.outer = True
    with pytest.raises(RuntimeError, match="inside a capture"):
        cache.warmup()


def test_an_evicted_variant_serves_no_more_and_can_be_prepared_again(cache):
    tensors = batch(3)
    cache.run("score", tensors)
    assert cache.evict(rows=4) == 1
    assert same_bits(cache.run("score", tensors), expected(tensors))
    cache.warmup()
    cache.run("score", tensors)
    assert cache.statistics().coverage == {"score rows=3 -> score[4]": 2, "score rows=3 -> score[8]": 1}
    assert cache.statistics().evictions == 1


def test_eviction_removes_what_meets_every_condition_and_gives_the_pool_back_with_the_last(cache, backend):
    cache.register("again", Spied(), SPECS)
    cache.warmup()
    for conditions, count in (({"name": "again", "rows": 4}, 1), ({"name": "again"}, 2), ({"rows": 8}, 1)):
        assert [cache.evict(**conditions), cache.evict(**conditions)] == [count, 0]
    assert cache.prepared() == [VariantKey("score", 4), VariantKey("score", 2)]
    assert backend.num_resets == 0
    assert cache.evict() == 2
    assert (cache.prepared(), backend.num_resets) == ([], 1)


def test_statistics_count_runs_that_are_served_and_a_reset_keeps_the_variants(cache):
    for rows in (1, 3, 3, 9):
        cache.run("score", batch(rows))
    with pytest.raises(TypeError):
        cache.run("score", batch(3), out=Scores(torch.zeros(3), torch.zeros(3, 5)))
    statistics = cache.statistics()
    assert (statistics.variants, statistics.captures, statistics.replays, statistics.direct_runs) == (3, 3, 3, 1)
    served = {"rows=1 -> score[2]": 1, "rows=3 -> score[4]": 2, "rows=9 -> direct": 1}
    assert statistics.coverage == {f"score {name}": count for name, count in served.items()}
    assert statistics.fallbacks == {"score rows=9: more rows than the largest bucket 8": 1}
    assert statistics.pool_bytes == 3000
    assert cache.statistics() == statistics
    cache.reset_statistics()
    cleared = cache.statistics()
    assert (cleared.variants, cleared.captures, cleared.replays, cleared.direct_runs) == (3, 0, 0, 0)
    assert cleared.coverage == cleared.fallbacks == {}
    cache.run("score", batch(3))
    assert cache.statistics().coverage == {"score rows=3 -> score[4]": 1}


@pytest.mark.parametrize("before", [True, False])
def test_collection_is_off_while_a_capture_lasts_and_then_as_before(before):
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
