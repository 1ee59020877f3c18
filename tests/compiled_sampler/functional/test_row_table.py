"""A slot table by row: the entries of a sampler's slots, and rows out of range that draw nothing."""

import itertools
import math

import pytest
import torch

from compiled_sampler.batch import RowStatus
from compiled_sampler.core.arithmetic import in_float64
from compiled_sampler.engine.requests.slots import slot_values
from compiled_sampler.functional.row_table import RowInputs, RowTable, requests_with_rows, row_table
from compiled_sampler.modes import Mode, mode_table, uncovered
from compiled_sampler.params import SamplingParams
from tests.torch_states import flushing

V = 100
FULL = mode_table(V, "top_k")[-1]
CORNERS = [
    SamplingParams(*values, seed=9 - 2**20 * n)
    for n, values in enumerate(
        itertools.product(
            (0.0, 0.7, 1e-5, 1e30), (0, 1, 2, 64, 65, 99, 100, 101), (5e-324, 0.3, 1.0), (0.0, 5e-324, 1.0)
        )
    )
]
WRONG = {
    "temperature": (-1.0, 9e-6, 1.1e30, math.inf, math.nan, -math.nan, 5e-324),
    "top_k": (-1, -(2**63)),
    "top_p": (0.0, -0.0, -0.5, 1.0 + 2.0**-52, math.inf, math.nan),
    "min_p": (-5e-324, -1.0, 1.0 + 2.0**-52, math.inf, math.nan, -math.nan),
    "positions": (-1, -(2**63)),
}


def inputs_of(params: list[SamplingParams]) -> RowInputs:
    dtypes = {"temperature": torch.float64, "top_k": torch.int64, "top_p": torch.float64, "min_p": torch.float64}
    columns = {name: torch.tensor([getattr(p, name) for p in params], dtype=dtype) for name, dtype in dtypes.items()}
    seeds = torch.tensor([p.seed for p in params])
    return RowInputs(**columns, seeds=seeds, positions=torch.arange(len(params)))


def table_of(inputs: RowInputs, mode: Mode = FULL) -> RowTable:
    way = {"filters_min_p": mode.filters_min_p, "capacity": mode.capacity, "beyond_candidates": mode.beyond_candidates}
    return row_table(inputs, vocab_size=mode.vocab_size, draws=mode.draws, **way)


def test_entries_are_those_of_a_sampler():
    made = table_of(inputs_of(CORNERS))
    assert made.slots.tolist() == list(range(len(CORNERS)))
    for column, values in zip(made.table, zip(*(slot_values(p, V) for p in CORNERS), strict=True), strict=True):
        assert torch.equal(column, torch.tensor(values, dtype=column.dtype))


@pytest.mark.parametrize("vocab_size", [50, 64, 65, 100])
@pytest.mark.parametrize("number", range(6))
def test_a_row_that_the_mode_does_not_cover_is_out_of_range(number, vocab_size):
    mode = mode_table(vocab_size, "top_k")[number]
    covered = [uncovered(mode, params) is None for params in CORNERS]
    assert (table_of(inputs_of(CORNERS), mode).slots >= 0).tolist() == covered
    assert any(covered)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_value_out_of_range_takes_its_row_alone(name, value, temperature):
    inputs = inputs_of([SamplingParams(temperature, seed=n) for n in range(3)])
    getattr(inputs, name)[1] = value
    made = table_of(inputs)
    assert made.slots.tolist() == [0, -1, 2]
    assert [column[1].item() for column in made.table] == [*slot_values(SamplingParams(seed=0), V)[:1], *neutral()]


def neutral() -> list[float | int]:
    """The entry of a row that filters nothing, without its seed, as it is stored."""
    _, scale, *rest = slot_values(SamplingParams(seed=0), V)
    return [torch.tensor(scale).item(), *rest]


def test_denormals_mean_the_same_where_they_are_flushed():
    least = torch.tensor([2.0**-149, -(2.0**-149), 2.0**-130, 0.0, -0.0, 0.1, -3.0, math.inf, -math.inf])
    wanted = torch.tensor([float(x) for x in least.tolist()], dtype=torch.float64)
    params = [SamplingParams(top_p=5e-324, min_p=5e-324, seed=0)]
    entry = table_of(inputs_of(params))
    with flushing():
        found, flushed = in_float64(least).view(torch.int64), table_of(inputs_of(params))
    assert torch.equal(found, wanted.view(torch.int64))
    assert torch.isnan(in_float64(torch.tensor([math.nan]))).all()
    for left, right in zip((*entry.table, entry.slots), (*flushed.table, flushed.slots), strict=True):
        assert torch.equal(left.view(torch.int32), right.view(torch.int32))


def test_requests_have_rows_while_these_lie_within_what_was_given():
    drafts, counts = torch.zeros(6, 3, dtype=torch.int64), torch.tensor([3, -1, 4, 0, -2, 2])
    slots = torch.arange(6)

    def found(rows: int, proposals: int | None = None) -> tuple[list[int], list[int], list[int]]:
        given = None if proposals is None else torch.empty(proposals, 5)
        made = requests_with_rows(torch.empty(rows, 5), slots, counts, drafts, given)
        return made.slots.tolist(), made.num_drafts.tolist(), made.flags.tolist()

    flag = RowStatus.PARAMETER_OUT_OF_RANGE
    wrong = [0, 0, flag, 0, flag, 0]
    assert found(8) == ([0, -1, -1, 3, -1, 5], [3, -1, -1, 0, -1, 2], wrong)
    assert found(7) == ([0, -1, -1, 3, -1, -1], [3, -1, -1, 0, -1, -1], [*wrong[:5], flag])
    assert found(8, 5) == found(8)
    assert found(8, 4) == found(7)
