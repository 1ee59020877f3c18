"""Compiled stages: the options that keep their bits, what is compiled apart, and nothing after the warm-up."""

import itertools
import random
import re
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.core.stage import call
from compiled_sampler.exact.threshold import order_keys
from compiled_sampler.lowering import compiled_stages, stage_code
from compiled_sampler.lowering.compile_queue import PROCESSES_VARIABLE
from compiled_sampler.lowering.compiled_stages import CompiledStages, StageWarning
from compiled_sampler.lowering.stage_code import EXACT_OPTIONS, StageCode
from compiled_sampler.passes.candidates import all_coarser
from tests.builders.sampler import REQUESTS, SHARED_SLOTS, V, drawn, held, nothing_compiles, same, shared_sampler


def multiplied(x, *, factor):
    return x * factor


def relative(x, t):
    """A product less its maximum: Inductor's patterns reassociate it, and a contraction would skip a rounding."""
    y = x * t
    return (y - y.amax(-1, keepdim=True)) * x + t


@pytest.fixture
def compiling():
    """Every use of ``torch.compile`` during the test, without what earlier processes left on disk."""
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        mock.patch.object(torch, "compile", wraps=torch.compile) as calls,
    ):
        yield calls


def test_one_row_and_many_are_compiled_apart_and_no_more(compiling):
    run = CompiledStages()
    for rows in (4, 1):
        run(multiplied, torch.randn(rows, 5), factor=2)
    with nothing_compiles():
        for rows in (1, 2, 3, 5, 33, 1000, 1):
            x = torch.randn(rows, 5)
            assert torch.equal(run(multiplied, x, factor=2), x * 2)
    assert compiling.call_count == 2


def test_the_callers_tensors_are_not_marked():
    x = torch.randn(3, 5)
    attributes = dict(vars(x))
    CompiledStages()(multiplied, x, factor=2)
    assert vars(x) == attributes


@pytest.mark.parametrize("rows", [1, 4])
def test_code_for_one_device_gets_no_tensors_of_another(rows, monkeypatch):
    """Functions share their stages between devices: kernels for a CPU got addresses of a GPU."""
    run, x = CompiledStages(), torch.randn(rows, 5)
    run(multiplied, x, factor=2)
    monkeypatch.setattr(CompiledStages, "compiles_at_calls", False)
    monkeypatch.setenv(PROCESSES_VARIABLE, "0")
    assert run(multiplied, x.to("meta"), factor=2).is_meta
    assert run.num_uncompiled_calls == 1


def test_options_are_passed_and_the_global_ones_left_alone(compiling):
    before = torch._inductor.config.get_config_copy()
    CompiledStages()(multiplied, torch.randn(3, 5), factor=2)
    options = {**EXACT_OPTIONS, "triton.enable_pdl": False}  # whatever the environment says
    assert compiling.call_args.kwargs == {"fullgraph": True, "dynamic": False, "options": options}
    CompiledStages()(all_coarser, torch.zeros(3, 5, dtype=torch.int32), ratio=2)
    assert compiling.call_args.kwargs["options"]["triton.enable_pdl"]
    assert compiling.call_count == 2
    assert torch._inductor.config.get_config_copy() == before


@pytest.mark.parametrize("caches", [True, False])
def test_seeds_of_the_caller_neither_mix_up_stages_nor_change(caches):
    x = torch.randn(3, 5)
    with torch._inductor.config.patch(fx_graph_cache=caches):
        for stage in (lambda x: x + 1, lambda x: x * 2.5, lambda x: x.amax(-1)):
            random.seed(0)
            before = random.getstate()
            assert torch.equal(CompiledStages()(stage, x), stage(x))
            assert random.getstate() == before


@pytest.mark.parametrize("rows", [1, 7])
def test_float_arithmetic_keeps_its_bits(rows):
    x, t = torch.randn(rows, 3001), torch.rand(rows, 1)
    wanted = relative(x, t)
    assert torch.equal(CompiledStages()(relative, x, t), wanted)
    assert not torch.equal(CompiledStages(options={})(relative, x, t), wanted)


