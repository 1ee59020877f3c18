"""The schedule: which kernels serve which batches, and that no schedule changes a result."""

import pytest
import torch

from compiled_sampler.pipeline.schedule import schedule_for, warmup_batches
from tests.builders.inputs import modes_by_name
from tests.for_a_gpu import gpu_schedule
from tools.kernels.launches import for_a_gpu

V = 1000


@pytest.mark.parametrize(
    ("mode", "sizes", "times", "vocab_size", "device", "expected"),
    [
        ("full", (1, 4, 32), 1, V, "cuda", [(1, 1), (32, 32), (4, 4)]),
        ("full", (1, 17, 32), 1, V, "cuda", [(1, 1), (32, 32)]),
        ("full", (1, 4, 32, 100), 1, V, "cuda", [(1, 1), (32, 32), (128, 128), (4, 4)]),
        ("full", (1, 4, 32), 4, V, "cuda", [(1, 4), (1, 1), (32, 128), (32, 32), (4, 16)]),
        ("full", (1,), 1, V, "cpu", [(1, 1), (128, 128)]),
        ("full", (1, 32, 100), 1, 151_936, "cpu", [(1, 1), (128, 128)]),
        ("greedy", (1, 4, 32, 100), 1, V, "cuda", [(1, 1), (32, 32), (128, 128)]),
        ("full", (1, 32, 50, 256, 512), 1, 2**15, "cuda", [(1, 1), (32, 32), (128, 128), (256, 256)]),
        ("min_p", (1, 32, 50, 256, 512), 1, 2**15, "cuda", [(1, 1), (32, 32), (128, 128), (50, 50)]),
        ("no_filter", (1, 32, 50, 256, 512), 1, 2**15, "cuda", [(1, 1), (32, 32), (128, 128), (512, 512)]),
        ("no_filter", (1, 32, 50), 1, 151_936, "cuda", [(1, 1), (32, 32), (128, 128), (50, 50)]),
    ],
)
def test_warming_up_takes_a_batch_of_every_schedule_that_may_come(mode, sizes, times, vocab_size, device, expected):
    assert warmup_batches(modes_by_name(vocab_size)[mode], sizes, times, torch.device(device)) == expected


@pytest.mark.parametrize(
    ("rows", "vocab_size", "plain", "with_min_p"),
    [
        (16, 2**21, False, False),
        (17, 2**17, False, True),
        (64, 2**15, False, False),
        (65, 2**15, False, True),
        (32, 2**20, False, True),
        (33, 2**18 - 2**13, False, True),
        (33, 2**18, True, True),
        (256, 2**15, False, True),
        (257, 2**15, True, True),
    ],
)
def test_races_of_many_rows_and_many_logits_are_bounded(rows, vocab_size, plain, with_min_p):
    for name, bounded in (("no_filter", plain), ("min_p", with_min_p)):
        mode = modes_by_name(vocab_size)[name]
        assert gpu_schedule(mode, rows).races_by_bounds == bounded
        assert not schedule_for(mode, rows, torch.device("cpu")).races_by_bounds


def test_masks_are_read_on_a_gpu_in_every_mode():
    def with_masks(mode, rows):
        return schedule_for(mode, rows, torch.device("cpu"), is_edited=True, has_masks=True)

    for mode in modes_by_name(151_936).values():
        for rows in (8, 128):
            with for_a_gpu():
                made = with_masks(mode, rows)
            assert (made.reads_masks, made.races_by_bounds) == (True, gpu_schedule(mode, rows).races_by_bounds)
            assert not with_masks(mode, rows).reads_masks  # in C++
