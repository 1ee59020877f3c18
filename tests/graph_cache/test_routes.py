"""A run gives what the callable gives for every batch, also where the variant made for it is missing."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from graph_cache import Binding, CaptureError, GraphCache, VariantKey, keys
from graph_cache.buffers import StaticTensors
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

ROW_BYTES = WIDTH * 4 + 4 + 8


def test_replays_in_any_order_of_sizes_equal_the_direct_call(cache, backend):
    order = (8, 1, 5, 2, 6, 8, 3, 1, 7, 4)
    for rows in order:
        tensors = batch(rows)
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        assert same_bits(cache.run("score", tensors), expected(copies))
        assert all(torch.equal(tensors[name], copies[name]) for name in tensors)
    assert backend.num_replays == len(order)


def test_strided_and_wider_inputs_and_the_first_rows_of_longer_ones_equal_the_direct_call(cache):
    tensors = batch(3)
    strided = {
        "logits": batch(3, width=9)["logits"].T.contiguous().T,
        "scale": torch.stack((tensors["scale"], tensors["scale"]), 1)[:, 0],
        "shift": tensors["shift"][:1].expand(3),
    }
    assert same_bits(cache.run("score", strided), expected(strided))
    longer = {**batch(8), "shift": torch.arange(5)}
    assert same_bits(cache.run("score", longer, rows=3), expected(longer, 3))


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("rows", [0, 3, 8, 12])
def test_out_takes_the_results_and_is_returned(cache, backend, rows, outer):
    backend.outer = outer
    tensors = batch(rows)
    out = Scores(torch.full((rows,), -1), torch.full((WIDTH, rows), -1.0).T)
    assert cache.run("score", tensors, out=out) is out
    assert same_bits(out, expected(tensors))


def test_an_outer_capture_gets_the_callable_on_the_callers_tensors(cache, backend, spied):
    backend.outer = True
    tensors = batch(3)
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert backend.num_replays == 0
    assert spied.tensors[-1]["logits"].data_ptr() == tensors["logits"].data_ptr()
    backend.outer = False
    cache.run("score", tensors)
    assert backend.num_replays == 1


def test_a_batch_without_rows_is_a_direct_call(cache, backend):
    results = cache.run("score", batch(3), rows=0)
    assert (results.best.shape, results.scaled.shape) == ((0,), (0, WIDTH))
    assert backend.num_replays == 0
    assert cache.statistics().fallbacks == {}


def test_without_a_backend_the_callable_gets_the_callers_rows_and_nothing_is_prepared(spied):
    cache = cache_of(spied, None)
    cache.warmup(progress=lambda *_: pytest.fail("nothing is captured"))
    tensors = batch(3, width=9)
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert [tuple(each["logits"].shape) for each in spied.tensors] == [(3, WIDTH)]
    statistics = cache.statistics()
    assert (statistics.direct_runs, statistics.fallbacks, statistics.variants) == (1, {}, 0)
    assert (statistics.pool_bytes, statistics.buffer_bytes) == (0, 0)


@pytest.mark.parametrize("warmed_up_within", [True, False])
def test_replays_work_in_and_out_of_inference_mode(backend, warmed_up_within):
    cache = cache_of(Spied(), backend)
    with torch.inference_mode(warmed_up_within):
        cache.warmup()
    for within in (True, False):
        with torch.inference_mode(within):
            tensors = batch(3)
            assert same_bits(cache.run("score", tensors), expected(tensors))
    assert backend.num_replays == 2


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


def test_the_smallest_variant_that_is_there_serves_and_one_captured_later_the_next_run(spied):
    cache = cache_of(spied, RecordingBackend())
    tensors = batch(1)
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert spied.tensors[-1]["scale"].data_ptr() == tensors["scale"].data_ptr()
    assert cache.statistics().buffer_bytes == 0
    for buckets in ([8], [4], [2]):
        cache.warmup(buckets=buckets)
        assert same_bits(cache.run("score", tensors), expected(tensors))
    statistics = cache.statistics()
    assert (statistics.direct_runs, statistics.replays) == (1, 3)
    servers = ("direct", "score[8]", "score[4]", "score[2]")
    assert statistics.coverage == {f"score rows=1 -> {server}": 1 for server in servers}
    reasons = ("no variant", "larger bucket 8", "larger bucket 4")
    assert statistics.fallbacks == {f"score rows=1: {reason}": 1 for reason in reasons}


def test_a_covering_callable_serves_with_the_missing_input_at_its_fill(backend):
    cache = covered_cache(backend)
    cache.warmup(names=["score"])
    cache.run("score", batch(4))  # leaves other values in the input that plain lacks
    tensors = plain(3)
    wanted = expected({**tensors, "shift": torch.full((3,), 3)})
    assert same_bits(cache.run("plain", tensors), wanted)
    assert backend.num_replays == 2
    assert cache.statistics().fallbacks == {"plain rows=3: covered by score[4]": 1}


@pytest.mark.parametrize(
    ("prepared", "asked", "server"),
    [
        ({"score": None, "second": [8]}, "plain", "second[8]"),
        ({"score": None, "plain": [8]}, "plain", "plain[8]"),
        ({"plain": None}, "score", "direct"),
    ],
    ids=["by order of registration", "a larger bucket of its own first", "covering is not mutual"],
)
def test_a_callable_with_fewer_variants_is_served_by_the_first_that_covers_it(backend, prepared, asked, server):
    cache = covered_cache(backend)
    for name, buckets in prepared.items():
        cache.warmup(names=[name], buckets=buckets)
    cache.run(asked, plain(1) if asked == "plain" else batch(1))
    assert cache.statistics().coverage == {f"{asked} rows=1 -> {server}": 1}


def test_a_covering_callable_with_other_results_is_refused_when_it_is_captured(backend):
    class Other(NamedTuple):
        best: Tensor

    cache = covered_cache(backend)
    cache.register("other", lambda logits: Other(logits.argmax(-1)), {"logits": SPECS["logits"]}, covers=["plain"])
    cache.warmup(names=["plain"])
    with pytest.raises(CaptureError, match="'other' must return what 'plain' returns") as caught:
        cache.warmup(names=["other"])
    assert isinstance(caught.value.__cause__, TypeError)
    assert cache.prepared() == [VariantKey("plain", rows) for rows in (8, 4, 2)]


@pytest.mark.parametrize(
    ("most", "rows", "width", "bound", "replays"),
    [
        (3 * ROW_BYTES, 3, WIDTH, None, 1),
        (3 * ROW_BYTES - 1, 3, WIDTH, None, 0),
        (4 * (4 + 8), 4, WIDTH, "before", 1),
        (2 * ROW_BYTES, 2, WIDTH, "behind", 1),
        (0, 3, WIDTH + 2, None, 1),
    ],
    ids=["as many", "more", "what is read in place is not copied", "rows of a bound buffer count", "another stride"],
)
def test_a_batch_of_more_bytes_than_are_copied_is_called_directly(backend, most, rows, width, bound, replays):
    """A buffer that is bound behind the warm-up has no variant: the rows of the batch alone are copied from it."""
    cache, tensors = GraphCache("cpu", (4,), backend=backend), batch(rows, width)
    cache.register("score", Spied(), SPECS, most_copied=most)
    buffer = torch.cat([tensors["logits"], torch.zeros(30, width)])
    tensors["logits"] = buffer[:rows]
    if bound == "before":
        cache.bind("logits", buffer)
    cache.warmup()
    if bound == "behind":
        cache.bind("logits", buffer)
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert backend.num_replays == replays
    assert (cache.statistics().coverage == {f"score rows={rows} -> direct": 1}) == (replays == 0)


def test_a_callable_without_variants_of_its_own_is_replayed_whatever_is_copied(backend):
    cache = covered_cache(backend, most_copied=0)
    cache.warmup(names=["score"])
    tensors = plain(3)
    assert same_bits(cache.run("plain", tensors), expected({**tensors, "shift": torch.full((3,), 3)}))
    assert backend.num_replays == 1


def test_no_variant_is_captured_for_a_batch_that_a_direct_call_would_serve(backend):
    cache = GraphCache("cpu", (8,), backend=backend)
    cache.register("score", Spied(), SPECS, most_copied=0)
    assert not cache.capture_for("score", batch(2))
    assert (cache.statistics().variants, cache.statistics().buffer_bytes) == (0, 0)


# The caller's tensors, read in place.


@pytest.fixture
def bound_cache(spied: Spied, backend: RecordingBackend, monkeypatch: pytest.MonkeyPatch) -> Callable[..., GraphCache]:
    """Makes a cache that is bound to logits, whose rows are long: no owned buffer is made beside a bound one."""
    monkeypatch.setattr(keys, "_FEW", 4)
    made = cache_of(spied, backend)

    def bound(**tensors: Tensor) -> GraphCache:
        for name, tensor in tensors.items():
            made.bind(name, tensor)
        made.warmup()
        return made

    return bound


@pytest.mark.parametrize("logits", [torch.randn(8, 5), torch.randn(9, 8).T], ids=["like the input", "wider, strides"])
def test_a_bound_tensor_is_read_in_place_left_as_it_was_and_needs_no_owned_buffer(bound_cache, spied, logits):
    cache, tensors = bound_cache(logits=logits), {**batch(3), "logits": logits[:3]}
    logits.copy_(torch.randn(logits.shape))
    before = logits.clone()
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert torch.equal(logits, before)
    assert {each["logits"].data_ptr() for each in spied.tensors} == {logits.data_ptr()}
    assert spied.tensors[-1]["logits"].stride() == logits.stride()
    small_inputs, outputs = 8 * (4 + 8), 8 * (8 + 5 * 4)
    assert (cache.statistics().fallbacks, cache.statistics().buffer_bytes) == ({}, small_inputs + outputs)
    identity = Binding("logits", logits.data_ptr(), tuple(logits.shape), logits.stride(), torch.float32)
    assert cache.prepared() == [VariantKey("score", rows, (identity,)) for rows in (8, 4, 2)]


@pytest.mark.parametrize("other", ["itself", "elsewhere", "offset", "strides"])
def test_only_the_bound_tensor_is_read_in_place_where_both_variants_are_prepared(bound_cache, spied, other):
    logits = torch.randn(8, 5)
    cache = bound_cache(logits=logits)
    cache.unbind("logits")
    cache.warmup()
    cache.bind("logits", logits)
    foreign = {"elsewhere": torch.randn(3, 5), "offset": logits[1:4], "strides": logits.view(4, 10)[:3, :5]}
    tensors = {**batch(3), "logits": foreign.get(other, logits[:3])}
    assert same_bits(cache.run("score", tensors), expected(tensors))
    place = logits if other == "itself" else cache.input_buffer("logits")
    assert spied.tensors[-1]["logits"].data_ptr() == place.data_ptr()
    assert cache.statistics().fallbacks == {}


def test_any_other_tensor_is_called_directly_when_only_bound_variants_are_prepared(bound_cache):
    cache, tensors = bound_cache(logits=torch.randn(8, 5)), batch(3)
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert cache.statistics().fallbacks == {"score rows=3: no variant": 1}


def test_the_bound_tensor_is_copied_where_only_the_owned_variant_is_prepared(cache):
    logits = torch.randn(8, 5)
    cache.bind("logits", logits)
    tensors = {**batch(3), "logits": logits[:3]}
    assert same_bits(cache.run("score", tensors), expected(tensors))
    assert cache.statistics().fallbacks == {"score rows=3: copied, the bound variant is missing": 1}


def test_a_binding_with_fewer_rows_than_a_bucket_leaves_that_bucket_to_the_owned_buffer(bound_cache):
    logits = torch.randn(6, 5)
    cache = bound_cache(logits=logits)
    assert [(key.rows, key.binding is None) for key in cache.prepared()] == [(8, True), (4, False), (2, False)]
    for rows in (3, 6):
        tensors = {**batch(rows), "logits": logits[:rows]}
        assert same_bits(cache.run("score", tensors), expected(tensors))
    assert cache.statistics().fallbacks == {}


def test_variants_of_a_binding_serve_it_alone_also_when_it_is_bound_again(bound_cache):
    first, second = torch.randn(8, 5), torch.randn(8, 5)
    cache, replays = bound_cache(logits=first), []
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


def test_evicting_the_unbound_keeps_owned_and_current_variants(bound_cache):
    cache = bound_cache(logits=torch.randn(8, 5))
    cache.unbind("logits")
    cache.warmup(buckets=[8])
    cache.bind("logits", torch.randn(8, 5))
    cache.warmup(buckets=[4])
    assert cache.evict(unbound=True) == 3
    assert [(key.rows, key.binding is None) for key in cache.prepared()] == [(8, True), (4, False)]


def test_two_inputs_may_be_bound_and_each_is_read_where_it_is(bound_cache):
    tensors = batch(8)
    cache = bound_cache(logits=tensors["logits"], scale=tensors["scale"][:4])
    for rows in (8, 3):
        assert same_bits(cache.run("score", tensors, rows=rows), expected(tensors, rows))
    eight, four = "score rows=8 -> score[8] bound to logits", "score rows=3 -> score[4] bound to logits, scale"
    assert {*cache.statistics().coverage} == {eight, four}


def test_a_binding_keeps_its_tensor_alive(bound_cache):
    identity = bound_cache(logits=torch.full((8, 5), 2.0)).prepared()[0].binding
    assert identity is not None
    taken = [torch.zeros(8, 5) for _ in range(50)]
    assert identity[0].data_ptr not in {each.data_ptr() for each in taken}


def test_an_interrupt_within_a_binding_leaves_no_route_to_the_tensor_before(bound_cache):
    first, second = torch.randn(8, 5), torch.randn(8, 5)
    cache = bound_cache(logits=first)
    cache.run("score", {**batch(2), "logits": first[:2]})
    bind = StaticTensors.bind

    def interrupted(self: StaticTensors, *given: Any) -> None:
        bind(self, *given)
        raise KeyboardInterrupt

    with mock.patch.object(StaticTensors, "bind", interrupted), pytest.raises(KeyboardInterrupt):
        cache.bind("logits", second)
    tensors = {**batch(2), "logits": second[:2]}
    assert same_bits(cache.run("score", tensors), expected(tensors))