def test_a_stage_that_cannot_be_one_graph_runs_eager_and_others_compiled():
    def waits(x):
        return x * x.sum().item() if x.sum().item() > 0 else x

    run, x = CompiledStages(), torch.randn(3, 5)
    with pytest.warns(StageWarning, match="stage waits runs in eager torch"):
        run(waits, x)
    assert torch.equal(run(waits, x), waits(x))
    assert re.search("(?i)graph break|data-dependent|unsupported", run.status().eager_stages["waits"])
    assert torch.equal(run(multiplied, x, factor=2), x * 2)


@pytest.mark.usefixtures("compiling")
def test_a_form_that_fails_once_leaves_the_others_compiled_and_is_compiled_by_the_next_warm_up():
    """As where memory was short: the stage ran in eager torch for good, and on a GPU nothing was captured any more."""
    run, one, many = CompiledStages(), torch.randn(1, 5), torch.randn(4, 5)
    run(multiplied, many, factor=2)
    with (
        mock.patch.object(stage_code, "compiled", side_effect=MemoryError("planted")),
        pytest.warns(StageWarning, match="MemoryError: planted"),
    ):
        run(multiplied, one, factor=2)
    assert run.status().eager_stages == {"multiplied": "it fails with MemoryError: planted"}
    with mock.patch.object(compiled_stages, "without_kernels", side_effect=AssertionError("in eager torch")):
        assert torch.equal(run(multiplied, many, factor=2), many * 2)
        assert torch.equal(run(multiplied, many[:3], factor=2), many[:3] * 2)
    run.compile_all()
    assert run.status().eager_stages == {}
    with mock.patch.object(compiled_stages, "without_kernels", side_effect=AssertionError("in eager torch")):
        assert torch.equal(run(multiplied, one, factor=2), one * 2)


def test_two_threads_may_meet_a_stage_that_is_ready(monkeypatch):
    """The second one found no entry of the call to delete."""
    monkeypatch.setattr(CompiledStages, "compiles_at_calls", False)
    monkeypatch.setenv(PROCESSES_VARIABLE, "0")
    run, x = CompiledStages(), torch.randn(4, 5)
    run(multiplied, x, factor=2)
    (eager,) = run._called.values()  # as both have it
    run.compile_all()
    for _ in range(2):
        assert torch.equal(eager(x), x * 2)


def test_rows_that_lie_apart_take_the_stages_of_contiguous_ones():
    """``logits[:, -1]`` of each further prompt length ran in eager torch, and had stages compiled of its own."""
    sampler, reference = Sampler(V, 4, backend="compiled"), shared_sampler(V, backend="eager")
    padded = torch.randn(3, V + 8)[:, :V]
    for rows, wide in ((1, padded[:1]), (3, padded), (3, padded.clone())):  # what is compiled for
        drawn(sampler, [REQUESTS["greedy"]] * rows, wide)
    for length, rows in itertools.product(range(1, 6), (1, 3, 1)):
        logits = torch.randn(rows, length, V)[:, -1]
        before = logits.clone()
        with nothing_compiles():
            out = drawn(sampler, [REQUESTS["greedy"]] * rows, logits)
            drawn(sampler, [REQUESTS["greedy"]] * rows, padded[:rows])
        assert same(out, drawn(reference, [REQUESTS["greedy"]] * rows, before))
        assert torch.equal(logits, before)


@pytest.mark.parametrize("stride", [0, 5, 7, 9, 10, 15])
def test_rows_are_copied_where_they_lie_apart_alone(stride):
    rows = torch.randn(40).as_strided((3, 5), (stride, 1))
    steady = CompiledStages().steady_rows(rows)
    assert torch.equal(steady, rows)
    assert (steady is rows) == (stride < 10)
    one = CompiledStages().steady_rows(rows[1:2])
    assert (one.stride(), one.data_ptr()) == ((5, 1), rows[1].data_ptr())
    assert call.steady_rows(rows) is rows


