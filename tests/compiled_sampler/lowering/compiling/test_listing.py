"""Stages that are listed, not run: what stands in for them."""

import torch
from torch import Tensor

from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.lowering.compiling.listing import fake_results, zeros_like
from tests.builders.sampler import nothing_compiles

CPU = torch.device("cpu")


def halves(x: Tensor) -> tuple[Tensor, None, Tensor]:
    return x[:, ::2] + 1, None, (x > 0).sum(-1)


def doubled(x: Tensor) -> Tensor:
    return x.T * 2


def test_fake_results_have_the_shapes_of_what_a_stage_returns():
    x = torch.randn(3, 6)
    for found, wanted in zip(zeros_like(fake_results(halves, (x,), {})), halves(x), strict=True):
        if wanted is None:
            assert found is None
        else:
            assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
            assert not found.any()


def test_precompiled_stages_run_afterwards_and_compile_no_more():
    run, x = CompiledStages(), torch.randn(3, 6)
    with run.precompiling(CPU):
        first, _, count = run(halves, x)
        assert not first.any()
        run(doubled, first)
        assert not count.any()
    with nothing_compiles():
        first, _, count = run(halves, x)
        assert torch.equal(first, halves(x)[0])
        assert torch.equal(count, halves(x)[2])
        assert torch.equal(run(doubled, first), doubled(first))
