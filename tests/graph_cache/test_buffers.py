"""Owned buffers: what is copied, filled, converted and left alone; copies of several tensors in few launches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

from graph_cache import GraphCache, buffers
from graph_cache.buffers import InputBuffer, NewCopies, copy_tensors
from graph_cache.registry import BufferSpec
from tests.graph_cache.recorded import SPECS, RecordingBackend, Scores, Spied, batch, expected, same_bits

CPU = torch.device("cpu")


def staged(buffer: InputBuffer, source: Tensor | None, rows: int, bucket: int) -> int:
    """Stages and copies; returns the number of copies."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    buffer.stage(source, rows, bucket, targets, sources)
    copy_tensors(targets, sources)
    return len(targets)


def test_rows_after_a_batch_hold_the_fill_up_to_the_bucket_after_any_sequence_of_batches():
    buffer = InputBuffer(BufferSpec((3,), torch.float32, -7.0), 8, CPU)
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        bucket = (2, 4, 8)[int(torch.randint(3, (), generator=generator))]
        rows = int(torch.randint(1, bucket + 1, (), generator=generator))
        source = torch.randn(rows, 3, generator=generator)
        staged(buffer, source, rows, bucket)
        assert torch.equal(buffer.tensor[:rows], source)
        assert (buffer.tensor[rows:bucket] == -7.0).all()


def test_padding_that_holds_the_fill_already_is_not_filled_again():
    buffer = InputBuffer(BufferSpec((), torch.int64, 5), 8, CPU)
    staged(buffer, torch.arange(6), 6, 8)
    staged(buffer, torch.arange(2), 2, 8)
    buffer.tensor[4] = 99  # behind the buffer's back: only a fill would remove it
    staged(buffer, torch.arange(2), 2, 8)
    staged(buffer, torch.arange(3), 3, 8)
    assert buffer.tensor.tolist() == [0, 1, 2, 5, 99, 5, 5, 5]
    staged(buffer, torch.arange(8), 8, 8)
    staged(buffer, torch.arange(2), 2, 2)  # fills its bucket
    assert buffer.tensor.tolist() == list(range(8))


def test_the_buffer_itself_is_not_copied_and_its_padding_is_filled_every_time():
    buffer = InputBuffer(BufferSpec((), torch.int64, 5), 4, CPU)
    own = buffer.lend()
    for _ in range(2):
        own.copy_(torch.tensor([1, 2, 3, 4]))
        assert staged(buffer, own[:2], 2, 4) == 0
        assert buffer.tensor.tolist() == [1, 2, 5, 5]
    own.copy_(torch.tensor([1, 2, 3, 4]))
    staged(buffer, own, 1, 2)
    staged(buffer, torch.tensor([8]), 1, 4)
    assert buffer.tensor.tolist() == [8, 5, 5, 5]


def test_what_lies_behind_the_bucket_of_a_lent_buffer_stays_the_callers():
    buffer = InputBuffer(BufferSpec((), torch.int64, 5), 8, CPU)
    own = buffer.lend()
    own.copy_(torch.arange(10, 18))
    staged(buffer, torch.arange(2), 2, 4)
    assert own.tolist() == [0, 1, 5, 5, 14, 15, 16, 17]
    staged(buffer, None, 0, 2)
    assert own.tolist() == [5, 5, 5, 5, 14, 15, 16, 17]


def test_another_view_of_the_buffer_is_copied_as_it_was():
    buffer = InputBuffer(BufferSpec((2,), torch.int64, 5), 4, CPU)
    buffer.tensor.copy_(torch.arange(8).view(4, 2))
    assert staged(buffer, buffer.tensor.view(-1).as_strided((2, 2), (1, 2)), 2, 4) == 1
    assert buffer.tensor[:2].tolist() == [[0, 2], [1, 3]]


def test_a_source_that_requires_grad_leaves_the_buffer_outside_autograd():
    buffer = InputBuffer(BufferSpec((), torch.float32, 0.0), 4, CPU)
    staged(buffer, torch.ones(4, requires_grad=True), 4, 4)
    assert not buffer.tensor.requires_grad
    assert buffer.tensor.tolist() == [1.0] * 4


