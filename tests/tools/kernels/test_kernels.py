"""Kernels of every mode, pinned through generated code: one more, or an operator left to ATen, fails here.

Triton's code is generated for the CPU's stages without a GPU and nothing is compiled, so the pins hold for the blocks
that the CPU uses; on a GPU another block size may fuse otherwise. A change for the better is pinned anew.
"""

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from compiled_sampler.modes import Verification
from tests.for_a_gpu import tiles
from tests.tiers import tiers
from tools.kernels.__main__ import main
from tools.kernels.generated_code import Kernel, fallbacks, hasty, kernels, launches, moved_bytes
from tools.kernels.launches import FALLBACK, HAND_WRITTEN, Known, for_a_gpu, generated, listed, recorded, table_of
from tools.kernels.steps import step_of

V = 151_936
KNOWN: Known = {}
"""Code that was generated before: steps of as many rows share most of it."""
CHOSEN = "order_maxima 1, choose_blocks 1, choose_child_blocks 1, choose_child_tokens 1, choose_child_tokens 1"
ORDERED_BESIDE_A_PASS = (
    "order_maxima 1, all_coarser 1, choose 1, child_blocks 1, choose 1, child_tokens 1, choose 1, child_tokens 1, "
    "choose 1, sort 1"
)
BOUNDED = "race_bounds 1, race_leaders 1, race_rows opaque, draw_from_leaders 1"
PINNED = {
    "greedy": "order_maxima 1, first_from_blocks 1",
    "no_filter": f"gather_rows 1, {BOUNDED}",
    "min_p": f"gather_rows 1, {BOUNDED}",
    "top_k_top_p[64]": f"{CHOSEN}, draw_from_unordered_candidates 1",
    "top_k": "gather_rows 1, race_top_k opaque, draw_from_winners 1",
    "full": f"{ORDERED_BESIDE_A_PASS}, flag_exceeding_rows 1, race_and_weigh opaque, row_masses 1, "
    "threshold_from_candidates 1, race_beyond_candidates opaque, draw_from_candidates_and_winners 1",
}
SCORED = "race_maxima 1, draw_from_blocks 1"
PINNED_OF_FEW_LOGITS = {"no_filter": f"gather_rows 1, {SCORED}", "min_p": f"order_maxima 1, rows_of_blocks 1, {SCORED}"}
PINNED_MATCH = f"row_layout 2, gather_rows 1, {BOUNDED}, emit_matches 1"
FINAL = "final_rows 1, final_winners 1, emit_from_final_blocks 1"
JUDGED = f"unfiltered_weights 1, probability_blocks 1, judge_drafts 1, {FINAL}"
PINNED_REJECTION = f"row_layout 2, order_maxima_of 1, coarser_keys 1, {JUDGED}"
PINNED_REJECTION_OF_FEW = f"row_layout 2, order_maxima_of 1, {JUDGED}"

TRITON_CODE = """
aten = torch.ops.aten
async_compile = AsyncCompile()

triton_per_fused_amax_0 = async_compile.triton('triton_per_fused_amax_0', '''
@triton.jit
def _triton_helper_fn_add0(arg0_0, arg1_0):
    return arg0_0 + arg1_0

@triton_heuristics.persistent_reduction(
    size_hints={'x': 128, 'r0_': 512},
)
@triton.jit
def triton_per_fused_amax_0(in_ptr0, in_ptr1, in_out_ptr0, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr):
    r0_numel = 300
    R0_BLOCK: tl.constexpr = 512
    tmp0 = tl.load(in_ptr0 + (r0_1 + 300*x0), r0_mask & xmask)
    tmp1 = tl.load(in_ptr1 + (tmp0), xmask)
    tmp2 = tl.load(in_out_ptr0 + (x0), xmask)
    tl.store(out_ptr0 + (x0), tmp1, xmask)
''', device_str='cuda')


async_compile.wait(globals())
del async_compile

class Runner:
    def call(self, args):
        # Original ATen: [aten.amax], call_function[target=torch.ops.aten.amax.default](args = (%x,))
        triton_per_fused_amax_0.run(arg0_1, arg1_1, buf0, buf1, s0, 300, stream=stream0)
        buf2 = torch.ops.aten.sort.stable(buf1, stable=True)
        extern_kernels.mm(buf1, buf2, out=buf3)
        aten.index_put_(buf3, [buf1], buf2)
        triton_per_fused_amax_0.run(arg0_1, arg1_1, buf2, buf3, s0, 300, stream=stream0)

def get_args():
    return torch.ops.aten.zeros.default()

def benchmark_compiled_module(args, times=10, repeat=10):
    triton_per_fused_amax_0.run(args)
"""

