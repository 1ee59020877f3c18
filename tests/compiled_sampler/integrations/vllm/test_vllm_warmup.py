"""The warm-up at an engine's start: which of vLLM's functions bring it about, and what it prepares."""

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from compiled_sampler import Verification
from compiled_sampler.integrations.vllm import install, plugin, uninstall
from compiled_sampler.integrations.vllm.engine_sampler import EngineSampler, verifications
from compiled_sampler.integrations.vllm.settings import Settings
from compiled_sampler.integrations.vllm.v1_sampler import RunnerState
from tests.engines.vllm_stand_in import runner as checked_runner

pytestmark = pytest.mark.full

V, HIDDEN = 40, 8


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    uninstall()
    yield
    uninstall()


def runner(num_drafts: int = 0, method: str = "greedy", **changed: Any) -> Any:
    """A stand-in with what a state reads of a runner before its first batch; 4 requests, vocabulary V."""
    given = {"draft_sample_method": method, "rejection_sample_method": "standard"}
    drafts = SimpleNamespace(num_speculative_tokens=num_drafts, **given) if num_drafts else None
    made = checked_runner(speculative_config=drafts, **changed)
    made.vllm_config.model_config.seed, made.vllm_config.model_config.max_model_len = 3, 16
    made.input_batch.vocab_size = V
    made.max_num_reqs = 4
    made.model = SimpleNamespace(compute_logits=lambda hidden: torch.zeros(len(hidden), V, dtype=torch.bfloat16))
    return made


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[EngineSampler]:
    """The samplers that are warmed up, which compile nothing here."""
    found: list[EngineSampler] = []
    monkeypatch.setattr(EngineSampler, "warm_up", lambda self: found.append(self))
    return found


def test_a_state_makes_the_sampler_of_its_batches_once(warmed: list[EngineSampler]) -> None:
    state = RunnerState(runner(), Settings(backend="eager"))
    state.warm_up(torch.zeros(3, HIDDEN))
    state.warm_up(torch.zeros(3, HIDDEN))
    (made,) = warmed
    assert (made.sampler.vocab_size, made.sampler.max_num_requests) == (V, 4)
    assert made.sampler.logits_dtype is torch.bfloat16
    assert state._sampler_of(torch.zeros(2, V)).engine is made
    assert state.counts == {"batches": 0, "stock_batches": 0}


def test_nothing_is_prepared_where_it_is_off_or_vllm_draws(warmed: list[EngineSampler]) -> None:
    RunnerState(runner(), Settings(warmup="off")).warm_up(torch.zeros(3, HIDDEN))
    RunnerState(runner(is_diffusion=True), Settings(on_unsupported="stock")).warm_up(torch.zeros(3, HIDDEN))
    assert warmed == []


@pytest.mark.parametrize(
    ("num_drafts", "method", "rule", "wanted"),
    [
        (0, "greedy", "block", ()),
        (3, "probabilistic", "match", (Verification("match", 3),)),
        (3, "greedy", "rejection", (Verification("match", 3),)),
        (2, "probabilistic", "block", (Verification("match", 2), Verification("block", 2, "probabilities"))),
    ],
)
def test_drafts_are_prepared_for_as_they_will_be_verified(
    num_drafts: int, method: str, rule: str, wanted: tuple[Verification, ...]
) -> None:
    assert verifications(runner(num_drafts, method).vllm_config, rule) == wanted


def test_the_cpu_worker_warms_up_before_the_engine_serves(
    monkeypatch: pytest.MonkeyPatch, warmed: list[EngineSampler]
) -> None:
    monkeypatch.setattr("vllm.distributed.parallel_state.get_pp_group", lambda: SimpleNamespace(is_last_rank=True))
    order: list[str] = []
    monkeypatch.setattr(CPUWorker, "compile_or_warm_up_model", lambda self: order.append(f"{len(warmed)} warmed"))
    of_worker = Runner(order)
    install(backend="eager")
    plugin._INSTALLED.runners[of_worker] = RunnerState(runner(), Settings(backend="eager"))
    CPUWorker.compile_or_warm_up_model(SimpleNamespace(model_runner=of_worker))
    CPUWorker.compile_or_warm_up_model(SimpleNamespace(model_runner=Runner(order)))  # was there before the adapter
    assert order == ["1 row", "1 warmed", "1 warmed"]


def test_a_model_that_is_an_encoder_alone_is_not_warmed_up(
    monkeypatch: pytest.MonkeyPatch, warmed: list[EngineSampler]
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(GPUModelRunner, "_dummy_sampler_run", lambda self, hidden_states: torch.tensor([]))
    of_worker = Runner([])
    install(backend="eager")
    plugin._INSTALLED.runners[of_worker] = RunnerState(runner(), Settings(backend="eager"))
    assert not len(GPUModelRunner._dummy_sampler_run(of_worker, torch.zeros(3, HIDDEN)))
    uninstall()
    assert warmed == []


def test_elsewhere_the_runner_does_behind_vllms_own_sampler(
    monkeypatch: pytest.MonkeyPatch, warmed: list[EngineSampler]
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    order: list[str] = []

    def stock(self: Any, hidden_states: Tensor) -> str:
        order.append(f"{len(warmed)} warmed")
        return "made"

    monkeypatch.setattr(GPUModelRunner, "_dummy_sampler_run", stock)
    of_worker, before = Runner(order), CPUWorker.compile_or_warm_up_model
    install(backend="eager")
    assert CPUWorker.compile_or_warm_up_model is before
    plugin._INSTALLED.runners[of_worker] = RunnerState(runner(), Settings(backend="eager"))
    assert GPUModelRunner._dummy_sampler_run(of_worker, torch.zeros(3, HIDDEN)) == "made"
    assert GPUModelRunner._dummy_sampler_run(Runner(order), torch.zeros(3, HIDDEN)) == "made"
    assert order == ["0 warmed", "1 warmed"]
    uninstall()
    assert GPUModelRunner._dummy_sampler_run is stock


class Runner:
    """A key of the adapter's table, whose dummy run says how many rows it had."""

    def __init__(self, order: list[str]) -> None:
        self._order = order

    def _dummy_run(self, num_tokens: int) -> tuple[None, Tensor]:
        self._order.append(f"{num_tokens} row")
        return None, torch.zeros(num_tokens, HIDDEN)


def test_vllm_calls_them_where_the_adapter_expects_it() -> None:
    """The GPU worker behind its captures, but before it watches for late compilation; the CPU worker not at all."""
    of_gpu = inspect.getsource(Worker.compile_or_warm_up_model)
    places = [of_gpu.index(each) for each in ("capture_model()", "_dummy_sampler_run(", "_maybe_activate_jit_monitor")]
    assert places == sorted(places)
    assert "_dummy_sampler_run(last_hidden_states)" in inspect.getsource(GPUModelRunner.profile_run)
    assert "_dummy_sampler_run" not in inspect.getsource(CPUWorker.compile_or_warm_up_model)
    assert list(inspect.signature(CPUWorker.compile_or_warm_up_model).parameters) == ["self"]
    assert "num_tokens" in inspect.signature(GPUModelRunner._dummy_run).parameters
