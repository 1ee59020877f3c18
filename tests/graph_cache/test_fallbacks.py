"""What serves a batch when the variant made for it is missing."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from graph_cache import CaptureError, GraphCache, VariantKey
from tests.graph_cache.recorded import (
    SPECS,
    WIDTH,
    RecordingBackend,
    Scores,
    Spied,
    batch,
    cache_of,
    expected,
    same_bits,
)


def covered_cache(backend: RecordingBackend, most_copied: float = math.inf) -> GraphCache:
    """``plain`` (no shift: 3 is its fill) is covered by ``second`` and ``score``, registered in this order."""
    cache = GraphCache("cpu", (2, 4, 8), backend=backend)
    cache.register(
        "plain",
        lambda logits, scale: Scores(logits.argmax(-1) + 3, logits * scale[:, None]),
        {name: SPECS[name] for name in ("logits", "scale")},
        most_copied=most_copied,
    )
    cache.register("second", Spied(), SPECS, covers=["plain"])
    cache.register("score", Spied(), SPECS, covers=["plain"])
    return cache


def plain(rows: int) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch(rows).items() if name != "shift"}


def test_a_larger_bucket_serves_a_batch_whose_own_is_missing() -> None:
    backend = RecordingBackend()
    cache = cache_of(Spied(), backend)
    cache.warmup(buckets=[8])
    tensors = batch(3)
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert backend.num_replays == 1
    assert cache.statistics().fallbacks == {"score rows=3: larger bucket 8": 1}
    assert cache.statistics().coverage == {"score rows=3 -> score[8]": 1}


def test_the_smallest_larger_bucket_is_taken() -> None:
    cache = cache_of(Spied(), RecordingBackend())
    cache.warmup(buckets=[4, 8])
    cache.run("score", batch(1))
    assert cache.statistics().coverage == {"score rows=1 -> score[4]": 1}


def test_a_covering_callable_serves_with_the_missing_input_at_its_fill() -> None:
    backend = RecordingBackend()
    cache = covered_cache(backend)
    cache.warmup(names=["score"])
    cache.run("score", batch(4))  # leaves other values in the input that plain lacks
    tensors = plain(3)
    wanted = expected({**tensors, "shift": torch.full((3,), 3)})
    assert same_bits(cache.run("plain", tensors), wanted)
    assert backend.num_replays == 2
    assert cache.statistics().fallbacks == {"plain rows=3: covered by score[4]": 1}


def test_covering_callables_serve_in_order_of_registration() -> None:
    cache = covered_cache(RecordingBackend())
    cache.warmup(names=["score"])
    cache.warmup(names=["second"], buckets=[8])
    cache.run("plain", plain(1))
    assert cache.statistics().coverage == {"plain rows=1 -> second[8]": 1}


def test_a_larger_bucket_of_its_own_comes_before_a_covering_callable() -> None:
    cache = covered_cache(RecordingBackend())
    cache.warmup(names=["score"])
    cache.warmup(names=["plain"], buckets=[8])
    cache.run("plain", plain(1))
    assert cache.statistics().coverage == {"plain rows=1 -> plain[8]": 1}


def test_covering_is_not_mutual() -> None:
    cache = covered_cache(RecordingBackend())
    cache.warmup(names=["plain"])
    cache.run("score", batch(1))
    assert cache.statistics().coverage == {"score rows=1 -> direct": 1}


def test_a_batch_that_nothing_serves_is_called_directly_on_the_callers_tensors() -> None:
    spied = Spied()
    cache = cache_of(spied, RecordingBackend())
    tensors = batch(3)
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert spied.tensors[-1]["scale"].data_ptr() == tensors["scale"].data_ptr()
    statistics = cache.statistics()
    assert statistics.fallbacks == {"score rows=3: no variant": 1}
    assert (statistics.direct_runs, statistics.replays) == (1, 0)
    assert statistics.buffer_bytes == 0


def test_more_rows_than_the_largest_bucket_are_called_directly() -> None:
    cache = cache_of(Spied(), RecordingBackend())
    cache.warmup()
    tensors = batch(9)
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert cache.statistics().fallbacks == {"score rows=9: more rows than the largest bucket 8": 1}


def test_a_variant_captured_later_is_used_by_the_next_run() -> None:
    cache = cache_of(Spied(), RecordingBackend())
    tensors = batch(3)
    cache.run("score", tensors)
    cache.warmup(buckets=[8])
    cache.run("score", tensors)
    cache.warmup(buckets=[4])
    cache.run("score", tensors)
    coverage = cache.statistics().coverage
    assert coverage == {f"score rows=3 -> {server}": 1 for server in ("direct", "score[8]", "score[4]")}


def test_a_covering_callable_with_other_results_is_refused_when_it_is_captured() -> None:
    class Other(NamedTuple):
        best: Tensor

    cache = covered_cache(RecordingBackend())
    cache.register("other", lambda logits: Other(logits.argmax(-1)), {"logits": SPECS["logits"]}, covers=["plain"])
    cache.warmup(names=["plain"])
    with pytest.raises(CaptureError, match="'other' must return what 'plain' returns") as caught:
        cache.warmup(names=["other"])
    assert isinstance(caught.value.__cause__, TypeError)
    assert cache.prepared() == [VariantKey("plain", rows) for rows in (8, 4, 2)]


@pytest.mark.parametrize(("most", "replays"), [(3 * (WIDTH * 4 + 4 + 8), 1), (3 * (WIDTH * 4 + 4 + 8) - 1, 0)])
def test_a_batch_of_more_bytes_than_are_copied_is_called_directly(most: int, replays: int) -> None:
    backend = RecordingBackend()
    cache = GraphCache("cpu", (4,), backend=backend)
    cache.register("score", Spied(), SPECS, most_copied=most)
    cache.warmup()
    tensors = batch(3)
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert backend.num_replays == replays
    assert (cache.statistics().coverage == {"score rows=3 -> direct": 1}) == (replays == 0)


def test_what_is_read_in_place_is_not_copied() -> None:
    backend = RecordingBackend()
    cache = GraphCache("cpu", (4,), backend=backend)
    cache.register("score", Spied(), SPECS, most_copied=4 * (4 + 8))
    tensors = batch(4)
    cache.bind("logits", tensors["logits"])
    cache.warmup()
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert backend.num_replays == 1


def test_a_callable_without_variants_of_its_own_is_replayed_whatever_is_copied() -> None:
    backend = RecordingBackend()
    cache = covered_cache(backend, most_copied=0)
    cache.warmup(names=["score"])
    tensors = plain(3)
    assert same_bits(cache.run("plain", tensors), expected({**tensors, "shift": torch.full((3,), 3)}))
    assert backend.num_replays == 1


def test_only_the_rows_of_a_batch_count_of_a_bound_buffer() -> None:
    backend = RecordingBackend()
    cache = GraphCache("cpu", (4,), backend=backend)
    cache.register("score", Spied(), SPECS, most_copied=2 * (WIDTH * 4 + 4 + 8))
    cache.warmup()
    tensors = batch(2)
    buffer = torch.cat([tensors["logits"], torch.zeros(30, WIDTH)])
    cache.bind("logits", buffer)  # after the warm-up: its variant is missing
    given = {**tensors, "logits": buffer[:2]}
    assert same_bits(cache.run("score", given), expected(given))
    assert backend.num_replays == 1


def test_rows_of_another_stride_are_copied_however_many() -> None:
    backend = RecordingBackend()
    cache = GraphCache("cpu", (4,), backend=backend)
    cache.register("score", Spied(), SPECS, most_copied=0)
    cache.warmup()
    tensors = batch(3, WIDTH + 2)
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert backend.num_replays == 1
