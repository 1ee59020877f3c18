"""Copies of several tensors: every value arrives, in as few launches as there can be."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

from graph_cache import buffers
from graph_cache.buffers import NewCopies, copy_tensors


def test_copies_keep_every_value_for_mixed_dtypes_and_strides():
    sources = [
        torch.arange(6),
        torch.arange(6, 12),
        torch.randn(4, 6).T,
        torch.randn(6),
        torch.randn(6, 3),
        torch.rand(6) > 0.5,
        torch.arange(6).to(torch.uint32),
        torch.tensor(3),
        torch.tensor(4, dtype=torch.int32),
        torch.empty(0),
        torch.empty(0, dtype=torch.int64),
    ]
    targets = [torch.empty(source.shape, dtype=source.dtype) for source in sources]
    copy_tensors(targets, sources)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))


SMALL = [torch.arange(6), torch.arange(12).view(6, 2), torch.arange(6, dtype=torch.int32), torch.randn(6)]


@contextmanager
def launches() -> Iterator[mock.Mock]:
    """Copies of several tensors of one dtype within the block; one that is copied alone is an error."""
    alone = mock.patch.object(Tensor, "copy_", side_effect=AssertionError("a launch of its own"))
    with mock.patch.object(torch, "_foreach_copy_", wraps=torch._foreach_copy_) as together, alone:
        yield together
    assert all(len({each.dtype for each in call.args[0]}) == 1 for call in together.call_args_list)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_small_contiguous_tensors_of_any_words_take_one_launch(count):
    sources = SMALL[:count]
    targets = [torch.empty_like(source) for source in sources]
    with launches() as together:
        copy_tensors(targets, sources)
        NewCopies(sources)()
    assert together.call_count == 1 + 1
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))


def test_conversions_of_one_pair_of_dtypes_take_one_launch():
    sources = [torch.arange(6, dtype=torch.int32), torch.arange(12, dtype=torch.int32).view(6, 2), *SMALL]
    targets = [torch.empty(each.shape, dtype=torch.int64) for each in sources[:2]] + [*map(torch.empty_like, SMALL)]
    with launches() as together:
        copy_tensors(targets, sources)
    assert together.call_count == 2
    assert all(torch.equal(target, source.to(target.dtype)) for target, source in zip(targets, sources, strict=True))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.float64, torch.bfloat16, torch.int64])
def test_numbers_are_converted_whatever_their_strides(dtype):
    sources = [torch.arange(6), torch.arange(-6, 6).view(6, 2)[:, 1], torch.arange(12).view(3, 4).T, torch.tensor(-9)]
    targets = [torch.full(each.shape, 77).to(dtype) for each in sources]
    copy_tensors(targets, sources)
    assert all(torch.equal(target, source.to(dtype)) for target, source in zip(targets, sources, strict=True))


def test_large_tensors_and_single_ones_are_copied_by_the_driver(monkeypatch):
    monkeypatch.setattr(buffers, "_MOST_BYTES", 40)
    sources = [torch.randn(11), torch.randn(10)]
    targets = [torch.empty(11), torch.empty(10)]
    with mock.patch.object(torch, "_foreach_copy_", side_effect=AssertionError("with others")):
        copy_tensors(targets, sources)
        assert all(map(torch.equal, NewCopies(sources)(), sources))
    assert all(map(torch.equal, targets, sources))


@pytest.mark.parametrize(
    "column",
    [torch.arange(5)[2].expand(1), torch.arange(8).view(2, 4)[:1, 2], torch.arange(12).view(3, 4).t()[:2, :1]],
    ids=["expanded", "a column", "a column of rows"],
)
def test_a_last_dimension_of_size_1_may_have_any_stride(column):
    """Torch calls it contiguous, and views no other dtype of it."""
    assert column.is_contiguous() or column.shape[0] > 1
    for source in (column, column.clone()):
        sources = [source, torch.arange(3, dtype=torch.int32)]
        targets = [torch.empty_strided(column.shape, column.stride(), dtype=torch.int64), torch.empty_like(sources[1])]
        copy_tensors(targets, sources)
        assert all(torch.equal(*pair) for pair in zip(targets, sources, strict=True))


@pytest.mark.parametrize("dtype", [torch.uint32, torch.uint64, torch.bfloat16, torch.bool, torch.complex64])
def test_dtypes_that_the_copy_of_several_lacks_are_copied_one_by_one(dtype):
    with mock.patch.object(torch, "_foreach_copy_", side_effect=AssertionError("with others")):
        sources = [torch.arange(4).to(dtype), torch.arange(4, 8).to(dtype)]
        targets = [torch.zeros(4, dtype=dtype) for _ in sources]
        copy_tensors(targets, sources)
    assert all(torch.equal(*pair) for pair in zip(targets, sources, strict=True))


MANY = [
    *SMALL,
    torch.randn(4, 6).T,
    torch.rand(6) > 0.5,
    torch.randn(6, 3).to(torch.bfloat16),
    torch.empty(0, dtype=torch.int64),
    torch.arange(8).view(2, 4)[:1, 2],
    None,
]


@pytest.mark.parametrize("count", range(len(MANY) + 1))
def test_new_copies_hold_what_the_sources_hold_at_each_call(count):
    sources = [each if each is None else each.clone() for each in MANY[:count]]
    copies_of = NewCopies(sources)
    for turn in range(2):
        made = copies_of()
        assert [each is None for each in made] == [each is None for each in sources]
        pairs = [pair for pair in zip(made, sources, strict=True) if pair[1] is not None]
        for new, source in pairs:
            assert new.dtype is source.dtype
            assert torch.equal(new, source)
            assert not source.numel() or new.data_ptr() != source.data_ptr()
        for _, source in pairs:
            source.fill_(turn)
        assert all(torch.equal(*pair) for pair in zip(copies_of(), sources, strict=True) if pair[1] is not None)