CPP_CODE = """
cpp_fused_add_0 = async_compile.cpp_pybinding(['const float*', 'float*', 'float*', 'const int64_t'], r'''
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0,
                       float* in_out_ptr0,
                       float* out_ptr0,
                       const int64_t ks0)
{
    if (x) { aten.nothing(); }
}
''')
async_compile.wait(globals())
def call(args):
    cpp_fused_add_0(arg0_1, buf0, buf1, s0)
    return (buf1, )
"""


MATCH, REJECTION = Verification("match", 3), Verification("rejection", 3, "probabilities")
PINNED_ON_A_GPU = [
    *((mode, 64, None, pinned) for mode, pinned in PINNED.items()),
    ("no_filter", 16, MATCH, PINNED_MATCH),
    ("no_filter", 32, REJECTION, PINNED_REJECTION),
    ("no_filter", 8, REJECTION, PINNED_REJECTION_OF_FEW),
    ("min_p", 17, None, PINNED["min_p"]),
    *((mode, 8, None, pinned) for mode, pinned in PINNED_OF_FEW_LOGITS.items()),
]


@pytest.fixture
def as_on_a_gpu() -> Iterator[None]:
    """As ``for_a_gpu``."""
    with for_a_gpu():
        yield


def pins(mode: str, backend: str, rows: int = 64, verification: Verification | None = None, device: str = "cpu") -> str:
    """Every stage that a step calls with its number of kernels; a fallback is named instead."""
    step = step_of(mode, rows, V, device=device, verification=verification)
    found = generated(step, backend, KNOWN if device == "cpu" else None)
    return ", ".join(f"{stage} {'opaque' if code is None else count(code)}" for stage, code in found)


def count(code: str) -> str:
    """Launches of kernels; a fallback is spelt out."""
    return " ".join([str(launches(code).total()), *fallbacks(code)])


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("mode", tiers(["greedy", "no_filter", "full"], PINNED))
def test_a_mode_launches_its_triton_kernels_and_nothing_else(mode):
    pytest.importorskip("triton")
    assert pins(mode, "triton") == PINNED[mode]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("mode", PINNED_OF_FEW_LOGITS)
@pytest.mark.parametrize("rows", tiers([8], [1]))
def test_a_race_over_few_logits_scores_them_all(mode, rows):
    pytest.importorskip("triton")
    assert pins(mode, "triton", rows) == PINNED_OF_FEW_LOGITS[mode]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_match_adds_two_stages_to_the_draw():
    pytest.importorskip("triton")
    assert pins("no_filter", "triton", 16, MATCH) == PINNED_MATCH


@pytest.mark.usefixtures("as_on_a_gpu")
def test_rejection_without_filters_is_a_kernel_a_stage_but_two():
    pytest.importorskip("triton")
    assert pins("no_filter", "triton", 16, REJECTION) == PINNED_REJECTION


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_level_in_one_kernel_has_a_thread_block_for_each_row():
    pytest.importorskip("triton")
    found = generated(step_of("top_k_top_p[64]", 64, V), "triton", KNOWN)
    assert [tiles(code) for stage, code in found if stage.startswith("choose_")] == [[("1", "4")]] * 4


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "rows", "verification", "pinned"), PINNED_ON_A_GPU)
def test_on_a_gpu_a_step_launches_the_same_kernels(mode, rows, verification, pinned):
    """Inductor makes some kernels two on a GPU alone, as of ``stack`` behind a long expression."""
    assert pins(mode, "triton", rows, verification, "cuda") == pinned


def test_greedy_is_a_kernel_a_stage_in_cpp():
    assert pins("greedy", "cpp") == "order_maxima 1, first_from_blocks 1"


def ranked(x: Tensor) -> Tensor:
    """A sort that no backend generates code for."""
    return torch.sort(x * 2, dim=-1, stable=True).indices.to(torch.int32) + 1


@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_a_fallback_is_found(backend):
    if backend == "triton":
        pytest.importorskip("triton")
    found = listed(generated(lambda run: run(ranked, torch.randn(3, 5000)), backend))
    assert [each.name for each in found if each.kind == FALLBACK] == ["torch.ops.aten.sort.stable"]
    assert len([each for each in found if each.kind != FALLBACK]) == 2