def test_a_warmup_whose_compilers_cannot_be_imported_leaves_all_stages_eager_and_says_why(monkeypatch):
    """As where torch can make no cache directory, which it does when it is imported."""
    monkeypatch.setattr(compiled_stages, "set_up_compilers", mock.Mock(side_effect=OSError("no cache directory")))
    sampler, logits = Sampler(V, 2, backend="compiled"), torch.randn(2, V)
    with pytest.warns(StageWarning, match="no cache directory"):
        sampler.warmup(modes=["greedy"])
    assert {*sampler.statistics().lowering.eager_stages} == {"order_maxima", "first_from_blocks"}
    wanted = drawn(shared_sampler(V, backend="eager"), [REQUESTS["greedy"]] * 2, logits)
    assert same(drawn(sampler, [REQUESTS["greedy"]] * 2, logits), wanted)


def test_warmup_reports_every_stage_it_compiles_and_every_mode_it_runs(monkeypatch):
    monkeypatch.setattr(StageCode, "is_on_disk", lambda *_: False)

    def labels(**given):
        calls = []
        sampler.warmup(lambda *call: calls.append(call), **given)
        assert [done for done, _, _ in calls] == list(range(1, len(calls) + 1))
        assert {total for _, total, _ in calls} == {len(calls)}
        return [label for _, _, label in calls]

    sampler = Sampler(V, SHARED_SLOTS, backend="compiled")
    found = labels()
    runs = [label for label in found if not label.startswith("compiled stage ")]
    for mode in sampler.modes:
        count = sum(f"ran {mode.name} for" in label for label in runs)
        assert count == len(runs) / len(sampler.modes) >= 2
    sampler = Sampler(V, SHARED_SLOTS, backend="compiled")
    stages = {label for label in labels(modes=["greedy"]) if label.startswith("compiled stage ")}
    assert stages == {"compiled stage order_maxima", "compiled stage first_from_blocks"}


@pytest.mark.parametrize("state", [nullcontext, torch.no_grad, torch.inference_mode], ids=lambda each: each.__name__)
def test_after_warmup_no_mode_compiles(state):
    sampler = shared_sampler(V)
    sampler.warmup()
    for request, rows in itertools.product(REQUESTS.values(), (1, 2, 9, 64)):
        with nothing_compiles(), state():
            logits = torch.randn(rows, V)
            out = drawn(sampler, [request] * rows, logits)
        assert same(out, drawn(shared_sampler(V, backend="eager"), [request] * rows, logits.clone()))


def test_a_warmup_whose_stages_are_on_disk_compiles_none_and_loads_chains_that_no_row_of_its_needs():
    shared_sampler(V).warmup(modes=["full"])
    sampler = Sampler(V, SHARED_SLOTS, backend="compiled")
    with mock.patch.object(StageCode, "compiled", side_effect=AssertionError("compiled again")):
        sampler.warmup(modes=["full"])
    assert sampler.statistics().lowering.eager_stages == {}
    with held(sampler, [SamplingParams(top_p=0.3, seed=number) for number in range(9)]) as slots:
        plan = sampler.plan(slots)
        with mock.patch.object(stage_code, "load", side_effect=AssertionError("loaded in a step")):
            sampler.sample(plan, torch.zeros(9, V), torch.arange(9))


def test_an_eager_sampler_compiles_nothing(compiling):
    sampler = shared_sampler(V, backend="eager")
    sampler.warmup()
    drawn(sampler, [REQUESTS["full"]] * 2, torch.randn(2, V))
    assert not compiling.called


def test_a_call_made_before_a_warm_up_runs_compiled_after_it(monkeypatch):
    """The warm-up asks for its stage anew, so what the call waited for never came."""
    monkeypatch.setattr(CompiledStages, "compiles_at_calls", False)
    stages, logits = CompiledStages(), torch.randn(3, 70)
    eager = stages(order_keys, logits, vocab_size=70)
    assert stages.num_uncompiled_calls == 1
    with stages.precompiling(logits.device, None):
        pass
    assert torch.equal(stages(order_keys, logits, vocab_size=70), eager)
    assert stages.num_uncompiled_calls == 1
