"""Owned buffers: what is copied, what is filled, what is left alone."""

import pytest
import torch
from torch import Tensor

from graph_cache.buffers import OutputBuffers
from graph_cache.copies import copy_tensors
from graph_cache.inputs import InputBuffer
from graph_cache.registry import BufferSpec, first_rows
from tests.graph_cache.recorded import Scores

CPU = torch.device("cpu")


def staged(buffer: InputBuffer, source: Tensor | None, rows: int, bucket: int) -> int:
    """Stages and copies; returns the number of copies."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    buffer.stage(source, rows, bucket, targets, sources)
    copy_tensors(targets, sources)
    return len(targets)


def test_rows_after_a_batch_hold_the_fill_up_to_the_bucket_after_any_sequence_of_batches() -> None:
    buffer = InputBuffer(BufferSpec((3,), torch.float32, -7.0), 8, CPU)
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        bucket = (2, 4, 8)[int(torch.randint(3, (), generator=generator))]
        rows = int(torch.randint(1, bucket + 1, (), generator=generator))
        source = torch.randn(rows, 3, generator=generator)
        staged(buffer, source, rows, bucket)
        assert torch.equal(buffer.tensor[:rows], source)
        assert (buffer.tensor[rows:bucket] == -7.0).all()


def test_padding_that_holds_the_fill_already_is_not_filled_again() -> None:
    buffer = InputBuffer(BufferSpec((), torch.int64, 5), 8, CPU)
    staged(buffer, torch.arange(6), 6, 8)
    staged(buffer, torch.arange(2), 2, 8)
    buffer.tensor[4] = 99  # behind the buffer's back: only a fill would remove it
    staged(buffer, torch.arange(2), 2, 8)
    staged(buffer, torch.arange(3), 3, 8)
    assert buffer.tensor.tolist() == [0, 1, 2, 5, 99, 5, 5, 5]


def test_a_missing_source_leaves_the_fill_in_every_row() -> None:
    buffer = InputBuffer(BufferSpec((), torch.int64, 5), 4, CPU)
    staged(buffer, torch.arange(4), 4, 4)
    assert staged(buffer, None, 2, 4) == 0
    assert buffer.tensor.tolist() == [5, 5, 5, 5]


def test_the_buffer_itself_is_not_copied_and_its_padding_is_filled_every_time() -> None:
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


def test_a_batch_that_fills_its_bucket_fills_nothing_after_it() -> None:
    buffer = InputBuffer(BufferSpec((), torch.int64, 5), 8, CPU)
    staged(buffer, torch.arange(8), 8, 8)
    staged(buffer, torch.arange(2), 2, 2)
    assert buffer.tensor.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_another_view_of_the_buffer_is_copied_as_it_was() -> None:
    buffer = InputBuffer(BufferSpec((2,), torch.int64, 5), 4, CPU)
    buffer.tensor.copy_(torch.arange(8).view(4, 2))
    assert staged(buffer, buffer.tensor.view(-1).as_strided((2, 2), (1, 2)), 2, 4) == 1
    assert buffer.tensor[:2].tolist() == [[0, 2], [1, 3]]


def test_a_source_that_requires_grad_leaves_the_buffer_outside_autograd() -> None:
    buffer = InputBuffer(BufferSpec((), torch.float32, 0.0), 4, CPU)
    staged(buffer, torch.ones(4, requires_grad=True), 4, 4)
    assert not buffer.tensor.requires_grad
    assert buffer.tensor.tolist() == [1.0] * 4


@pytest.mark.parametrize("made_under_inference", [True, False])
def test_buffers_are_writable_in_and_out_of_inference_mode(made_under_inference: bool) -> None:
    with torch.inference_mode(made_under_inference):
        buffer = InputBuffer(BufferSpec((), torch.float32, 0.0), 4, CPU)
        outputs = OutputBuffers(Scores(torch.zeros(2), torch.zeros(2, 3)), 4)
        staged(buffer, torch.ones(3), 3, 4)
        copy_tensors(outputs.rows(2), Scores(torch.ones(2), torch.ones(2, 3)))
    with torch.inference_mode(not made_under_inference):
        staged(buffer, torch.full((3,), 2.0), 3, 4)
        copy_tensors(outputs.rows(2), Scores(torch.ones(2), torch.full((2, 3), 2.0)))
    assert buffer.tensor.tolist() == [2.0, 2.0, 2.0, 0.0]
    assert outputs.rows(2).scaled.tolist() == [[2.0] * 3] * 2


def test_the_first_rows_of_a_wider_tensor_are_a_view_of_its_origin() -> None:
    wide = torch.arange(24).view(4, 6)
    view = first_rows(wide, 2, (3,))
    assert view.tolist() == [[0, 1, 2], [6, 7, 8]]
    assert view.data_ptr() == wide.data_ptr()


def test_results_are_interchangeable_only_with_equal_types_tails_and_dtypes() -> None:
    layout = OutputBuffers(Scores(torch.zeros(2), torch.zeros(2, 3)), 4).layout
    assert layout == OutputBuffers.layout_of(Scores(torch.zeros(1), torch.zeros(1, 3)))
    assert layout != OutputBuffers.layout_of(Scores(torch.zeros(2), torch.zeros(2, 4)))
    assert layout != OutputBuffers.layout_of(Scores(torch.zeros(2).long(), torch.zeros(2, 3)))
    assert layout != OutputBuffers.layout_of((torch.zeros(2), torch.zeros(2, 3)))


def test_a_fill_that_the_dtype_would_round_is_refused() -> None:
    with pytest.raises(TypeError, match="fill must be an integer"):
        BufferSpec((), torch.int64, 0.5)
