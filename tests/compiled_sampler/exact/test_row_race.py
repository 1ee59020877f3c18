"""Races of single rows: those beyond the candidates, and those before a search, which say what is left to search."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler.batch import SampleInputs, SampleOutputs
from compiled_sampler.core import reference
from compiled_sampler.core.filters import KEEP_ALL
from compiled_sampler.core.mass import exp2_mass, scaled_logits
from compiled_sampler.core.noise import TARGET
from compiled_sampler.core.order import is_visible, order_key, pack
from compiled_sampler.core.rows import RowParams, RowSlots, gather_rows
from compiled_sampler.core.stage import Run, call
from compiled_sampler.exact import threshold
from compiled_sampler.exact.row_race import MassBefore, mass_before_winner, recheck_winners
from compiled_sampler.exact.threshold import Threshold, base_is_row_mask, search_in_order
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.modes import Mode
from compiled_sampler.params import SamplingParams
from compiled_sampler.passes.race import last_before_winner
from compiled_sampler.pipeline.sample import sample_step
from tests.builders.inputs import BASES, Calls, full_mode, keeping, modes_by_name, sample_inputs, slot_table
from tests.builders.masks import stages_watched
from tests.builders.sampler import same
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


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", ["top_k", "full"])
@pytest.mark.parametrize("vocab_size", [1, 2, 127, 129, 5000])
def test_a_race_before_the_search_draws_what_one_after_it_draws(vocab_size, name, base):
    inputs = hard_inputs(TOP_K if name == "top_k" else FILTERS, 140, vocab_size, seed=1)
    mode = modes_by_name(vocab_size, base)[name]
    found, _ = drawn(mode, inputs)

    def searching_all(stage: Any, /, *tensors: Any, **static: Any) -> Any:
        if stage is recheck_winners:
            _, known, _, rows = tensors
            live = Threshold(known.packed, rows.live, known.beyond_candidates, known.row_mass)
            return live._replace(row_mass=row_mass(inputs.logits, rows))
        return call(stage, *tensors, **static)

    run = Run(searching_all)
    run.any_row = lambda flags: True  # type: ignore[method-assign]
    assert same(sample_step(mode, inputs, run), found)


def row_mass(logits: Tensor, rows: RowParams) -> Tensor:
    row_max = torch.where(is_visible(logits), logits, -math.inf).amax(-1, keepdim=True)
    return exp2_mass(scaled_logits(logits, row_max, rows.scale[:, None])).sum(-1)


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
