"""The race by bounds: each bound holds, and what it draws is what a race over all tokens draws."""

import pytest
import torch

from compiled_sampler import Sampler
from compiled_sampler.core.noise import bound_of, exponential, negative_log2
from compiled_sampler.core.rows import row_slots_of
from compiled_sampler.exact import row_race
from compiled_sampler.exact.row_race import race_rows_in_torch
from compiled_sampler.params import SamplingParams
from compiled_sampler.passes import bounds
from compiled_sampler.passes.blocks import widened
from compiled_sampler.passes.bounds import race_bounds, race_leaders
from compiled_sampler.pipeline import schedule
from compiled_sampler.pipeline.chunks import without_kernels
from compiled_sampler.pipeline.sample import draw_tokens, sample_step
from compiled_sampler.pipeline.schedule import StepRun
from tests.builders.inputs import Calls, keeping, modes_by_name, sample_inputs
from tests.builders.sampler import same
from tests.cases.compared_batches import direct
from tests.cases.hard_rows import KINDS, mixed_batch, mixed_requests
from tests.for_a_gpu import schedule_by_bounds
from tests.tiers import tiers

CHUNK = 1 << 24
ON_CUDA = (("cuda", torch.float32, "eager"), ("cuda", torch.float32, "compiled"))
FILTERS = ({}, {"temperature": 0.0}, {"temperature": 3.0}, {"min_p": 0.05}, {"min_p": 1.0}, {"min_p": 1e-4})


def excess(first: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
    """By how much the noise exceeds its bound at most, in each part of a chunk of words: float32 ``[4096]``.

    In int32 and by parts: as one reduction over int64 the same words take twice as long.
    """
    bits = first + chunk
    return (negative_log2(exponential(bits)) - bound_of(bits)).view(4096, -1).amax(-1)


@pytest.mark.full
def test_the_bound_holds_for_every_word(monkeypatch):
    compiled, chunk = torch.compile(excess, dynamic=False), torch.arange(CHUNK, dtype=torch.int32)
    firsts = [torch.tensor(first, dtype=torch.int32) for first in range(-(2**31), 2**31, CHUNK)]
    worst = [compiled(first, chunk).amax().item() for first in firsts]
    assert len(worst) == 256
    assert -1e-3 < max(worst) <= 0.0
    monkeypatch.setattr("compiled_sampler.core.noise.BOUND", 158.47)
    assert excess(torch.tensor(0, dtype=torch.int32), chunk).amax() > 0.0


def drawn(inputs, mode: str, block: int = 8):
    """What a GPU's stages draw of many rows, and what the second look found."""
    calls: Calls = {}
    bounded = schedule_by_bounds(modes_by_name(inputs.logits.shape[1])[mode], inputs.logits.shape[0], block)
    row_slots = row_slots_of(inputs)
    made = draw_tokens(StepRun(keeping(calls, without_kernels), bounded), inputs.logits, row_slots)
    return made, calls[race_leaders][1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["no_filter", "min_p"])
@pytest.mark.parametrize("vocab_size", tiers([600], [1, 2, 129, 5000]))
def test_many_rows_of_a_gpu_draw_what_a_cpus_do(vocab_size, mode, dtype, generator):
    noise = torch.randn(len(KINDS) * len(FILTERS), vocab_size, generator=generator)
    rows = [kind(noise[i * len(FILTERS) : (i + 1) * len(FILTERS)]) for i, kind in enumerate(KINDS)]
    logits = torch.cat(rows).to(dtype)
    logits = torch.where(logits.isnan(), torch.nan, logits)  # with the sign that CUDA's arithmetic gives it
    filters = list(FILTERS * len(KINDS))
    if mode == "no_filter":
        filters = [{name: value for name, value in f.items() if name != "min_p"} for f in filters]
    inputs = sample_inputs(logits, [SamplingParams(seed=seed, **f) for seed, f in enumerate(filters)])
    wanted = sample_step(modes_by_name(vocab_size)[mode], inputs)
    for block in (8, 512):
        made, _ = drawn(inputs, mode, block)
        assert same(made, wanted)


@pytest.mark.parametrize(
    ("mode", "spread", "filters", "most"), [("no_filter", 4.0, {}, 1000), ("min_p", 1.0, {"min_p": 0.2}, 2000)]
)
def test_rows_that_a_second_look_does_not_settle_race(mode, spread, filters, most, generator, monkeypatch):
    monkeypatch.setattr(bounds, "LEADERS", 1)
    logits = spread * torch.randn(4000, 600, generator=generator)
    inputs = sample_inputs(logits, [SamplingParams(seed=seed, **filters) for seed in range(4000)])
    wanted = sample_step(modes_by_name(600)[mode], inputs)
    made, leaders = drawn(inputs, mode)
    assert same(made, wanted)
    assert 100 < leaders.needs_race.sum() < most

    def unraced(logits, races, rows, row_max, found, **static):
        return race_rows_in_torch(logits, races & False, rows, row_max, found, **static)

    monkeypatch.setattr(row_race, "race_rows", unraced)
    made, _ = drawn(inputs, mode)
    assert not same(made, wanted)
    assert torch.equal(made.token_ids[~leaders.needs_race], wanted.token_ids[~leaders.needs_race])


def test_blocks_that_min_p_drops_are_not_looked_at(generator, monkeypatch):
    """Their bounds, of tokens that are dropped, would leave most rows to race."""
    logits = torch.randn(1000, 600, generator=generator)
    logits[:, 300] = 6.0  # alone above the cut
    inputs = sample_inputs(logits, [SamplingParams(seed=seed, min_p=0.3) for seed in range(1000)])
    made, leaders = drawn(inputs, "min_p")
    assert made.token_ids.eq(300).all()
    assert not leaders.needs_race.any()
    without = bounds._admitted
    monkeypatch.setattr(bounds, "_admitted", lambda *args: (widened(args[0].scores, args[2]), without(*args)[1]))
    made, leaders = drawn(inputs, "min_p")
    assert made.token_ids.eq(300).all()
    assert leaders.needs_race.sum() > 100


def test_a_greedy_row_is_settled_and_rows_of_infinities_where_few_blocks_have_one():
    logits = torch.zeros(4, 600)  # ties everywhere
    logits[1] = torch.inf
    logits[2, :16] = torch.inf
    logits[3] = -torch.inf
    params = [SamplingParams(seed=seed, temperature=t) for seed, t in enumerate((0.0, 1.0, 1.0, 1.0))]
    inputs = sample_inputs(logits, params)
    made, leaders = drawn(inputs, "no_filter")
    assert leaders.needs_race.tolist() == [False, True, False, True]
    assert same(made, sample_step(modes_by_name(600)["no_filter"], inputs))


def nan_before_the_first(vocab_size: int, block: int) -> torch.Tensor:
    """A row whose largest logit is in the first block and once more in one of four blocks with a NaN."""
    row = torch.zeros(vocab_size)
    row[5] = row[10 * block + 3] = 7.0
    row[[number * block + 1 for number in (10, 11, 12, 13)]] = torch.nan
    return row


@pytest.mark.parametrize("mode", ["no_filter", "min_p"])
def test_the_first_of_equal_tokens_wins_behind_blocks_with_a_nan(mode):
    """These take all places of leaders, so that the block with the first token is none."""
    logits = nan_before_the_first(600, 8).expand(2, -1).clone()
    logits[1] = logits[1].nan_to_num(0.0)
    inputs = sample_inputs(logits, [SamplingParams(temperature=0.0)] * 2)
    made, leaders = drawn(inputs, mode)
    assert made.token_ids.tolist() == [5, 5]
    assert leaders.needs_race.tolist() == [True, False]
    assert leaders.best[0] != leaders.best[1]  # the leaders alone have another winner


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "compiled"])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(seed=3, min_p=0.05)])
def test_on_cuda_the_first_of_equal_tokens_wins_behind_blocks_with_a_nan(params, backend):
    logits = nan_before_the_first(2**18, 512).expand(64, -1).contiguous()
    logits[1::2, 5] = 8.0
    found = []
    for sampler in (Sampler(2**18, 1, "cuda", backend=backend), Sampler(2**18, 1, backend="eager")):
        slot = sampler.add_request(params)
        mode = "min_p" if params.min_p else "no_filter"
        plan, x = sampler.plan([slot] * 64, mode), logits.to(sampler.device)
        found.append(sampler.sample(plan, x, torch.arange(64, device=sampler.device)).token_ids.tolist())
    assert found[0] == found[1]


