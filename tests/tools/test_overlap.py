"""Programmatic dependent launch: a kernel may start early, if it waits before it touches memory.

Inductor leaves a wait out where it believes that none is needed. The next kernel then waits for that one alone, and may
read what an earlier one has not written yet.
"""

import functools
from unittest import mock

import pytest
import torch
from torch._inductor import config
from torch._inductor.codegen.triton import TritonKernel

from compiled_sampler.lowering import OVERLAPPED
from compiled_sampler.modes import PROPOSALS, Verification
from tests.tools.test_inspect_kernels import PINNED, TRITON_CODE, V
from tools.generated_code import hasty, kernels
from tools.inspect_kernels import step_of
from tools.kernel_launches import Generated, Known, generated

STEPS = [
    *((mode, None) for mode in PINNED),
    *((mode, Verification("match", 3)) for mode in ("no_filter", "full")),
    *(
        (mode, Verification(rule, 3, drafts))
        for mode in ("no_filter", "full")
        for rule in ("rejection", "block")
        for drafts in PROPOSALS
    ),
]


@functools.cache
def known(rows: int, device: str) -> Known:
    """What was generated before for a batch."""
    return {}


def overlapping(mode: str, rows: int, verification: Verification | None, device: str = "cpu") -> list[Generated]:
    """The stages of a step that take part, with their code."""
    step = step_of(mode, rows, V, device=device, verification=verification)
    found = generated(step, "triton", known(rows, device))
    return [each for each in found if each.code is not None and "'launch_pdl': True" in each.code]


@pytest.mark.parametrize(("mode", "verification"), STEPS)
def test_every_kernel_that_starts_early_waits(mode, verification):
    pytest.importorskip("triton")
    enabled = staticmethod(lambda: config.triton.enable_pdl)  # asks for a GPU otherwise
    with mock.patch.object(TritonKernel, "_enable_pdl_codegen", enabled):
        found = overlapping(mode, 8, verification)
    assert {each.stage for each in found} <= {stage.__name__ for stage in OVERLAPPED}
    assert [(each.stage, name) for each in found for name in hasty(each.code or "")] == []


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 128])
@pytest.mark.parametrize(("mode", "verification"), [*STEPS[:7], STEPS[8]])
def test_on_a_gpu_every_kernel_that_starts_early_waits(mode, verification, rows):
    found = overlapping(mode, rows, verification, "cuda")
    assert torch.cuda.get_device_capability() < (9, 0) or found
    assert [(each.stage, name) for each in found for name in hasty(each.code or "")] == []


def test_a_kernel_that_does_not_wait_is_found():
    waits = TRITON_CODE.replace("    tmp0 =", "    tl.extra.cuda.gdc_wait()\n    tmp0 =")
    late = TRITON_CODE.replace("    tl.store", "    tl.extra.cuda.gdc_wait()\n    tl.store")
    early = "@triton_heuristics.persistent_reduction(\n    triton_meta={'launch_pdl': True},"
    (kernel,) = kernels(TRITON_CODE)
    for code, expected in ((TRITON_CODE, [kernel.name]), (late, [kernel.name]), (waits, [])):
        assert hasty(code.replace("@triton_heuristics.persistent_reduction(", early)) == expected
        assert hasty(code) == []