def test_what_runs_is_recorded_with_its_bytes_and_fallbacks():
    x = torch.randn(3, 5000)
    found = recorded(lambda run: run(ranked, torch.randn(128, 5000)), lambda run: [run(ranked, x), run(ranked, x)])
    assert {(each.stage, each.launches) for each in found} == {("ranked", 2)}
    assert [each.name for each in found if each.kind == FALLBACK] == ["torch.ops.aten.sort.stable"]
    first, last = (each for each in found if each.kind == "cpp")
    assert (first.read_bytes, first.written_bytes) == (60_000, 60_000)
    assert (last.read_bytes, last.written_bytes) == (120_000, 60_000)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", PINNED)
def test_on_a_gpu_every_kernel_has_registers_and_a_time(mode):
    found = recorded(*(step_of(mode, 8, V, device="cuda") for _ in range(2)))
    assert [each for each in found if each.kind == FALLBACK] == []
    assert all(each.us and each.us > 0.0 for each in found)
    assert all(
        each.registers and each.spills is not None and each.read_bytes for each in found if each.kind != HAND_WRITTEN
    )


def test_a_kernel_that_does_not_wait_is_found():
    waits = TRITON_CODE.replace("    tmp0 =", "    tl.extra.cuda.gdc_wait()\n    tmp0 =")
    late = TRITON_CODE.replace("    tl.store", "    tl.extra.cuda.gdc_wait()\n    tl.store")
    decorator = "@triton_heuristics.persistent_reduction(\n"
    (kernel,) = kernels(TRITON_CODE)
    for code, expected in ((TRITON_CODE, [kernel.name]), (late, [kernel.name]), (waits, [])):
        assert hasty(code.replace(decorator, f"{decorator}    triton_meta={{'launch_pdl': True}},\n")) == expected
        assert hasty(code) == []


def test_triton_source_is_read():
    (kernel,) = kernels(TRITON_CODE)
    pointers = ("in_ptr0", "in_ptr1", "in_out_ptr0", "out_ptr0")
    assert kernel == Kernel(
        "triton_per_fused_amax_0",
        "persistent reduction",
        (*pointers, "xnumel", "r0_numel"),
        {"in_ptr0": 1, "in_ptr1": 1, "in_out_ptr0": 1},
        {"r0_numel": 300},
    )
    assert launches(TRITON_CODE) == {kernel.name: 2}
    assert list(fallbacks(TRITON_CODE)) == ["torch.ops.aten.sort.stable", "extern_kernels.mm", "aten.index_put_"]


def test_cpp_source_is_read():
    (kernel,) = kernels(CPP_CODE)
    assert kernel == Kernel("cpp_fused_add_0", "cpp", ("in_ptr0", "in_out_ptr0", "out_ptr0", "ks0"), {}, {})
    assert launches(CPP_CODE) == {kernel.name: 1}
    assert not fallbacks(CPP_CODE)


def test_a_gathered_argument_counts_a_load_for_each_point():
    (kernel,) = kernels(TRITON_CODE)
    rows, table, sums = torch.zeros(2, 300), torch.zeros(1000), torch.zeros(2)
    assert moved_bytes(kernel, (rows, table, sums, sums, 2, 300)) == (4 * (600 + 600 + 2), 4 * (2 + 2))
    (whole,) = kernels(CPP_CODE)
    assert moved_bytes(whole, (table, sums, sums, 2)) == (4 * (1000 + 2), 4 * (2 + 2))


def test_a_source_without_kernels_has_none():
    code = "async_compile.wait(globals())\ndef call(args):\n    return (args[0], )\n"
    assert (kernels(code), launches(code), fallbacks(code)) == ([], {}, {})


def test_the_table_has_a_row_a_kernel_and_one_for_the_sums():
    found = listed(generated(step_of("greedy", 8, V), "cpp", KNOWN))
    assert table_of(found, "greedy").row_count == len(found) + 1 == 3


def test_without_a_gpu_the_tool_lists_a_gpus_stages(monkeypatch, capsys):
    pytest.importorskip("triton")
    monkeypatch.setattr(
        sys, "argv", ["kernels", "--mode", "top_k", "--rows", "2", "--vocab", "500", "--generate", "triton"]
    )
    main()
    lines = capsys.readouterr().out.splitlines()
    stages = [line.split()[1] for line in lines if line.startswith("│") and line.split()[1] != "│"]
    assert stages == ["gather_rows", "race_top_k", "draw_from_winners", "all"]
    assert [line.split()[1] for line in lines if "hand-written" in line] == ["race_top_k"]
