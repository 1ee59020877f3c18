"""Stages that are listed, not run: what stands in for them, and what is launched meanwhile."""

import threading
from unittest import mock

import pytest
import torch
from torch import Tensor

from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.lowering.compiling.parallel_compile import BackgroundLaunches, fake_results, zeros_like
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


def test_stages_with_kernels_of_their_own_run_in_a_thread_and_their_errors_are_raised():
    ran: list[tuple[bool, str]] = []

    def launches(x: Tensor) -> Tensor:
        ran.append((type(x) is Tensor, threading.current_thread().name))
        return x + 1

    def fails(x: Tensor) -> Tensor:
        if type(x) is Tensor:
            raise RuntimeError("no such kernel")
        return x

    x, here = torch.ones(3), threading.current_thread().name
    cuda = {"current_stream": mock.DEFAULT, "stream": mock.MagicMock()}
    with mock.patch.multiple(torch.cuda, **cuda):
        with BackgroundLaunches(torch.device("cuda")) as made:
            made.launch(launches, (x,), {})
        assert [is_real for is_real, _ in ran] == [True]
        assert ran[0][1] != here
        with pytest.raises(RuntimeError, match="no such kernel"), BackgroundLaunches(torch.device("cuda")) as made:
            made.launch(fails, (x,), {})
    with BackgroundLaunches(CPU) as made:
        ran.clear()
        made.launch(launches, (x,), {})
    assert ran == []
