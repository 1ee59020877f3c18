"""Floors: which bound binds, what a case must read and compute, and how much a replay goes through."""

import pytest
import torch

from compiled_sampler import Sampler
from tools.bench_batches import eager, sampling_batch
from tools.bench_cases import CASES, TARGET_VOCAB_SIZE, VERIFY_CASES
from tools.floors import HOPPER_LANES_PER_US, Rates, Work, count_stages, floor, work_of
from tools.timing import ROTATED_BYTES, num_inputs, num_rounds, repeats_for

H200 = Rates(4.8e6, HOPPER_LANES_PER_US, 1.0)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (Work(9.6e6, 1, 0), (2.0, "bytes")),
        (Work(9.6e6, 3, 0), (3.0, "launches")),
        (Work(9.6e6, 3, 4 * HOPPER_LANES_PER_US), (4.0, "instructions")),
    ],
)
def test_the_floor_is_the_largest_bound(work: Work, expected: tuple[float, str]) -> None:
    bound = floor(work, H200)
    assert (bound.us, bound.kind) == (pytest.approx(expected[0]), expected[1])


@pytest.mark.parametrize(
    ("name", "rows", "stages", "us", "kind"),
    [
        ("greedy", 512, 2, 512 * 151_936 * 4 / 4.8e6, "bytes"),
        ("greedy", 1, 2, 2.0, "launches"),
        ("p .99", 128, 3, (27.0 + 23.8) * 128 * 151_936 / (132 * 4 * 32 * 1980), "instructions"),
    ],
)
def test_floors_of_cells_on_an_h200(name: str, rows: int, stages: int, us: float, kind: str) -> None:
    bound = floor(work_of(CASES[name], rows, TARGET_VOCAB_SIZE, 4, stages), H200)
    assert (bound.us, bound.kind) == (pytest.approx(us), kind)


def test_draft_probabilities_are_read_too_and_only_final_rows_are_drawn_from() -> None:
    work = work_of(VERIFY_CASES["rejection by probabilities, no_filter"], 2, 10, 2, 7)
    assert work == Work(2 * 4 * 10 * 2 + 2 * 3 * 10 * 4, 7, 27.0 * 80 + 23.8 * 20)


def test_unknown_instruction_rates_never_bind() -> None:
    assert floor(Work(1.0, 1, 1e30), Rates(1.0, None, 0.0)).kind == "bytes"


@pytest.mark.parametrize(("name", "count"), [("greedy", 2), ("no_filter", 3)])
def test_stages_are_counted_as_the_pipeline_calls_them(name: str, count: int) -> None:
    case, sampler = CASES[name], Sampler(100, 1, backend="eager")
    mode = sampler.plan([sampler.add_request(case.params)]).mode
    batch = sampling_batch("peaked", 2, 100, torch.device("cpu"), torch.float32)
    assert count_stages(lambda run: eager(case, mode, batch, run)) == count


def test_inputs_exceed_the_cache_and_calls_exceed_the_launch() -> None:
    cuda = torch.device("cuda")
    for rows in (1, 8, 32, 128, 512):
        size = rows * TARGET_VOCAB_SIZE * 4
        count = num_inputs(size, cuda)
        assert count * size >= ROTATED_BYTES
        assert count >= 2
        assert count * num_rounds(count, cuda) >= 16
    assert num_inputs(1, cuda) == 1024
    assert (repeats_for(1.0), repeats_for(1e9)) == (7, 3)
