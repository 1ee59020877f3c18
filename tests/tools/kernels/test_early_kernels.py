"""Kernels that may start before the one before them ends: each waits for it before it reads anything.

Triton's code is generated for the CPU's stages without a GPU and nothing is compiled.
"""

from collections.abc import Iterator

import pytest
import torch

from compiled_sampler.logprobs import Logprobs
from compiled_sampler.lowering.stages.tuning import TUNING
from compiled_sampler.modes import Verification
from tests.tiers import tiers
from tools.kernels.generated_code import hasty
from tools.kernels.launches import Generated, Known, for_a_gpu, generated
from tools.kernels.steps import REQUESTS, step_of

V = 151_936
KNOWN: Known = {}
"""Code that was generated before: steps of as many rows share most of it."""
EARLY = "'launch_pdl': True"
MATCH, REJECTION = Verification("match", 3), Verification("rejection", 3, "probabilities")
STEPS = [
    *((mode, None, "top_k") for mode in REQUESTS),
    ("no_filter", MATCH, "top_k"),
    ("no_filter", REJECTION, "top_k"),
    ("top_k_top_p[64]", None, "all"),
    ("full", None, "all"),
]
LOGPROBS = [
    (mode, Logprobs(of=law, top=5, rank=True, entropy=True, num_kept=True, boundary=True))
    for mode in REQUESTS
    for law in ("raw", "processed", "filtered")
]
LOGPROBS_ON_A_GPU = [each for each in LOGPROBS if each[0] in ("no_filter", "top_k_top_p[64]")]
"""Others have stages more of a search, which the steps without logprobs have too."""


@pytest.fixture
def as_on_a_gpu() -> Iterator[None]:
    """As ``for_a_gpu``."""
    with for_a_gpu():
        yield


def early(found: list[Generated]) -> set[str]:
    """Stages whose kernels may start before the one before them ends, after a look at whether each waits."""
    stages = {stage: code for stage, code in found if code is not None and EARLY in code}
    assert [(stage, name) for stage, code in stages.items() for name in hasty(code)] == []
    return set(stages)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("mode", "verification", "base"), tiers([STEPS[0], ("no_filter", REJECTION, "top_k")], STEPS))
def test_every_kernel_that_starts_early_waits(mode, verification, base):
    pytest.importorskip("triton")
    rows = 64 if verification is None else 16
    found = early(generated(step_of(mode, rows, V, verification=verification, top_p_base=base), "triton", KNOWN))
    assert found
    assert found <= {stage.__name__ for stage, tuning in TUNING.items() if tuning.overlap_rows}


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("mode", "logprobs"), tiers(LOGPROBS[:1], LOGPROBS))
def test_every_kernel_of_logprobs_that_starts_early_waits(mode, logprobs):
    pytest.importorskip("triton")
    found = early(generated(step_of(mode, 64, V, logprobs=logprobs), "triton", KNOWN))
    of_law = {"raw": {"law_in_blocks", "sum_block_laws"}, "filtered": set[str]()}
    of_law["processed"] = {*of_law["raw"], "law_scale"}
    assert {"logprobs_from_kept", "tokens_before", *of_law[logprobs.of]} <= found
    assert found <= {stage.__name__ for stage, tuning in TUNING.items() if tuning.overlap_rows}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize(("mode", "logprobs"), LOGPROBS_ON_A_GPU)
def test_on_a_gpu_every_kernel_of_logprobs_that_starts_early_waits(mode, logprobs, rows):
    found = early(generated(step_of(mode, rows, V, device="cuda", logprobs=logprobs), "triton"))
    assert found or torch.cuda.get_device_capability() < (9, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 128])
@pytest.mark.parametrize(("mode", "verification", "base"), STEPS)
def test_on_a_gpu_every_kernel_that_starts_early_waits(mode, verification, base, rows):
    step = step_of(mode, rows, V, device="cuda", verification=verification, top_p_base=base)
    found = early(generated(step, "triton"))
    assert found or torch.cuda.get_device_capability() < (9, 0)