def test_scores_that_overflow_below_are_no_masked_tokens():
    logits = torch.full((3, 600), -torch.inf)
    logits[:2, 555:557] = -3e38
    params = [SamplingParams(seed=seed, temperature=t) for seed, t in enumerate((1e-3, 0.0, 1e-3))]
    inputs = sample_inputs(logits, params)
    made, _ = drawn(inputs, "no_filter")
    assert made.token_ids.tolist() == [555, 555, -1]
    assert same(made, sample_step(modes_by_name(600)["no_filter"], inputs))


def test_a_bound_is_a_bound_of_its_block(generator, monkeypatch):
    calls: Calls = {}
    monkeypatch.setattr(bounds, "LEADERS", 5000 // 256 + 1)  # every block is looked at
    inputs = sample_inputs(torch.randn(40, 5000, generator=generator), [SamplingParams(seed=s) for s in range(40)])
    bounded = schedule_by_bounds(modes_by_name(5000)["no_filter"], 40, 256)
    draw_tokens(StepRun(keeping(calls, without_kernels), bounded), inputs.logits, row_slots_of(inputs))
    best = (calls[race_leaders][1].best >> 32).to(torch.int32)
    largest = calls[race_bounds][1].scores.amax(-1)
    assert (best <= largest).all()
    assert (largest.view(torch.float32) - best.view(torch.float32) < 0.6).all()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["no_filter", "min_p"])
@pytest.mark.parametrize("rows", [33, 3000])
def test_on_cuda_many_rows_draw_what_eager_torch_draws_on_the_cpu(mode, rows, monkeypatch):
    monkeypatch.setattr(schedule, "_are_bounded", lambda rows, mode: True)
    schedule._resolved.cache_clear()
    requests = mixed_requests(509, 60, seed=1)
    samplers = [Sampler(509, 60, *kind) for kind in (("cpu", torch.float32, "eager"), *ON_CUDA)]
    for each in samplers:
        for params in requests:
            each.add_request(params)
    batch = mixed_batch(requests, modes_by_name(509)[mode], rows, torch.float32, seed=0)
    wanted, *found = (direct(each)(batch, mode) for each in samplers)
    assert all(same(each, wanted) for each in found)
