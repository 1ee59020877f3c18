"""Floors: which bound binds, what a case must read and compute, and how much a replay goes through."""

import importlib
from dataclasses import replace

import pytest
import torch

from compiled_sampler import Sampler
from compiled_sampler.core.rows import RowSlots
from compiled_sampler.core.stage import Run
from compiled_sampler.exact.row_race import race_top_k
from compiled_sampler.lowering.tuning import TUNING, tuning_of
from compiled_sampler.modes import verifying
from compiled_sampler.passes.candidates import choose
from compiled_sampler.pipeline.sample import draw_tokens
from compiled_sampler.pipeline.schedule import StepRun
from tests.builders.inputs import modes_by_name, slot_table
from tests.for_a_gpu import schedule_by_bounds
from tools.bench.batches import eager, sampling_batch, verification_batch
from tools.bench.cases import CASES
from tools.bench.floors import HOPPER_LANES_PER_US, SMALL, Chain, Rates, Work, chain_of, floor

H200 = Rates(4.8e6, HOPPER_LANES_PER_US, {1: 1.0, 64: 1.5})


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (Work(63, 9.6e6, 1, 0, Chain(1)), (3.2, "bytes")),
        (Work(64, 19.2e6, 1, 0, Chain(2)), (4.0 + 1.5 + 1.5, "bytes")),
        (Work(1, 9.6e6, 1, 0, Chain(4)), (6.2, "launches")),
        (Work(1, 9.6e6, 2, 4 * HOPPER_LANES_PER_US, Chain(2)), (6.4, "instructions")),
        (Work(2, 9.6e6, 1, 0, Chain(4, ((32, 990),))), (6.7, "launches")),
        (Work(128, 9.6e6, 1, 0, Chain(2, ((132 * 128, 1980),))), (2.0 + 1.5 + 128.0, "launches")),
    ],
)
def test_the_floor_is_what_passes_take_and_the_launches_besides(work, expected):
    bound = floor(work, H200)
    assert (bound.us, bound.kind) == (pytest.approx(expected[0]), expected[1])
    assert floor(work, H200._replace(num_instructions=None)).kind != "instructions"


@pytest.mark.parametrize(
    ("name", "chain"),
    [("greedy", Chain(2)), ("no_filter", Chain(3, (), ("score",))), ("min_p .05", Chain(4, (), ("order", "score")))],
)
def test_kernels_are_counted_as_the_pipeline_calls_its_stages(name, chain):
    case, sampler = CASES[name], Sampler(100, 1, backend="eager")
    mode = sampler.plan([sampler.add_request(case.params)]).mode
    batch = sampling_batch("peaked", 2, 100, torch.device("cpu"), torch.float32)
    assert chain_of(lambda run: eager(case, mode, batch, run)) == chain


def test_a_race_by_bounds_is_a_pass_with_instructions_of_its_own_and_a_long_second_look():
    case, device = CASES["min_p .05"], torch.device("cpu")
    mode = modes_by_name(100)["min_p"]
    batch = sampling_batch("peaked", 2, 100, device, torch.float32)
    schedule = schedule_by_bounds(mode, 2, 256)
    row_slots = RowSlots(slot_table([case.params], 100), torch.zeros_like(batch.positions), batch.positions)
    chain = chain_of(lambda run: draw_tokens(StepRun(run, schedule), batch.logits, row_slots))
    assert chain == Chain(5, SMALL["race_leaders", 256], ("bound and order",))


def test_counted_kernels_are_of_stages_that_the_tuning_declares():
    declared = {stage.__name__: tuning.num_kernels for stage, tuning in TUNING.items()}
    assert all(len(kernels) <= declared[stage] for (stage, _), kernels in SMALL.items())
    assert tuning_of(race_top_k).num_kernels == 4


def test_of_chains_side_by_side_the_longer_counts_with_its_instructions():
    packed = torch.arange(5)[None]

    def step(run):
        def chain(length):
            return sum(run(int) for _ in range(length))

        run(int)
        assert run.overlap(packed.device, lambda: chain(3), lambda: chain(2)) == (0, 0)
        run.overlap(packed.device, lambda: chain(1), lambda: chain(4))
        run.overlap(packed.device, lambda: run(choose, packed, count=2), lambda: [run(int), run(int)])
        run.overlap(packed.device, lambda: [run(int), run(choose, packed, count=2)], lambda: run(int))

    assert chain_of(step) == Chain(1 + 3 + 4 + 2 + 2, SMALL["choose", None])


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [None, "rejection"])
@pytest.mark.parametrize("name", ["p .9", "k 1000"])
def test_hand_written_stages_launch_as_many_kernels_as_are_counted(name, rule, monkeypatch):
    launches = importlib.import_module("compiled_sampler.exact.triton.operators")
    wrapped, launched, found = launches.wrap_triton, [], {}
    monkeypatch.setattr(launches, "wrap_triton", lambda kernel: launched.append(kernel) or wrapped(kernel))

    def run(stage, /, *tensors, **static):
        before = len(launched)
        made = stage(*tensors, **static)
        found[stage] = len(launched) - before
        return made

    case, device = replace(CASES[name], rule=rule), torch.device("cuda")
    sampler = Sampler(5000, 1, device, backend="eager")
    mode = sampler.plan([sampler.add_request(case.params)]).mode
    shape = (5000, device, torch.float32)
    batch = verification_batch("peaked", 2, 3, *shape) if rule else sampling_batch("peaked", 2, *shape)
    eager(case, verifying(mode, rule) if rule else mode, batch, Run(run))
    several = {stage: count for stage, count in found.items() if count > 1}
    assert several
    assert several == {stage: tuning_of(stage).num_kernels for stage in several}
