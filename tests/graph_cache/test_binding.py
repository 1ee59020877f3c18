"""The caller's tensors, read in place."""

from typing import Any
from unittest import mock

import pytest
import torch

from graph_cache import Binding, GraphCache, VariantKey, keys
from graph_cache.buffers import StaticTensors
from tests.graph_cache.recorded import RecordingBackend, Spied, batch, cache_of, expected, same_bits


@pytest.fixture(autouse=True)
def rows_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a batch with other logits needs an owned buffer, which is not made beside a bound one."""
    monkeypatch.setattr(keys, "_FEW", 4)


def bound_cache(logits: torch.Tensor) -> tuple[GraphCache, Spied]:
    spied = Spied()
    cache = cache_of(spied, RecordingBackend())
    cache.bind("logits", logits)
    cache.warmup()
    return cache, spied


def test_a_bound_tensor_of_any_strides_is_read_in_place_left_as_it_was_and_needs_no_owned_buffer():
    for logits in (torch.randn(8, 5), torch.randn(9, 8).T):  # the second is wider than the input, strides (1, 8)
        cache, spied = bound_cache(logits)
        tensors = {**batch(3), "logits": logits[:3]}
        logits.copy_(torch.randn(logits.shape))
        before = logits.clone()
        assert same_bits(cache.run("score", tensors), expected(tensors))
        assert torch.equal(logits, before)
        assert {each["logits"].data_ptr() for each in spied.tensors} == {logits.data_ptr()}
        assert spied.tensors[-1]["logits"].stride() == logits.stride()
        assert cache.statistics().fallbacks == {}
        small_inputs, outputs = 8 * (4 + 8), 8 * (8 + 5 * 4)
        assert cache.statistics().buffer_bytes == small_inputs + outputs
        identity = Binding("logits", logits.data_ptr(), tuple(logits.shape), logits.stride(), torch.float32)
        assert cache.prepared() == [VariantKey("score", rows, (identity,)) for rows in (8, 4, 2)]


@pytest.mark.parametrize("other", ["itself", "elsewhere", "offset", "strides"])
def test_only_the_bound_tensor_is_read_in_place_where_both_variants_are_prepared(other):
    logits = torch.randn(8, 5)
    cache, spied = bound_cache(logits)
    cache.unbind("logits")
    cache.warmup()
    cache.bind("logits", logits)
    foreign = {"elsewhere": torch.randn(3, 5), "offset": logits[1:4], "strides": logits.view(4, 10)[:3, :5]}
    tensors = {**batch(3), "logits": foreign.get(other, logits[:3])}
    assert same_bits(cache.run("score", tensors), expected(tensors))
    place = logits if other == "itself" else cache.input_buffer("logits")
    assert spied.tensors[-1]["logits"].data_ptr() == place.data_ptr()
    assert cache.statistics().fallbacks == {}


def test_any_other_tensor_is_called_directly_when_only_bound_variants_are_prepared():
    cache, _ = bound_cache(torch.randn(8, 5))
    tensors = batch(3)
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert cache.statistics().fallbacks == {"score rows=3: no variant": 1}


def test_the_bound_tensor_is_copied_where_only_the_owned_variant_is_prepared():
    cache = cache_of(Spied(), RecordingBackend())
    cache.warmup()
    logits = torch.randn(8, 5)
    cache.bind("logits", logits)
    tensors = {**batch(3), "logits": logits[:3]}
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert cache.statistics().fallbacks == {"score rows=3: copied, the bound variant is missing": 1}


def test_a_binding_with_fewer_rows_than_a_bucket_leaves_that_bucket_to_the_owned_buffer():
    logits = torch.randn(6, 5)
    cache, _ = bound_cache(logits)
    assert [(key.rows, key.binding is None) for key in cache.prepared()] == [(8, True), (4, False), (2, False)]
    for rows in (3, 6):
        tensors = {**batch(rows), "logits": logits[:rows]}
        assert same_bits(cache.run("score", tensors), expected(tensors))
    assert cache.statistics().fallbacks == {}


def test_variants_of_a_binding_serve_it_alone_also_when_it_is_bound_again():
    first, second = torch.randn(8, 5), torch.randn(8, 5)
    cache, _ = bound_cache(first)
    replays = []
    for bound in (first, second, None, first):
        cache.unbind("logits")
        if bound is not None:
            cache.bind("logits", bound)
        for logits in (first, second):
            tensors = {**batch(3), "logits": logits[:3]}
            assert same_bits(cache.run("score", tensors), expected(tensors))
            replays.append(cache.statistics().replays)
        if bound is None:
            cache.bind("logits", second)
    assert replays == [1, 1, 1, 1, 1, 1, 2, 2]


def test_evicting_the_unbound_keeps_owned_and_current_variants():
    first, second = torch.randn(8, 5), torch.randn(8, 5)
    cache, _ = bound_cache(first)
    cache.unbind("logits")
    cache.warmup(buckets=[8])
    cache.bind("logits", second)
    cache.warmup(buckets=[4])
    assert cache.evict(unbound=True) == 3
    assert [(key.rows, key.binding is None) for key in cache.prepared()] == [(8, True), (4, False)]


def test_two_inputs_may_be_bound_and_each_is_read_where_it_is():
    cache = cache_of(Spied(), RecordingBackend())
    tensors = batch(8)
    cache.bind("logits", tensors["logits"])
    cache.bind("scale", tensors["scale"][:4])
    cache.warmup(buckets=[8, 4])
    for rows in (8, 3):
        assert same_bits(cache.run("score", tensors, rows=rows), expected(tensors, rows))
    coverage = cache.statistics().coverage
    assert set(coverage) == {
        "score rows=8 -> score[8] bound to logits",
        "score rows=3 -> score[4] bound to logits, scale",
    }


def test_a_binding_keeps_its_tensor_alive():
    cache = cache_of(Spied(), RecordingBackend())
    cache.bind("logits", torch.full((8, 5), 2.0))
    cache.warmup(buckets=[2])
    identity = cache.prepared()[0].binding
    assert identity is not None
    taken = [torch.zeros(8, 5) for _ in range(50)]
    assert identity[0].data_ptr not in {each.data_ptr() for each in taken}


def test_an_interrupt_within_a_binding_leaves_no_route_to_the_tensor_before():
    first, second = torch.randn(8, 5), torch.randn(8, 5)
    cache, _ = bound_cache(first)
    cache.run("score", {**batch(2), "logits": first[:2]})
    bind = StaticTensors.bind

    def interrupted(self: StaticTensors, *given: Any) -> None:
        bind(self, *given)
        raise KeyboardInterrupt

    with mock.patch.object(StaticTensors, "bind", interrupted), pytest.raises(KeyboardInterrupt):
        cache.bind("logits", second)
    tensors = {**batch(2), "logits": second[:2]}
    assert same_bits(cache.run("score", tensors), expected(tensors))
