"""What a caller may pass: the ladder of buckets, and messages with the rule, the value and the way out."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from graph_cache import BucketLadder, BufferSpec, GraphCache
from tests.graph_cache.recorded import SPECS, RecordingBackend, Scores, Spied, batch, cache_of


@pytest.fixture(params=["captured", "direct"])
def cache(request: pytest.FixtureRequest) -> GraphCache:
    """Prepared with a backend, and without one: both check alike."""
    made = cache_of(Spied(), RecordingBackend() if request.param == "captured" else None)
    made.warmup()
    return made


WRONG_INPUTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"scale": None}, TypeError, "'scale' must be a tensor, got NoneType"),
    ({"scale": torch.ones(3).double()}, TypeError, r"must be torch.float32, got torch.float64; .*\.to\(torch.float32"),
    ({"scale": torch.ones(3, device="meta")}, ValueError, "must be on cpu, got meta"),
    ({"scale": torch.ones(3, 1)}, ValueError, r"must have shape \[rows\], got \[3, 1\]"),
    ({"logits": torch.ones(3, 4)}, ValueError, r"must have shape \[rows, >=5\], got \[3, 4\]"),
    ({"scale": torch.ones(())}, ValueError, r"must have shape \[rows\], got \[\]"),
    ({"scale": torch.ones(2)}, ValueError, "same number of rows, got .*'scale': 2.*pass rows="),
    ({"extra": torch.ones(3)}, ValueError, "missing none, unknown 'extra'"),
]


@pytest.mark.parametrize(("changed", "kind", "message"), WRONG_INPUTS)
def test_a_wrong_input_is_refused(cache, changed, kind, message):
    with pytest.raises(kind, match=message):
        cache.run("score", {**batch(3), **changed})
    with pytest.raises(ValueError, match="missing 'scale', 'shift', unknown none"):
        cache.run("score", {"logits": torch.ones(3, 5)})


@pytest.mark.parametrize(("rows", "kind"), [(4, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_rows_must_count_rows_that_every_input_has(cache, rows, kind):
    with pytest.raises(kind, match="rows must be"):
        cache.run("score", batch(3), rows=rows)


class Lookalike(NamedTuple):
    """The fields of ``Scores`` in another type."""

    best: Tensor
    scaled: Tensor


BEST, SCALED = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 5)
WRONG_OUTS: list[tuple[Any, type[Exception], str]] = [
    (Lookalike(BEST, SCALED), TypeError, "out must be a Scores, got Lookalike"),
    ((BEST, SCALED), TypeError, "out must be a Scores, got tuple"),
    (Scores(BEST, None), TypeError, "field 1 must be a torch.float32 tensor, got NoneType"),  # type: ignore[arg-type]
    (Scores(BEST.short(), SCALED), TypeError, "field 0 must be a torch.int64 or torch.int32 tensor, got torch.int16"),
    (Scores(torch.zeros(4, dtype=torch.int64), SCALED), ValueError, r"field 0 must be \[3\] on cpu, got \[4\]"),
    (Scores(BEST, torch.zeros(3, 6)), ValueError, r"field 1 must be \[3, 5\] on cpu, got \[3, 6\]"),
    (Scores(BEST.to("meta"), SCALED), ValueError, "on cpu, got .* on meta"),
]


@pytest.mark.parametrize(("out", "kind", "message"), WRONG_OUTS)
def test_a_wrong_out_is_refused(cache, out, kind, message):
    with pytest.raises(kind, match=message):
        cache.run("score", batch(3), out=out)


def test_an_unknown_name_lists_the_known_ones(cache):
    callables, inputs = "got 'scor'; registered: 'score'", "got 'logit'; known: 'logits', 'scale', 'shift'"
    for message, use in (
        (callables, lambda: cache.run("scor", batch(3))),
        (callables, lambda: cache.warmup(["scor"])),
        (callables, lambda: cache.evict("scor")),
        (inputs, lambda: cache.bind("logit", torch.zeros(8, 5))),
        (inputs, lambda: cache.unbind("logit")),
        (inputs, lambda: cache.input_buffer("logit")),
        (r"among \(2, 4, 8\), got \[3\]", lambda: cache.warmup(buckets=[3])),
        (r"'scale' must be bound .* bound now: none", lambda: cache.unbind("scale")),
    ):
        with pytest.raises(ValueError, match=message):
            use()


def test_a_wrong_binding_is_refused(cache):
    for tensor, kind, message in (
        ([1.0], TypeError, "must be a tensor, got list"),
        (torch.zeros(8, 5).double(), TypeError, "must be torch.float32"),
        (torch.zeros(8, 4), ValueError, "must have shape"),
    ):
        with pytest.raises(kind, match=message):
            cache.bind("logits", tensor)


def test_callables_that_share_an_input_must_agree_on_its_layout(cache):
    for change in ({"shape": (6,)}, {"dtype": torch.float64}, {"fill": 0.0}):
        other = dataclasses.replace(SPECS["logits"], **change)
        with pytest.raises(ValueError, match="input 'logits' must have one layout"):
            cache.register("other", Spied(), {**SPECS, "logits": other})
    with pytest.raises(ValueError, match="registered: 'score'"):
        cache.warmup(["other"])


def test_a_refused_registration_leaves_no_input_behind(cache):
    new = {"fresh": BufferSpec((), torch.float32, 0.0)}
    for name, inputs, covers in (("score", new, ()), ("other", {}, ()), ("other", new, ("nobody",))):
        with pytest.raises(ValueError, match="must"):
            cache.register(name, Spied(), inputs, covers=covers)
    with pytest.raises(ValueError, match="known: 'logits', 'scale', 'shift'"):
        cache.bind("fresh", torch.zeros(8))


def test_a_ladder_is_ascending_without_repeats_and_its_sizes_are_ints():
    ladder = BucketLadder.of(np.array([8, 1, 4, 8, 2]))  # type: ignore[arg-type]
    assert ladder.sizes == (1, 2, 4, 8)
    assert set(map(type, ladder.sizes)) == {int}


@pytest.mark.parametrize(("rows", "bucket"), [(0, 2), (2, 2), (3, 4), (8, 8), (9, None)])
def test_the_bucket_of_a_batch_is_the_smallest_that_holds_it(rows, bucket):
    ladder = BucketLadder.of((2, 4, 8))
    assert ladder.bucket_for(rows) == bucket
    assert ladder.at_least(rows) == tuple(size for size in (2, 4, 8) if size >= rows)


@pytest.mark.parametrize("sizes", [(), (0,), (4, -1), (2.0,), (True,), 5, None, "12", b"\x01"])
def test_a_ladder_of_anything_but_positive_integers_is_refused(sizes):
    with pytest.raises(ValueError if type(sizes) is tuple else TypeError, match="integers >= 1, got"):
        BucketLadder.of(sizes)  # type: ignore[arg-type]