def test_a_fill_that_the_dtype_would_round_is_refused():
    with pytest.raises(TypeError, match="fill must be an integer"):
        BufferSpec((), torch.int64, 0.5)


ALSO = {**SPECS, "shift": BufferSpec((), torch.int64, 3, also=(torch.int32,))}


@pytest.fixture
def narrow_cache(spied: Spied) -> GraphCache:
    """A cache that takes shifts of 32 bits too; no bucket is captured yet."""
    made = GraphCache("cpu", [2, 4], backend=RecordingBackend())
    made.register("score", lambda **given: spied(**wide(given)), ALSO)
    return made


def narrow(rows: int) -> dict[str, Tensor]:
    made = batch(rows)
    return {**made, "shift": made["shift"].to(torch.int32)}


def wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "shift": tensors["shift"].to(torch.int64)}


@pytest.mark.parametrize("warm", [False, True], ids=["direct", "replayed"])
def test_a_batch_may_bring_each_dtype_of_an_input(narrow_cache, spied, warm):
    if warm:
        narrow_cache.warmup()
    for rows in (3, 1, 4):
        given = narrow(rows)
        for each in (given, wide(given), {**given, "shift": given["shift"].repeat_interleave(2)[::2]}):
            assert same_bits(narrow_cache.run("score", each), expected(wide(given)))
    assert narrow_cache.statistics().replays == (9 if warm else 0)
    narrow_cache.run("score", narrow(3))
    assert spied.values[-1]["shift"].dtype == narrow_cache.input_buffer("shift").dtype == torch.int64
    assert not warm or spied.values[-1]["shift"][3] == 3


def test_what_is_read_in_place_or_written_to_the_buffer_is_known_by_its_dtype(narrow_cache):
    """One memory is an int32 input in one batch and an int64 one in the next."""
    bound = torch.zeros(8, dtype=torch.int32)
    narrow_cache.warmup()
    narrow_cache.bind("shift", bound.view(torch.int64))
    narrow_cache.warmup()
    own = narrow_cache.input_buffer("shift").view(torch.int32)
    for memory in (bound, own):
        memory.copy_(torch.arange(8))
        given = {**batch(4), "shift": memory[:4]}
        assert same_bits(narrow_cache.run("score", given), expected({**given, "shift": torch.arange(4)}))


@pytest.mark.parametrize("path", ["direct", "replayed", "in place"])
def test_results_of_64_bits_are_taken_in_32(narrow_cache, path):
    given, bound = narrow(3), Scores(torch.zeros(4, dtype=torch.int32), torch.zeros(4, 5))
    out = Scores(*(field[:3] for field in bound))
    if path != "direct":
        narrow_cache.warmup()
    for step in range(4):
        assert narrow_cache.run("score", given, out=out) is out
        assert same_bits(out._replace(best=out.best.long()), expected(wide(given)))
        if step == 1 and path == "in place":
            narrow_cache.bind_out("score", bound)
            narrow_cache.warmup()
        given["logits"].normal_()
    assert any(name.endswith("bound to out") for name in narrow_cache.statistics().coverage) == (path == "in place")


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float32])
def test_other_dtypes_are_refused(narrow_cache, dtype):
    given = batch(3)
    with pytest.raises(TypeError, match=f"'shift' must be torch.int64 or torch.int32, got {dtype}; convert"):
        narrow_cache.run("score", {**given, "shift": given["shift"].to(dtype)})
    assert same_bits(narrow_cache.run("score", given), expected(given))


# Copies of several tensors.


def check_copies(sources: Sequence[Tensor], dtype: torch.dtype | None = None) -> None:
    """New tensors have the values of the sources after a copy, in another dtype if it is given."""
    targets = [torch.full(each.shape, 77).to(dtype or each.dtype) for each in sources]
    copy_tensors(targets, sources)
    assert all(torch.equal(target, source.to(target.dtype)) for target, source in zip(targets, sources, strict=True))


SMALL = [torch.arange(6), torch.arange(12).view(6, 2), torch.arange(6, dtype=torch.int32), torch.randn(6)]
MANY = [
    *SMALL,
    torch.randn(4, 6).T,
    torch.rand(6) > 0.5,
    torch.randn(6, 3).to(torch.bfloat16),
    torch.empty(0, dtype=torch.int64),
    torch.arange(8).view(2, 4)[:1, 2],
    None,
]


