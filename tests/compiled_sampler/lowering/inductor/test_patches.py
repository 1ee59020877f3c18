"""What is written otherwise in kernels: casts of whole vectors in C++, loads and the next start in Triton."""

import re

import pytest
import torch
from torch._inductor.cpu_vec_isa import valid_vec_isa_list
from torch._inductor.utils import run_and_get_code

from compiled_sampler.core.rows import gather_rows
from compiled_sampler.lowering.compiled_stages import EXACT_OPTIONS, CompiledStages
from compiled_sampler.lowering.inductor.patches import whole_casts
from compiled_sampler.lowering.inductor.triton_kernels import ahead, prompt, streamed
from compiled_sampler.lowering.tuning import tuning_of
from compiled_sampler.passes.maxima import BlockMaxima
from compiled_sampler.passes.race import first_from_blocks, race_maxima
from tests.for_a_gpu import gpu_code, rows_of_one_request
from tests.tiers import tiers

LANE_BY_LANE = "bit_cast"
WIDTHS = sorted({isa.bit_width() for isa in valid_vec_isa_list()})
WHOLE = [(torch.float32, torch.int32), (torch.float64, torch.int64)]
NARROW = [(torch.bfloat16, torch.int16), (torch.float16, torch.int16)]


def sign_flipped(x, integer):
    flipped = x.view(integer) ^ torch.iinfo(integer).min
    return flipped, flipped.view(x.dtype)


def compiled(x, integer, width):
    """``sign_flipped`` through Inductor with vectors of so many bits, and its code."""
    torch._dynamo.reset()
    options = {"cpp.simdlen": width, "fx_graph_cache": False}
    made, codes = run_and_get_code(torch.compile(sign_flipped, fullgraph=True, options=options), x, integer)
    return made, "".join(codes)


def any_bits(dtype, integer):
    """Floats of random bits, NaNs of every kind among them; of a length that no vector divides."""
    drawn = torch.randint(-(2**63), 2**63 - 1, (1237,), generator=torch.Generator().manual_seed(0))
    return drawn.to(integer).view(dtype)


@pytest.mark.parametrize("width", tiers([WIDTHS[0]], WIDTHS))
@pytest.mark.parametrize(("dtype", "integer"), WHOLE + NARROW)
def test_every_bit_is_kept(dtype, integer, width):
    x = any_bits(dtype, integer)
    with whole_casts():
        (whole, back), code = compiled(x, integer, width)
    assert torch.equal(whole, sign_flipped(x, integer)[0])
    assert torch.equal(back.view(integer), whole)
    assert (LANE_BY_LANE in code) == ((dtype, integer) in NARROW)


@pytest.mark.parametrize("width", tiers([WIDTHS[0]], WIDTHS))
def test_inductor_left_alone_casts_lane_by_lane(width):
    dtype, integer = WHOLE[0]
    assert LANE_BY_LANE in compiled(any_bits(dtype, integer), integer, width)[1]


@pytest.mark.skipif(not WIDTHS, reason="Inductor knows no vectors of this machine")
def test_a_race_casts_no_vector_lane_by_lane():
    rows = gather_rows(rows_of_one_request(8, 2048), stream=0)
    run, x = CompiledStages({**EXACT_OPTIONS, "fx_graph_cache": False}), torch.randn(8, 2048)
    _, codes = run_and_get_code(lambda: run(race_maxima, x, rows, None, None, vocab_size=2048, block=128))
    assert "loadu(&" in "".join(codes)
    assert LANE_BY_LANE not in "".join(codes)


WAIT, LAUNCH = "    tl.extra.cuda.gdc_wait()", "    tl.extra.cuda.gdc_launch_dependents()"


def test_loads_from_the_pointers_alone_are_marked():
    source = (
        "    a = tl.load(in_ptr0 + (x0 + 64*((x1 // 2))), tmp2 & (x1 < 3), other=float('-inf'){}).to(tl.float32)\n"
        "    b = tl.load(in_ptr1 + (x0), None)\n"
        "    c = tl.load(in_ptr0 + (x0), None{})\n"
        "    d = tl.load(in_ptr0 + (x0), None{})"
    )
    plain, first = source.format("", ", eviction_policy='evict_last'", ""), ", eviction_policy='evict_first'"
    assert streamed(plain, ["in_ptr0"]) == source.format(first, first, first)
    assert streamed(plain, []) == plain


