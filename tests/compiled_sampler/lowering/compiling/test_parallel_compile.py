"""Compiling in parallel: what waits, what does not, and what an error leaves behind."""

import threading
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile

from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.lowering.compiling.parallel_compile import BackgroundLaunches, fake_results, zeros_like
from compiled_sampler.lowering.inductor.patches import one_wait
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


def test_kernels_are_waited_for_at_the_end_alone():
    def unlike(x: Tensor) -> Tensor:
        return x.sin() * 3.25

    run, original, scopes = CompiledStages(), AsyncCompile.wait, []

    def wait(self, scope):
        scopes.append(scope)
        original(self, scope)

    with mock.patch.object(AsyncCompile, "wait", wait):
        with run.precompiling(CPU):
            run(unlike, torch.randn(3, 6))
            assert scopes == []
        assert len(scopes) == 1
    assert AsyncCompile.wait is original


def test_other_threads_do_not_share_the_waiting():
    waited: list[str] = []

    def wait(self, scope):
        waited.append(threading.current_thread().name)

    with mock.patch.object(AsyncCompile, "wait", wait):
        with one_wait():
            other = threading.Thread(target=lambda: AsyncCompile().wait({}), name="other")
            other.start()
            other.join()
            AsyncCompile().wait({})
            assert waited == ["other"]
        assert waited == ["other", threading.current_thread().name]


def test_two_threads_precompile_one_after_the_other():
    original, inside, order = AsyncCompile.wait, threading.Event(), list[str]()

    def other():
        inside.wait()
        with one_wait():
            order.append("second")

    thread = threading.Thread(target=other)
    thread.start()
    with one_wait():
        inside.set()
        thread.join(timeout=0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert AsyncCompile.wait is original


def test_an_error_of_a_compiler_is_raised_after_all_have_ended():
    seen: list[int] = []

    def wait(self, scope):
        seen.append(scope["number"])
        if scope["number"] == 1:
            raise RuntimeError("no such instruction")

    def compile_three():
        with one_wait():
            for number in range(3):
                AsyncCompile().wait({"number": number})

    original = AsyncCompile.wait
    with mock.patch.object(AsyncCompile, "wait", wait), pytest.raises(RuntimeError, match="no such instruction"):
        compile_three()
    assert seen == [0, 1, 2]
    assert AsyncCompile.wait is original


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