def test_copies_keep_every_value_for_mixed_dtypes_and_strides():
    others = [torch.arange(6).to(torch.uint32), torch.tensor(3), torch.tensor(4, dtype=torch.int32), torch.empty(0)]
    check_copies([*MANY[:-1], *others])


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.float64, torch.bfloat16, torch.int64])
def test_numbers_are_converted_whatever_their_strides(dtype):
    strided = torch.arange(-6, 6).view(6, 2)[:, 1], torch.arange(12).view(3, 4).T
    check_copies([torch.arange(6), *strided, torch.tensor(-9)], dtype)


@contextmanager
def launches() -> Iterator[mock.Mock]:
    """Copies of several tensors of one dtype within the block; one that is copied alone is an error."""
    alone = mock.patch.object(Tensor, "copy_", side_effect=AssertionError("a launch of its own"))
    with mock.patch.object(torch, "_foreach_copy_", wraps=torch._foreach_copy_) as together, alone:
        yield together
    assert all(len({each.dtype for each in call.args[0]}) == 1 for call in together.call_args_list)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_small_contiguous_tensors_of_any_words_take_one_launch(count):
    with launches() as together:
        check_copies(SMALL[:count])
        NewCopies(SMALL[:count])()
    assert together.call_count == 1 + 1


def test_conversions_of_one_pair_of_dtypes_take_one_launch():
    sources = [torch.arange(6, dtype=torch.int32), torch.arange(12, dtype=torch.int32).view(6, 2), *SMALL]
    targets = [torch.empty(each.shape, dtype=torch.int64) for each in sources[:2]] + [*map(torch.empty_like, SMALL)]
    with launches() as together:
        copy_tensors(targets, sources)
    assert together.call_count == 2
    assert all(torch.equal(target, source.to(target.dtype)) for target, source in zip(targets, sources, strict=True))


@contextmanager
def one_by_one() -> Iterator[None]:
    with mock.patch.object(torch, "_foreach_copy_", side_effect=AssertionError("with others")):
        yield


def test_large_tensors_and_single_ones_are_copied_by_the_driver(monkeypatch):
    monkeypatch.setattr(buffers, "_MOST_BYTES", 40)
    sources = [torch.randn(11), torch.randn(10)]
    with one_by_one():
        check_copies(sources)
        assert all(map(torch.equal, NewCopies(sources)(), sources))


@pytest.mark.parametrize("dtype", [torch.uint32, torch.uint64, torch.bfloat16, torch.bool, torch.complex64])
def test_dtypes_that_the_copy_of_several_lacks_are_copied_one_by_one(dtype):
    with one_by_one():
        check_copies([torch.arange(4).to(dtype), torch.arange(4, 8).to(dtype)])


@pytest.mark.parametrize(
    "column",
    [torch.arange(5)[2].expand(1), torch.arange(8).view(2, 4)[:1, 2], torch.arange(12).view(3, 4).t()[:2, :1]],
    ids=["expanded", "a column", "a column of rows"],
)
def test_a_last_dimension_of_size_1_may_have_any_stride(column):
    """Torch calls it contiguous, and views no other dtype of it."""
    assert column.is_contiguous() or column.shape[0] > 1
    for source in (column, column.clone()):
        target, other = torch.empty_strided(column.shape, column.stride(), dtype=torch.int64), SMALL[2]
        copy_tensors([target, torch.empty_like(other)], [source, other])
        assert torch.equal(target, source)


@pytest.mark.parametrize("count", range(len(MANY) + 1))
def test_new_copies_hold_what_the_sources_hold_at_each_call(count):
    sources = [each if each is None else each.clone() for each in MANY[:count]]
    copies_of = NewCopies(sources)
    for turn in range(3):
        made = copies_of()
        assert [each is None for each in made] == [each is None for each in sources]
        for new, source in (pair for pair in zip(made, sources, strict=True) if pair[1] is not None):
            assert new.dtype is source.dtype
            assert torch.equal(new, source)
            assert not source.numel() or new.data_ptr() != source.data_ptr()
            source.fill_(turn)
