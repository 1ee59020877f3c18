"""What is written otherwise in Inductor's kernels: which loads are marked, and where the next kernel may start."""

import re

import pytest
import torch
from torch._inductor.codegen.triton import TritonScheduling

from compiled_sampler.core.rows import RowSlots, gather_rows
from compiled_sampler.lowering.inductor.triton_kernels import prompt, rewritten, streamed
from compiled_sampler.lowering.stages.tuning import tuning_of
from compiled_sampler.params import SamplingParams
from compiled_sampler.passes.race import race_maxima
from tests.builders.inputs import slot_table
from tools.kernels.launches import for_a_gpu, generated

WAIT, LAUNCH = "    tl.extra.cuda.gdc_wait()", "    tl.extra.cuda.gdc_launch_dependents()"


def test_loads_from_the_pointers_alone_are_marked():
    source = (
        "    a = tl.load(in_ptr0 + (x0 + 64*((x1 // 2))), tmp2 & (x1 < 3), other=float('-inf')).to(tl.float32)\n"
        "    b = tl.load(in_ptr1 + (x0), None)\n"
        "    c = tl.load(in_ptr0 + (x0), None, eviction_policy='evict_last')\n"
        "    d = tl.load(in_ptr0 + (x0), None)"
    )
    expected = (
        "    a = tl.load(in_ptr0 + (x0 + 64*((x1 // 2))), tmp2 & (x1 < 3), other=float('-inf'),"
        " eviction_policy='evict_first').to(tl.float32)\n"
        "    b = tl.load(in_ptr1 + (x0), None)\n"
        "    c = tl.load(in_ptr0 + (x0), None, eviction_policy='evict_first')\n"
        "    d = tl.load(in_ptr0 + (x0), None, eviction_policy='evict_first')"
    )
    assert streamed(source, ["in_ptr0"]) == expected
    assert streamed(source, []) == source


def test_the_next_kernel_starts_after_the_wait_and_not_before():
    lines = [WAIT, "    a = tl.load(in_ptr0)", LAUNCH, "    tl.store(out_ptr0, a)"]
    assert prompt("\n".join(lines)).splitlines() == [WAIT, LAUNCH, lines[1], lines[3]]


@pytest.mark.parametrize(
    "lines", [["    a = 1"], [WAIT, "    a = 1"], [LAUNCH]], ids=["neither", "no launch", "no wait"]
)
def test_a_kernel_without_both_stays_as_it_is(lines):
    assert prompt("\n".join(lines)) == "\n".join(lines)


def test_inductor_makes_its_own_kernels_again_afterwards():
    usual = TritonScheduling.kernel_type
    with pytest.raises(ZeroDivisionError), rewritten(streams=True, prompts=False):
        raise ZeroDivisionError
    assert TritonScheduling.kernel_type is usual
    with rewritten(streams=True, prompts=False):
        assert TritonScheduling.kernel_type is not usual


def test_generated_code_marks_every_load_of_logits_and_no_other():
    pytest.importorskip("triton")
    assert tuning_of(race_maxima).streams
    table, slots = slot_table([SamplingParams(seed=1)], 2000), torch.zeros(8, dtype=torch.int64)
    rows = gather_rows(RowSlots(table, slots, slots), stream=0)
    static = {"vocab_size": 2000, "block": 512, "slices": 4, "by_bits": True}
    with for_a_gpu():
        (found,) = generated(lambda run: run(race_maxima, torch.randn(8, 2000), rows, None, None, **static), "triton")
    loads = re.findall(r"tl\.load\((\w+) .*", found.code)
    marked = re.findall(r"tl\.load\((\w+) .*evict_first", found.code)
    assert len(marked) == 4  # one for each slice
    assert len(set(marked)) == 1
    assert loads.count(marked[0]) == 4
    assert len(loads) > 4


def test_the_gathering_of_rows_lets_the_next_start_at_once():
    pytest.importorskip("triton")
    assert tuning_of(gather_rows).launches_next_promptly
    table, slots = slot_table([SamplingParams(seed=1)], 2000), torch.zeros(8, dtype=torch.int64)
    with for_a_gpu():
        (found,) = generated(lambda run: run(gather_rows, RowSlots(table, slots, slots), stream=0), "triton")
    steps = re.findall(r"gdc_wait|gdc_launch_dependents|tl\.load", found.code)
    assert steps[:3] == ["gdc_wait", "gdc_launch_dependents", "tl.load"]
