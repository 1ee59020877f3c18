"""Owned buffers: what is copied, filled, converted and left alone, and what results are."""

import pytest
import torch
from torch import Tensor

from graph_cache import GraphCache
from graph_cache.buffers import InputBuffer, copy_tensors
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
