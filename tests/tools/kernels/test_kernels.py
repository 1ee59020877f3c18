"""Kernels of every mode, pinned through generated code: one more, or an operator left to ATen, fails here.

Those that may start before the one before them ends must wait for it before they read anything.

Triton's code is generated for the CPU's stages without a GPU and nothing is compiled, so the pins hold for the blocks
that the CPU uses; on a GPU another block size may fuse otherwise. A change for the better is pinned anew.
"""

import sys

import pytest
import torch

from compiled_sampler.logprobs import Logprobs
from compiled_sampler.lowering.tuning import TUNING
from compiled_sampler.modes import Verification
from tests.for_a_gpu import tiles
from tests.tiers import tiers
from tools.kernels.__main__ import main
from tools.kernels.generated_code import fallbacks, hasty, kernels, launches, moved_bytes
from tools.kernels.launches import FALLBACK, HAND_WRITTEN, for_a_gpu, generated, listed, recorded, table_of
from tools.kernels.steps import REQUESTS, step_of

V = 151_936
KNOWN = {}
"""Code that was generated before: steps of as many rows share most of it."""
EARLY = "'launch_pdl': True"
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

"""

MATCH, REJECTION = Verification("match", 3), Verification("rejection", 3, "probabilities")
STEPS = [
    *((mode, 64, None, pinned) for mode, pinned in PINNED.items()),
    *((mode, 8, None, pinned) for mode, pinned in PINNED_OF_FEW_LOGITS.items()),
    ("no_filter", 16, MATCH, PINNED_MATCH),
    ("no_filter", 16, REJECTION, PINNED_REJECTION),
]
"""Mode, rows, verification and the stages of a step with their kernels. Few rows start no kernel early."""
PINNED_ON_A_GPU = [
    *STEPS[:-1],
    ("no_filter", 32, REJECTION, PINNED_REJECTION),
    ("no_filter", 8, REJECTION, PINNED_REJECTION_OF_FEW),
    ("min_p", 17, None, PINNED["min_p"]),
]
EARLY_ON_A_GPU = [
    *((mode, None, "top_k") for mode in REQUESTS),
    ("no_filter", MATCH, "top_k"),
    ("no_filter", REJECTION, "top_k"),
    ("top_k_top_p[64]", None, "all"),
    ("full", None, "all"),
]
OF_LAW = {"raw": {"law_in_blocks", "sum_block_laws"}, "filtered": set()}
OF_LAW["processed"] = {*OF_LAW["raw"], "law_scale"}
"""Stages of logprobs that start early."""
WHOLE = {"top": 5, "rank": True, "entropy": True, "num_kept": True, "boundary": True}
LAWS = {law: Logprobs(of=law, **WHOLE) for law in OF_LAW}


def pins(found):
    """Every stage that a step calls with its number of kernels; a fallback is named instead."""
    return ", ".join(f"{stage} {'opaque' if code is None else count(code)}" for stage, code in found)


def count(code):
    """Launches of kernels; a fallback is spelt out."""
    return " ".join([str(launches(code).total()), *fallbacks(code)])


def early(found):
    """Stages whose kernels may start before the one before them ends, after a look at whether each waits."""
    stages = {stage: code for stage, code in found if code is not None and EARLY in code}
    ahead = {stage.__name__ for stage, tuning in TUNING.items() if tuning.ahead_rows}
    assert [(stage, name) for stage, code in stages.items() for name in hasty(code, looks_ahead=stage in ahead)] == []
    assert set(stages) <= {stage.__name__ for stage, tuning in TUNING.items() if tuning.overlap_rows}
    return set(stages)


@for_a_gpu()
@pytest.mark.parametrize(("mode", "rows", "verification", "pinned"), tiers([STEPS[0], STEPS[3], STEPS[-1]], STEPS))
def test_a_step_launches_its_triton_kernels_and_those_that_start_early_wait(mode, rows, verification, pinned):
    found = generated(step_of(mode, rows, V, verification=verification), "triton", KNOWN)
    assert pins(found) == pinned
    assert early(found) or rows == 8
    if mode == "top_k_top_p[64]":  # a level in one kernel has a thread block for each row
        assert [tiles(code) for stage, code in found if stage.startswith("choose_")] == [[("1", "4")]] * 4


@pytest.mark.full
@for_a_gpu()
@pytest.mark.parametrize("mode", ["top_k_top_p[64]", "full"])
def test_kernels_of_a_top_p_of_all_that_start_early_wait(mode):
    assert early(generated(step_of(mode, 64, V, top_p_base="all"), "triton", KNOWN))


@pytest.mark.full  # generating the code of one takes more than a minute
@for_a_gpu()
@pytest.mark.parametrize(
    ("mode", "law"), [("greedy", "raw"), ("no_filter", "processed"), ("top_k_top_p[64]", "filtered")]
)
def test_kernels_of_logprobs_that_start_early_wait(mode, law):
    found = early(generated(step_of(mode, 64, V, logprobs=LAWS[law]), "triton", KNOWN))
    assert {"logprobs_from_kept", "tokens_before", *OF_LAW[law]} <= found


@pytest.mark.full
def test_a_race_of_final_rows_has_one_axis_for_any_vocabulary():
    """Of V = 4,096 Inductor chose two, for which its tile has no size: it ran in eager torch."""
    with for_a_gpu():
        step = step_of("no_filter", 8, 4096, verification=Verification("rejection", 3))
        assert "final_winners 1" in pins(generated(step, "triton"))


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "rows", "verification", "pinned"), PINNED_ON_A_GPU)
def test_on_a_gpu_a_step_launches_the_same_kernels(mode, rows, verification, pinned):
    """Inductor makes some kernels two on a GPU alone, as of ``stack`` behind a long expression."""
    assert pins(generated(step_of(mode, rows, V, device="cuda", verification=verification), "triton")) == pinned


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mode", ["no_filter", "top_k_top_p[64]"])
def test_on_a_gpu_every_kernel_of_logprobs_that_starts_early_waits(mode, law, rows):
    """Other modes have stages more of a search, which the steps without logprobs have too."""
    found = early(generated(step_of(mode, rows, V, device="cuda", logprobs=LAWS[law]), "triton"))
    assert found or torch.cuda.get_device_capability() < (9, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 128])
@pytest.mark.parametrize(("mode", "verification", "base"), EARLY_ON_A_GPU)
def test_on_a_gpu_every_kernel_that_starts_early_waits(mode, verification, base, rows):
    step = step_of(mode, rows, V, device="cuda", verification=verification, top_p_base=base)
    found = early(generated(step, "triton"))
    assert found or torch.cuda.get_device_capability() < (9, 0)


def test_greedy_is_a_kernel_a_stage_in_cpp():
    found = generated(step_of("greedy", 64, V), "cpp", KNOWN)
    assert pins(found) == "order_maxima 1, first_from_blocks 1"
    assert table_of(listed(found), "greedy").row_count == 2 + 1  # and the sums


def ranked(x):
    """A sort that no backend generates code for."""
    return torch.sort(x * 2, dim=-1, stable=True).indices.to(torch.int32) + 1


@pytest.mark.parametrize("backend", ["cpp", "triton"])
def test_a_fallback_is_found(backend):
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
    (kernel,) = kernels(TRITON_CODE)
    wait, decorator = "    tl.extra.cuda.gdc_wait()\n", "@triton_heuristics.persistent_reduction(\n"
    early = TRITON_CODE.replace(decorator, f"{decorator}    triton_meta={{'launch_pdl': True}},\n")
    row = "    tmp9 = tl.load(in_ptr1 + (x0), xmask)\n"
    tile = "    tmp9 = tl.load(in_ptr0 + (r0_1 + 300*x0), r0_mask)\n"
    for before, lines, is_found, is_found_ahead in (
        ("    tmp0 =", "", True, True),
        ("    tl.store", wait, True, True),
        ("    tmp0 =", wait, False, False),
        ("    tmp0 =", row + wait, True, False),
        ("    tmp0 =", tile + wait, True, True),
    ):
        code = early.replace(before, lines + before)
        assert hasty(code) == [kernel.name] * is_found
        assert hasty(code, looks_ahead=True) == [kernel.name] * is_found_ahead
        assert hasty(TRITON_CODE.replace(before, lines + before)) == []


def test_a_gathered_argument_counts_a_load_for_each_point():
    (kernel,) = kernels(TRITON_CODE)
    rows, table, sums = torch.zeros(2, 300), torch.zeros(1000), torch.zeros(2)
    assert moved_bytes(kernel, (rows, table, sums, sums, 2, 300)) == (4 * (600 + 600 + 2), 4 * (2 + 2))


def test_without_a_gpu_the_tool_lists_a_gpus_stages(monkeypatch, capsys):
    options = "--mode top_k --rows 2 --vocab 500 --generate triton"
    monkeypatch.setattr(sys, "argv", ["kernels", *options.split()])
    main()
    lines = capsys.readouterr().out.splitlines()
    (hand_written,) = (line for line in lines if "hand-written" in line)
    assert hand_written.split()[1] == "race_top_k"
    rows = [line for line in lines if line.startswith("│") and line.split()[1] != "│"]
    launches = [(line.split()[1], int(line.split("│")[4])) for line in rows]
    assert launches == [("gather_rows", 1), ("race_top_k", 4), ("draw_from_winners", 1), ("all", 6)]
    assert "top_k=1000" in " ".join(lines)
