"""The caller's tensors, read in place."""

import pytest
import torch

from graph_cache import Binding, GraphCache, VariantKey, keys
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


def test_a_bound_tensor_is_read_in_place_and_needs_no_owned_buffer() -> None:
    logits = torch.randn(8, 5)
    cache, spied = bound_cache(logits)
    tensors = {**batch(3), "logits": logits[:3]}
    logits.copy_(torch.randn(8, 5))
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert {each["logits"].data_ptr() for each in spied.tensors} == {logits.data_ptr()}
    assert cache.statistics().fallbacks == {}
    small_inputs, outputs = 8 * (4 + 8), 8 * (8 + 5 * 4)
    assert cache.statistics().buffer_bytes == small_inputs + outputs


def test_a_bound_tensor_may_be_strided_and_wider_than_the_input() -> None:
    logits = torch.randn(9, 8).T  # [8, 9], strides (1, 8)
    cache, spied = bound_cache(logits)
    tensors = {**batch(4), "logits": logits[:4]}
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert spied.tensors[-1]["logits"].stride() == (1, 8)


def test_a_run_leaves_a_bound_tensor_as_it_was() -> None:
    logits = torch.randn(8, 5)
    cache, _ = bound_cache(logits)
    copy = logits.clone()
    cache.run("score", {**batch(3), "logits": logits[:3]})
    assert torch.equal(logits, copy)


def test_keys_hold_the_identity_of_the_bound_tensor() -> None:
    logits = torch.randn(8, 5)
    cache, _ = bound_cache(logits)
    identity = Binding("logits", logits.data_ptr(), (8, 5), (5, 1), torch.float32)
    assert cache.prepared() == [VariantKey("score", rows, (identity,)) for rows in (8, 4, 2)]


@pytest.mark.parametrize("other", ["elsewhere", "offset", "strides"])
def test_any_other_tensor_goes_through_the_owned_buffer(other: str) -> None:
    logits = torch.randn(8, 5)
    cache, spied = bound_cache(logits)
    cache.unbind("logits")
    cache.warmup()
    cache.bind("logits", logits)
    foreign = {"elsewhere": torch.randn(3, 5), "offset": logits[1:4], "strides": logits.view(4, 10)[:3, :5]}[other]
    tensors = {**batch(3), "logits": foreign}
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert spied.tensors[-1]["logits"].data_ptr() == cache.input_buffer("logits").data_ptr()
    assert cache.statistics().fallbacks == {}


def test_any_other_tensor_is_called_directly_when_only_bound_variants_are_prepared() -> None:
    cache, _ = bound_cache(torch.randn(8, 5))
    tensors = batch(3)
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert cache.statistics().fallbacks == {"score rows=3: no variant": 1}


def test_the_bound_tensor_is_copied_where_only_the_owned_variant_is_prepared() -> None:
    cache = cache_of(Spied(), RecordingBackend())
    cache.warmup()
    logits = torch.randn(8, 5)
    cache.bind("logits", logits)
    tensors = {**batch(3), "logits": logits[:3]}
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert cache.statistics().fallbacks == {"score rows=3: copied, the bound variant is missing": 1}


def test_a_binding_with_fewer_rows_than_a_bucket_leaves_that_bucket_to_the_owned_buffer() -> None:
    logits = torch.randn(6, 5)
    cache, _ = bound_cache(logits)
    assert [(key.rows, key.binding is None) for key in cache.prepared()] == [(8, True), (4, False), (2, False)]
    for rows in (3, 6):
        tensors = {**batch(rows), "logits": logits[:rows]}
        assert same_bits(cache.run("score", tensors), expected(tensors))
    assert cache.statistics().fallbacks == {}


def test_another_binding_does_not_use_the_variants_of_the_first() -> None:
    first, second = torch.randn(8, 5), torch.randn(8, 5)
    cache, _ = bound_cache(first)
    cache.run("score", {**batch(3), "logits": first[:3]})
    cache.bind("logits", second)
    for logits in (first, second):
        tensors = {**batch(3), "logits": logits[:3]}
        assert same_bits(cache.run("score", tensors), expected(tensors))
    assert (cache.statistics().replays, cache.statistics().direct_runs) == (1, 2)


def test_the_bound_variant_is_taken_where_the_owned_one_is_prepared_too() -> None:
    logits = torch.randn(8, 5)
    cache, spied = bound_cache(logits)
    cache.unbind("logits")
    cache.warmup()
    cache.bind("logits", logits)
    tensors = {**batch(3), "logits": logits[:3]}
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert spied.tensors[-1]["logits"].data_ptr() == logits.data_ptr()


def test_a_tensor_bound_again_finds_its_variants() -> None:
    logits = torch.randn(8, 5)
    cache, _ = bound_cache(logits)
    cache.unbind("logits")
    tensors = {**batch(3), "logits": logits[:3]}
    cache.run("score", tensors)
    cache.bind("logits", logits)
    cache.run("score", tensors)
    assert (cache.statistics().direct_runs, cache.statistics().replays) == (1, 1)


def test_evicting_the_unbound_keeps_owned_and_current_variants() -> None:
    first, second = torch.randn(8, 5), torch.randn(8, 5)
    cache, _ = bound_cache(first)
    cache.unbind("logits")
    cache.warmup(buckets=[8])
    cache.bind("logits", second)
    cache.warmup(buckets=[4])
    assert cache.evict(unbound=True) == 3
    assert [(key.rows, key.binding is None) for key in cache.prepared()] == [(8, True), (4, False)]


def test_two_inputs_may_be_bound_and_each_is_read_where_it_is() -> None:
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


def test_a_binding_keeps_its_tensor_alive() -> None:
    cache = cache_of(Spied(), RecordingBackend())
    cache.bind("logits", torch.full((8, 5), 2.0))
    cache.warmup(buckets=[2])
    identity = cache.prepared()[0].binding
    assert identity is not None
    taken = [torch.zeros(8, 5) for _ in range(50)]
    assert identity[0].data_ptr not in {each.data_ptr() for each in taken}


def test_unbinding_what_is_not_bound_says_what_is() -> None:
    cache, _ = bound_cache(torch.randn(8, 5))
    with pytest.raises(ValueError, match=r"'scale' must be bound .* bound now: 'logits'"):
        cache.unbind("scale")
