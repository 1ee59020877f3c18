"""A tensor that nobody writes is copied only when it is not what the buffer holds."""

import pytest
import torch
from torch import Tensor

from graph_cache import GraphCache
from tests.graph_cache.recorded import RecordingBackend, Scores, Spied, batch, cache_of, expected, same_bits


@pytest.fixture
def spied() -> Spied:
    return Spied()


@pytest.fixture
def cache(spied: Spied) -> GraphCache:
    made = cache_of(spied, RecordingBackend())
    made.warmup()
    return made


def run(cache: GraphCache, tensors: dict[str, Tensor], constant: frozenset[str] = frozenset({"scale"})) -> Scores:
    route, rows = cache.route("score", tensors, constant=constant)
    made = route.run(tensors, rows, None)
    assert isinstance(made, Scores)
    return made


def test_a_constant_tensor_is_copied_once(cache: GraphCache) -> None:
    tensors = batch(3)
    run(cache, tensors)
    cache.input_buffer("scale")[:3] = 9.0  # shows whether it is written again
    again = run(cache, tensors)
    assert same_bits(again, expected({**tensors, "scale": torch.full((3,), 9.0)}))


def test_another_constant_tensor_is_copied(cache: GraphCache) -> None:
    first, second = batch(3), batch(3)
    for tensors in (first, second, first):
        assert same_bits(run(cache, tensors), expected(tensors))


def test_a_constant_tensor_is_copied_again_after_others_wrote_there(cache: GraphCache) -> None:
    first, second = batch(3), batch(4)
    run(cache, first)
    run(cache, second, frozenset())
    assert same_bits(run(cache, first), expected(first))


def test_a_constant_tensor_is_copied_again_if_it_was_not_constant(cache: GraphCache) -> None:
    tensors = batch(3)
    run(cache, tensors, frozenset())
    tensors["scale"].fill_(2.0)
    assert same_bits(run(cache, tensors), expected(tensors))


def test_rows_behind_it_are_filled_for_a_larger_bucket(cache: GraphCache, spied: Spied) -> None:
    run(cache, batch(8))
    tensors = batch(3)
    run(cache, tensors)
    assert spied.values[-1]["scale"].tolist()[3:] == [1.0]
    cache.evict(rows=4)
    run(cache, tensors)
    assert spied.values[-1]["scale"].tolist()[3:] == [1.0] * 5


def test_a_copy_that_fails_is_done_again(cache: GraphCache, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = batch(3)
    with monkeypatch.context() as patched:
        patched.setattr("graph_cache.buffers.first_rows", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(cache, tensors)
    assert same_bits(run(cache, tensors), expected(tensors))
