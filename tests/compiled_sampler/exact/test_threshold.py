"""The wide path: thresholds of rows whose filters keep more tokens than the candidates hold."""

import math

import pytest
import torch

from compiled_sampler.batch import SampleInputs
from compiled_sampler.core import reference
from compiled_sampler.core.filters import largest_of
from compiled_sampler.core.mass import exp2_mass, scaled_logits
from compiled_sampler.core.noise import TARGET
from compiled_sampler.core.order import order_key, pack, row_logits
from compiled_sampler.core.rows import RowParams, row_slots_of
from compiled_sampler.core.stage import call
from compiled_sampler.exact.threshold import (
    FlaggedRows,
    Threshold,
    block_masses,
    flag_exceeding_rows,
    row_masses,
    search_threshold_in_torch,
    threshold_from_candidates,
)
from compiled_sampler.modes import CAPACITIES
from compiled_sampler.params import SamplingParams
from compiled_sampler.passes.candidates import STORED_BLOCK
from compiled_sampler.passes.maxima import order_maxima
from compiled_sampler.pipeline.schedule import StepRun, schedule_for
from compiled_sampler.pipeline.search import ordered_candidates
from tests.builders.inputs import BASES, VOCAB_SIZES, full_mode, sample_inputs, slot_table
from tests.oracles import oracle

FILTERS = [
    SamplingParams(seed=1, **filters)
    for filters in (
        {},
        {"top_k": 2},
        {"top_k": 500},
        {"top_p": 0.3},
        {"top_p": 0.999},
        {"top_k": 70, "top_p": 0.999},
        {"top_k": 3000, "top_p": 0.5},
        {"top_p": 0.99, "min_p": 0.3},
    )
]


def thresholds(
    logits: torch.Tensor, params: list[SamplingParams], base: str
) -> tuple[torch.Tensor, torch.Tensor, RowParams]:
    """What the pipeline finds, which rows it had to search, and the rows' parameters."""
    flagged, known = flagged_rows(sample_inputs(logits, params), base)
    static = {"vocab_size": logits.shape[1], "base_is_row": base == "all"}
    assert not (flagged.races & ~known.beyond_candidates).any()
    found = search_threshold_in_torch(logits, known, flagged.row_max, flagged.rows, **static)
    return found, known.is_open, flagged.rows


def flagged_rows(inputs: SampleInputs, base: str = "top_k") -> tuple[FlaggedRows, Threshold]:
    """The rows that may have to be searched, and what their candidates say of the threshold."""
    logits, cut = inputs.logits, {"vocab_size": inputs.logits.shape[1]}
    blocks = order_maxima(logits, **cut, block=STORED_BLOCK).keys
    flagged = flag_exceeding_rows(blocks, row_slots_of(inputs), **cut, capacity=CAPACITIES[-1], stream=TARGET)
    row_mass = row_masses(block_masses(logits, flagged.row_max, flagged.rows.scale, **cut, block=64))
    run = StepRun(call, schedule_for(full_mode(logits.shape[1], base), len(logits), logits.device))
    ordered = ordered_candidates(run, logits, blocks)
    return flagged, threshold_from_candidates(ordered, flagged.rows, row_mass, **cut, base_is_row=base == "all")


def kept_ids(logits: torch.Tensor, threshold: torch.Tensor) -> list[list[int]]:
    ids = torch.arange(logits.shape[1], dtype=torch.int32)
    keep = (pack(order_key(logits), ids) >= threshold[:, None]) & (logits > -math.inf)
    return [row.nonzero().flatten().tolist() for row in keep]


def oracle_ids(logits: torch.Tensor, params: list[SamplingParams], base: str) -> list[list[int]]:
    return [
        sorted(oracle.reference_keep(row, p.temperature, p.top_k, p.top_p, 0.0, base))
        for row, p in zip(logits.tolist(), params, strict=True)
    ]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("scale", [0.05, 1.0, 6.0])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_thresholds_are_the_oracles(vocab_size, scale, base, generator):
    params = [p for p in FILTERS if p.min_p == 0.0]
    logits = scale * torch.randn(len(params), vocab_size, generator=generator)
    found, _, _ = thresholds(logits, params, base)
    assert kept_ids(logits, found) == oracle_ids(logits, params, base)


def test_only_rows_that_need_it_are_searched(generator):
    logits = torch.randn(len(FILTERS), 5000, generator=generator)
    _, is_open, _ = thresholds(logits, FILTERS, "top_k")
    assert is_open.tolist() == [False, False, True, True, True, True, True, False]
    peaked = torch.zeros(len(FILTERS), 5000)
    peaked[:, 17] = 30.0
    _, is_open, _ = thresholds(peaked, FILTERS, "top_k")
    assert is_open.tolist() == [False, False, True, False, False, True, True, False]


@pytest.mark.parametrize("base", BASES)
def test_a_search_among_the_first_tokens_ends_where_sorting_the_row_does(base, generator):
    logits = torch.randn(6, 40_000, generator=generator)
    logits[3] = 1.0
    filters = [(40_000, 0.3), (40_000, 0.999), (3000, 1.0), (3000, 0.999), (39_000, 0.9), (33_000, 0.5)]
    params = [SamplingParams(seed=1, top_k=k, top_p=p, temperature=2.0) for k, p in filters]
    found, is_open, rows = thresholds(logits, params, base)
    assert is_open.all()
    static = {"vocab_size": 40_000, "base_is_row": base == "all"}
    assert torch.equal(found, reference.threshold(logits, rows.scale, rows.top_k, rows.top_p, **static))


def test_padding_rows_are_never_searched(generator):
    logits = 0.5 * torch.randn(2, 20_000, generator=generator)
    inputs = sample_inputs(logits, [SamplingParams(seed=1, top_p=0.99)] * 2)
    flagged, known = flagged_rows(inputs._replace(slots=torch.tensor([-1, 0])))
    assert known.is_open.tolist() == flagged.races.tolist() == [False, True]


def test_rows_that_are_sure_to_outgrow_their_candidates_are_flat_and_filtered_by_top_p_alone(generator):
    flat = 0.1 * torch.randn(1, 20_000, generator=generator)
    peaked = torch.cat([torch.full((1, 1), 30.0), flat[:, 1:]], 1)
    filters = ({"top_p": 0.9}, {}, {"top_p": 1e-3}, {"top_p": 0.9, "top_k": 4000}, {"top_p": 0.9, "min_p": 0.5})
    params = [SamplingParams(seed=1, **each) for each in (*filters, *filters)]
    logits = torch.cat([flat.expand(5, -1), peaked.expand(5, -1)])
    flagged, _ = flagged_rows(sample_inputs(logits, params))
    assert flagged.races.tolist() == [True, True, False, False, False, False, True, False, False, False]


@pytest.mark.parametrize("block", [1, 64, 1000, 8192])
def test_block_masses_add_up_to_the_row_whatever_the_block(block, generator):
    logits = torch.randn(2, 5000, generator=generator).to(torch.bfloat16)
    x = row_logits(logits, 4999)
    table = slot_table([SamplingParams(temperature=temperature) for temperature in (1.0, 0.4)], 4999)
    largest = pack(order_key(x), torch.arange(4999, dtype=torch.int32)).amax(-1, keepdim=True)
    parts = block_masses(logits, largest_of(largest), table.scale, vocab_size=4999, block=block)
    expected = exp2_mass(scaled_logits(x, x.amax(-1, keepdim=True), table.scale[:, None]))
    assert torch.equal(parts.sum(-1), expected.sum(-1))
