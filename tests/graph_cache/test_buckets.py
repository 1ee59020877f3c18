"""The ladder of buckets."""

import numpy as np
import pytest

from graph_cache import BucketLadder


def test_a_ladder_is_ascending_without_repeats_whatever_the_order_given() -> None:
    assert BucketLadder.of([8, 1, 4, 8, 2]).sizes == (1, 2, 4, 8)


@pytest.mark.parametrize(("rows", "bucket"), [(0, 2), (1, 2), (2, 2), (3, 4), (5, 8), (8, 8), (9, None)])
def test_the_bucket_of_a_batch_is_the_smallest_that_holds_it(rows: int, bucket: int | None) -> None:
    assert BucketLadder.of((2, 4, 8)).bucket_for(rows) == bucket


def test_buckets_that_hold_a_batch_come_smallest_first() -> None:
    assert BucketLadder.of((2, 4, 8)).at_least(3) == (4, 8)
    assert BucketLadder.of((2, 4, 8)).at_least(9) == ()


@pytest.mark.parametrize("sizes", [(), (0,), (4, -1), (2.0,), (True,)])
def test_a_ladder_of_anything_but_positive_integers_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="integers >= 1"):
        BucketLadder.of(sizes)


@pytest.mark.parametrize("sizes", [5, None, "12", b"\x01"])
def test_what_is_no_list_of_integers_is_no_ladder(sizes: object) -> None:
    with pytest.raises(TypeError, match=r"integers >= 1, got .*; for example \(1, 2, 4, 8\)"):
        BucketLadder.of(sizes)  # type: ignore[arg-type]


def test_integers_of_numpy_are_sizes() -> None:
    ladder = BucketLadder.of(np.array([4, 2]))  # type: ignore[arg-type]
    assert ladder.sizes == (2, 4)
    assert set(map(type, ladder.sizes)) == {int}


def test_a_choice_of_buckets_must_be_of_the_ladder() -> None:
    ladder = BucketLadder.of((2, 4, 8))
    assert ladder.chosen([8, 2, 8]) == (2, 8)
    assert ladder.chosen(None) == (2, 4, 8)
    with pytest.raises(ValueError, match=r"among \(2, 4, 8\), got \[3\]"):
        ladder.chosen([2, 3])
