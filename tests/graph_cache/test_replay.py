"""A replay gives what the callable gives, for every batch."""

import pytest
import torch

from graph_cache import GraphCache
from tests.graph_cache.recorded import RecordingBackend, Scores, Spied, batch, cache_of, expected, same_bits


@pytest.fixture
def backend() -> RecordingBackend:
    """One that captures."""
    return RecordingBackend()


@pytest.fixture
def spied() -> Spied:
    """What the graphs were given."""
    return Spied()


@pytest.fixture
def cache(backend: RecordingBackend, spied: Spied) -> GraphCache:
    """All buckets prepared."""
    made = cache_of(spied, backend)
    made.warmup()
    return made


@pytest.mark.parametrize("rows", range(1, 9))
def test_a_replay_equals_the_direct_call(cache: GraphCache, backend: RecordingBackend, rows: int) -> None:
    tensors = batch(rows)
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert backend.num_replays == 1


def test_replays_in_any_order_of_sizes_equal_the_direct_call(cache: GraphCache, backend: RecordingBackend) -> None:
    order = (8, 1, 5, 2, 8, 3, 1, 7, 4)
    for rows in order:
        tensors = batch(rows)
        assert same_bits(cache.run("score", tensors), expected(tensors))
    assert backend.num_replays == len(order)


def test_a_graph_is_given_the_batch_and_then_the_fill(cache: GraphCache, spied: Spied) -> None:
    cache.run("score", batch(8))
    tensors = batch(3)
    cache.run("score", tensors)
    given = spied.values[-1]
    assert given["shift"].tolist() == [*tensors["shift"].tolist(), 3]
    assert torch.equal(given["logits"][:3], tensors["logits"])
    assert given["logits"][3].tolist() == [-7.0] * 5
    assert given["scale"][3] == 1.0


def test_all_variants_read_the_same_memory(cache: GraphCache, spied: Spied) -> None:
    pointers = {tensors["logits"].data_ptr() for tensors in spied.tensors}
    assert pointers == {cache.input_buffer("logits").data_ptr()}


def test_a_wider_tail_is_cut_to_the_registered_one(cache: GraphCache) -> None:
    tensors = batch(3, width=9)
    assert same_bits(cache.run("score", tensors), expected(tensors))


def test_strides_of_an_input_do_not_matter(cache: GraphCache) -> None:
    tensors = batch(3)
    strided = {
        "logits": tensors["logits"].T.contiguous().T,
        "scale": torch.stack((tensors["scale"], tensors["scale"]), 1)[:, 0],
        "shift": tensors["shift"][:1].expand(3),
    }
    assert same_bits(cache.run("score", strided), expected(strided))


def test_rows_selects_the_first_rows_of_longer_inputs(cache: GraphCache) -> None:
    tensors = {**batch(8), "shift": torch.arange(5)}
    assert same_bits(cache.run("score", tensors, rows=3), expected(tensors, 3))


def test_results_outlive_the_next_run(cache: GraphCache) -> None:
    first = batch(4)
    kept = cache.run("score", first)
    cache.run("score", batch(4))
    assert same_bits(kept, expected(first))


def test_inputs_are_left_as_they_were(cache: GraphCache) -> None:
    tensors = batch(3)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    cache.run("score", tensors)
    assert all(torch.equal(tensors[name], copies[name]) for name in tensors)


@pytest.mark.parametrize("rows", [0, 3, 8, 12])
def test_out_takes_the_results_and_is_returned(cache: GraphCache, rows: int) -> None:
    tensors = batch(rows)
    out = Scores(torch.full((rows,), -1), torch.full((5, rows), -1.0).T)
    assert cache.run("score", tensors, out=out) is out
    assert same_bits(out, expected(tensors))


def test_out_takes_the_results_inside_an_outer_capture(cache: GraphCache, backend: RecordingBackend) -> None:
    backend.outer = True
    tensors = batch(3)
    out = Scores(torch.zeros(3, dtype=torch.int64), torch.zeros(3, 5))
    cache.run("score", tensors, out=out)
    assert same_bits(out, expected(tensors))


def test_a_batch_written_to_the_owned_buffer_is_not_copied(cache: GraphCache, spied: Spied) -> None:
    buffer = cache.input_buffer("logits")
    cache.run("score", batch(8))
    tensors = batch(3)
    buffer[:3] = tensors["logits"]
    results = cache.run("score", {**tensors, "logits": buffer[:3]})
    assert same_bits(results, expected(tensors))
    assert spied.values[-1]["logits"][3].tolist() == [-7.0] * 5


def test_an_outer_capture_gets_the_callable_on_the_callers_tensors(
    cache: GraphCache, backend: RecordingBackend, spied: Spied
) -> None:
    backend.outer = True
    tensors = batch(3)
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert backend.num_replays == 0
    assert spied.tensors[-1]["logits"].data_ptr() == tensors["logits"].data_ptr()
    backend.outer = False
    cache.run("score", tensors)
    assert backend.num_replays == 1


def test_a_batch_without_rows_is_a_direct_call(cache: GraphCache, backend: RecordingBackend) -> None:
    results = cache.run("score", batch(3), rows=0)
    assert results.best.shape == (0,)
    assert results.scaled.shape == (0, 5)
    assert backend.num_replays == 0
    assert cache.statistics().fallbacks == {}


def test_without_a_backend_the_callable_gets_the_callers_rows_and_nothing_is_prepared() -> None:
    spied = Spied()
    cache = cache_of(spied, None)
    cache.warmup(progress=lambda *_: pytest.fail("nothing is captured"))
    tensors = batch(3, width=9)
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert [tuple(each["logits"].shape) for each in spied.tensors] == [(3, 5)]
    statistics = cache.statistics()
    assert (statistics.direct_runs, statistics.fallbacks, statistics.variants) == (1, {}, 0)
    assert (statistics.pool_bytes, statistics.buffer_bytes) == (0, 0)


def test_replays_work_in_and_out_of_inference_mode(backend: RecordingBackend) -> None:
    cache = cache_of(Spied(), backend)
    tensors = batch(3)
    with torch.inference_mode():
        cache.warmup()
        assert same_bits(cache.run("score", tensors), expected(tensors))
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert backend.num_replays == 2
