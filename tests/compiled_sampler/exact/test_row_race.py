"""The wide path: races of single rows, before a search and beyond the candidates, and the thresholds of a search."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.batch import SampleInputs, SampleOutputs
from compiled_sampler.core import reference
from compiled_sampler.core.filters import KEEP_ALL, largest_of
from compiled_sampler.core.mass import exp2_mass, scaled_logits
from compiled_sampler.core.noise import TARGET
from compiled_sampler.core.order import is_visible, order_key, pack, row_logits
from compiled_sampler.core.rows import RowParams, RowSlots, gather_rows, row_slots_of
from compiled_sampler.core.stage import call
from compiled_sampler.exact import threshold
from compiled_sampler.exact.row_race import MassBefore, mass_before_winner, recheck_winners
from compiled_sampler.exact.threshold import (
    FlaggedRows,
    Threshold,
    base_is_row_mask,
    block_masses,
    flag_exceeding_rows,
    row_masses,
    search_in_order,
    search_threshold_in_torch,
    threshold_from_candidates,
)
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.modes import CAPACITIES, Mode
from compiled_sampler.passes.candidates import STORED_BLOCK
from compiled_sampler.passes.maxima import order_maxima
from compiled_sampler.passes.race import last_before_winner
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.pipeline.schedule import StepRun, schedule_for
from compiled_sampler.pipeline.search import ordered_candidates
from tests.builders.inputs import BASES, Calls, full_mode, keeping, modes_by_name, sample_inputs, slot_table
from tests.builders.masks import stages_watched
from tests.builders.sampler import SHARED_SLOTS, V, same
from tests.cases.hard_rows import KINDS, hard_rows
from tools.kernels.launches import for_a_gpu

FILTERS = (
    {"top_p": 0.5},
    {"top_p": 0.99},
    {"top_p": 0.99, "min_p": 0.05},
    {"top_k": 65},
    {"top_k": 500},
    {"top_k": 500, "top_p": 0.9},
    {"top_k": 500, "top_p": 1e-9},
    {"top_k": 10**6, "top_p": 0.9, "temperature": 3.0},
    {"top_k": 5},
    {"temperature": 0.0},
)
TOP_K = tuple(each for each in FILTERS if "top_p" not in each)


def hard_inputs(filters: tuple[dict[str, Any], ...], rows: int, vocab_size: int, seed: int) -> SampleInputs:
    """Rows of every kind, in which every seventh is padding."""
    generator = torch.Generator().manual_seed(seed)
    params = [SamplingParams(seed=row, **filters[row % len(filters)]) for row in range(rows)]
    logits = hard_rows(params, torch.arange(rows), vocab_size, generator)
    inputs = sample_inputs(logits, params)
    return inputs._replace(slots=torch.where(inputs.slots % 7 == 6, -1, inputs.slots))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("vocab_size", [65, 600, 5000])
def test_a_gpus_stages_draw_what_a_cpus_do(vocab_size, base):
    inputs, mode, called = hard_inputs(FILTERS, 140, vocab_size, seed=3), full_mode(vocab_size, base), list[str]()
    wanted = sample_step(mode, inputs)
    with for_a_gpu():
        assert same(sample_step(mode, inputs, stages_watched(called)), wanted)
    assert "race_beyond_candidates" in called
    assert "race_maxima" not in called


def drawn(mode: Mode, inputs: SampleInputs) -> tuple[SampleOutputs, Calls]:
    """What a step draws, with the arguments and the result of the last call of each stage."""
    calls: Calls = {}
    return sample_step(mode, inputs, keeping(calls)), calls


def packed_row(logits: Tensor) -> Tensor:
    return pack(order_key(logits), torch.arange(logits.shape[1], dtype=torch.int32))


def sorted_last(logits: Tensor, rows: RowParams, base: str) -> Tensor:
    """The last token kept by definition: int64 ``[R]``, packed (order key, id)."""
    static = {"vocab_size": logits.shape[1], "base_is_row": base == "all"}
    return reference.threshold(logits, rows.scale, rows.top_k, rows.top_p, **static)


@pytest.mark.parametrize("block", [1, 64])
@pytest.mark.parametrize("vocab_size", [1, 2, 127, 129, 600])
def test_what_precedes_a_token_is_counted_and_weighed(vocab_size, block, generator):
    x = torch.cat([kind(torch.randn(3, vocab_size, generator=generator)) for kind in KINDS])
    token_ids = torch.randint(vocab_size, (len(x),), generator=generator)
    row_max, scale = torch.where(is_visible(x), x, -math.inf).amax(-1), torch.linspace(0.5, 3.0, len(x))
    static = {"vocab_size": vocab_size, "block": block}
    before = mass_before_winner(x, last_before_winner(x, token_ids, vocab_size=vocab_size), row_max, scale, **static)
    packed = packed_row(x)
    precedes = packed > packed.gather(1, token_ids[:, None])
    mass = exp2_mass(scaled_logits(x, row_max[:, None], scale[:, None]))
    visible = is_visible(x).gather(1, token_ids[:, None])[:, 0]
    assert torch.equal(before.counts.sum(-1)[visible], precedes.sum(-1)[visible])
    assert torch.equal(before.masses.sum(-1)[visible], torch.where(precedes, mass, 0).sum(-1)[visible])


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", ["top_k", "full"])
@pytest.mark.parametrize("vocab_size", [127, 129, 600, 5000])
def test_rows_that_drop_their_winner_are_searched_and_hardly_others(vocab_size, name, base):
    inputs = hard_inputs(TOP_K if name == "top_k" else FILTERS, 140, vocab_size, seed=vocab_size)
    _, calls = drawn(modes_by_name(vocab_size, base)[name], inputs)
    (_, known, _, rows), found = calls[recheck_winners]
    winners = calls[last_before_winner][0][1]
    drops = packed_row(inputs.logits).gather(1, winners.clamp(min=0)[:, None])[:, 0] < sorted_last(
        inputs.logits, rows, base
    )
    drops &= winners >= 0
    raced = known.is_open & (winners >= 0)
    decided = base_is_row_mask(rows.top_k, rows.top_p, vocab_size=vocab_size, base_is_row=base == "all")
    assert not (found.is_open & ~known.is_open).any()
    assert found.is_open[raced & drops].all()
    assert not found.is_open[raced & decided & ~drops].any()
    assert calls[search_in_order][0][1] is found
    assert (raced & drops).any()
    assert (raced & ~found.is_open).any()
    assert (found.packed[known.is_open] == KEEP_ALL).all()
    assert torch.equal(found.packed[~known.is_open], known.packed[~known.is_open])
    if name == "full" and base == "top_k" and vocab_size >= 600:
        assert (raced & ~decided & ~found.is_open).any()  # the candidates stand in for the base


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", ["top_k", "full"])
@pytest.mark.parametrize("vocab_size", [129, 5000])
def test_a_gpus_sort_finds_what_a_cpus_does(vocab_size, name, base):
    _, calls = drawn(modes_by_name(vocab_size, base)[name], hard_inputs(FILTERS, 140, vocab_size, seed=2))
    (keys, known, rows), found = calls[search_in_order]
    which, parameters = (known.packed, known.is_open, known.row_mass), (rows.scale, rows.top_k, rows.top_p)
    assert known.is_open.any()
    assert torch.equal(threshold._on_gpu(keys, *which, *parameters, vocab_size, base == "all"), found)


def test_stages_are_run_only_where_a_row_asks_for_them(generator):
    flat, peaked = 0.01 * torch.randn(2, 5000, generator=generator), torch.zeros(2, 5000)
    peaked[:, 17] = 30.0

    def names(logits: Tensor, **filters: Any) -> set[str]:
        inputs = sample_inputs(logits, [SamplingParams(seed=seed, **filters) for seed in (1, 2)])
        return {stage.__name__ for stage in drawn(full_mode(5000), inputs)[1]}

    assert "mass_before_winner" not in names(peaked, top_p=0.9)
    assert names(flat, top_p=0.9999) & {"mass_before_winner", "search_in_order"} == {"mass_before_winner"}
    assert {"mass_before_winner", "search_in_order"} < names(flat, top_k=70)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"), [(3, 1.0, False), (4, 1.0, True), (9, 0.75, False), (9, 0.76, True)]
)
def test_limits_are_exact(top_k, top_p, kept):
    """Three tokens of weight 1 before the winner, of four in the row."""
    is_open = torch.tensor([True])
    rows = gather_rows(entries_of(SamplingParams(seed=1, top_k=top_k, top_p=top_p)), stream=TARGET)
    known = Threshold(torch.tensor([0]), is_open, is_open, torch.tensor([4]))
    before = MassBefore(torch.tensor([[1, 2]]), torch.tensor([[3, 0]]))
    found = recheck_winners(None, known, before, rows, vocab_size=9, base_is_row=True)
    assert found.is_open.tolist() == [not kept]


def entries_of(params: SamplingParams) -> RowSlots:
    row = torch.zeros(1, dtype=torch.int64)
    return RowSlots(slot_table([params], 9), row, row)


def test_a_chain_is_run_for_a_flag_and_compiled_whatever_the_flags():
    none, one = torch.zeros(3, dtype=torch.bool), torch.tensor([False, True, False])
    for run in (call, CompiledStages()):
        assert not run.any_row(none)
        assert run.any_row(one)
    with run.precompiling(torch.device("cpu")):
        assert run.any_row(none)


# Thresholds of rows whose filters keep more tokens than the candidates hold.


SEARCHED = [
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


def thresholds_of(logits: Tensor, params: list[SamplingParams], base: str) -> tuple[Tensor, Tensor, RowParams]:
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


def test_only_rows_that_need_it_are_searched(generator):
    logits = torch.randn(len(SEARCHED), 5000, generator=generator)
    _, is_open, _ = thresholds_of(logits, SEARCHED, "top_k")
    assert is_open.tolist() == [False, False, True, True, True, True, True, False]
    peaked = torch.zeros(len(SEARCHED), 5000)
    peaked[:, 17] = 30.0
    _, is_open, _ = thresholds_of(peaked, SEARCHED, "top_k")
    assert is_open.tolist() == [False, False, True, False, False, True, True, False]


@pytest.mark.parametrize("base", BASES)
def test_a_search_among_the_first_tokens_ends_where_sorting_the_row_does(base, generator):
    logits = torch.randn(6, 40_000, generator=generator)
    logits[3] = 1.0
    filters = [(40_000, 0.3), (40_000, 0.999), (3000, 1.0), (3000, 0.999), (39_000, 0.9), (33_000, 0.5)]
    params = [SamplingParams(seed=1, top_k=k, top_p=p, temperature=2.0) for k, p in filters]
    found, is_open, rows = thresholds_of(logits, params, base)
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


# Both bases of top-p on every backend.


TOP_P = {
    "narrow": SamplingParams(temperature=1.1, top_k=20, top_p=0.6, seed=1),
    "wide": SamplingParams(temperature=1.3, top_k=90, top_p=0.7, seed=2),
    "top_p": SamplingParams(temperature=1.5, top_p=0.8, min_p=1e-3, seed=3),
}
ONE_OF_EACH = {
    base: (("eager", base, "cpu"), ("eager", base, "cuda"), ("compiled", base, "cuda")) for base in ("all", "top_k")
}


@functools.cache
def sampler_of(backend: str, base: str = "all", device: str = "cpu", vocab_size: int = V) -> Sampler:
    made = Sampler(vocab_size, SHARED_SLOTS, device, backend=backend, top_p_base=base)
    for params in TOP_P.values():
        made.add_request(params)
    return made


def logits_of(rows: int, vocab_size: int = V) -> Tensor:
    return 2.0 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1))


def test_compiled_draws_by_the_base_of_whole_rows_are_those_of_eager_torch():
    slots, positions = [0, 1, 2] * 4, torch.arange(12)
    eager, compiled = (
        each.sample(each.plan(slots, "full"), logits_of(12), positions)
        for each in map(sampler_of, ("eager", "compiled"))
    )
    assert same(eager, compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("base", ["all", "top_k"])
@pytest.mark.parametrize("vocab_size", [5000, 70_000])
@pytest.mark.parametrize("rows", [1, 16, 40, 300])
def test_by_either_base_few_rows_and_many_are_on_cuda_those_of_the_cpu(rows, vocab_size, base):
    logits, positions = logits_of(rows, vocab_size), torch.arange(rows)
    slots = [row % len(TOP_P) for row in range(rows)]
    cpu, *others = (sampler_of(*kind, vocab_size) for kind in ONE_OF_EACH[base])
    for picked, mode in ((slots, "full"), ([0] * rows, "top_k_top_p[64]")):
        wanted = cpu.sample(cpu.plan(picked, mode), logits, positions)
        for each in others:
            made = each.sample(each.plan(picked, mode), logits.cuda(), positions.cuda())
            assert same(made, wanted)