@pytest.mark.parametrize(
    ("lines", "order"),
    [
        ([WAIT, "    a = tl.load(in_ptr0)", LAUNCH, "    tl.store(out_ptr0, a)"], [0, 2, 1, 3]),
        (["    a = 1"], [0]),
        ([WAIT, "    a = 1"], [0, 1]),
        ([LAUNCH], [0]),
    ],
    ids=["both", "neither", "no launch", "no wait"],
)
def test_the_next_kernel_starts_after_the_wait_and_one_without_both_stays_as_it_is(lines, order):
    assert prompt("\n".join(lines)).splitlines() == [lines[line] for line in order]


def test_what_rows_need_is_read_before_the_wait_and_nothing_else():
    before, body = (
        ["    x0 = xindex"],
        [
            "    tmp0 = tl.load(in_ptr0 + (r0_1 + 149*x0), r0_mask & xmask)",
            "    tmp1 = tl.load(in_ptr1 + (x0), xmask)",
            "    tmp2 = triton_helpers.max2(tmp0, 1)[:, None]",
            "    tl.device_assert(tmp1 < 8, 'index')",
            "    tmp3 = tl.load(in_ptr2 + (tmp1), xmask)",
            "    tmp4 = tl.load(in_ptr2 + (tmp2), xmask)",
            "    tmp5 = tmp3 & tmp4",
            "    _tmp7 = tl.full([XBLOCK, R0_BLOCK], tmp4, tl.int32)",
            "    tmp8 = _tmp7 + 1",
            "    for r0_offset in range(0, r0_numel, R0_BLOCK):",
            "        tmp6 = tmp1 + 1",
            "    tmp9 = tmp1 + roffset",
            "    tl.store(out_ptr0 + (x0), tmp5, xmask)",
        ],
    )
    moved = [body[1], body[4]]
    source = "\n".join([*before, WAIT, *body])
    assert ahead(source, ["in_ptr1", "in_ptr2"]).splitlines() == [
        *before, *moved, WAIT, *(line for line in body if line not in moved)
    ]  # fmt: skip
    assert ahead(source, []).splitlines() == source.splitlines()
    assert ahead("\n".join(body), ["in_ptr1"]) == "\n".join(body)  # a kernel that waits for none


def code_of_first_from_blocks(rows, vocab_size):
    blocks = BlockMaxima(*(torch.zeros(rows, vocab_size // 50, dtype=torch.int32) for _ in range(3)))
    given = torch.randn(rows, vocab_size), blocks, rows_of_one_request(rows, vocab_size)
    return gpu_code(first_from_blocks, *given, vocab_size=vocab_size, block=50)


@pytest.mark.parametrize("rows", [1, 8])
def test_generated_code_reads_slots_and_needs_before_it_waits_and_keys_afterwards(rows):
    assert tuning_of(first_from_blocks).ahead_rows
    steps = re.findall(r"gdc_wait|tl\.load|max2", code_of_first_from_blocks(rows, 2000))
    assert steps == ["tl.load"] * 3 + ["gdc_wait"] + ["tl.load"] * 3 + ["max2"] * 2


def test_generated_code_of_a_row_too_long_for_registers_is_valid_and_waits_first():
    code = code_of_first_from_blocks(1, 400_000)
    assert "for r0_offset" in code
    for kernel in re.findall(r"^def triton_.*?(?=^\'\'\')", code, re.MULTILINE | re.DOTALL):
        assert re.findall(r"gdc_wait|tl\.load", kernel)[0] == "gdc_wait"


def test_generated_code_marks_every_load_of_logits_and_no_other():
    assert tuning_of(race_maxima).streams
    rows = gather_rows(rows_of_one_request(8, 2000), stream=0)
    static = {"vocab_size": 2000, "block": 512, "slices": 4, "by_bits": True}
    code = gpu_code(race_maxima, torch.randn(8, 2000), rows, None, None, **static)
    loads = re.findall(r"tl\.load\((\w+) .*", code)
    marked = re.findall(r"tl\.load\((\w+) .*evict_first", code)
    assert len(marked) == 4  # one for each slice
    assert len(set(marked)) == 1
    assert loads.count(marked[0]) == 4
    assert len(loads) > 4


def test_the_gathering_of_rows_lets_the_next_start_at_once():
    assert tuning_of(gather_rows).launches_next_promptly
    code = gpu_code(gather_rows, rows_of_one_request(8, 2000), stream=0)
    steps = re.findall(r"gdc_wait|gdc_launch_dependents|tl\.load", code)
    assert steps[:3] == ["gdc_wait", "gdc_launch_dependents", "tl.load"]
