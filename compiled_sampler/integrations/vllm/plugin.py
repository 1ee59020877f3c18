"""Switching the adapter on and off: functions of vLLM that are replaced, and what they are replaced by."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor

from compiled_sampler.integrations.engine_interface import wrapped
from compiled_sampler.integrations.vllm.parameters import VARIABLE, Settings, settings_of_text, unsupported, warn_of_v2
from compiled_sampler.integrations.vllm.versions import check_version

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_CPU_WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
_PROCESSOR = "vllm.v1.engine.input_processor:InputProcessor"
_STATE = "_compiled_sampler_state"  # of a V1 runner: a table of ours by runners would keep each alive, as states do
_ADMITTING: ContextVar[Settings | None] = ContextVar("settings of the engine that checks a request", default=None)


class _Installed:
    """What is replaced in this process, and how."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.originals: list[tuple[Any, str, Callable[..., Any]]] = []
        self.runners: WeakSet[Any] = WeakSet()  # of V1, each with its RunnerState
        self.processors: WeakKeyDictionary[Any, Settings] = WeakKeyDictionary()  # of engines, check their requests
        self.counts_v2: Counter[str] = Counter()

    def replace(self, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.originals.append(wrapped(name, make))

    def replace_v2(self) -> None:
        """Have V2 runners that are made from now on make our kinds of vLLM's samplers."""
        from vllm.v1.worker.gpu import model_runner

        from compiled_sampler.integrations.vllm import v2_sampler

        kinds = {
            "Sampler": v2_sampler.SlotSampler,
            "GPUWatermarkSampler": v2_sampler.WatermarkSampler,
            "RejectionSampler": v2_sampler.SlotVerifier,
        }
        for name, kind in kinds.items():
            self.originals.append((model_runner, name, getattr(model_runner, name)))
            setattr(model_runner, name, kind)

    def hold(self, runner: Any, state: Any) -> None:
        """Give a runner of V1 its RunnerState."""
        setattr(runner, _STATE, state)
        self.runners.add(runner)

    def restore(self) -> None:
        while self.originals:
            setattr(*self.originals.pop())
        for runner in self.runners:
            delattr(runner, _STATE)
        self.runners.clear()


_INSTALLED = _Installed()


def load() -> None:
    """What vLLM calls in each of its processes: ``install`` as the environment variable says, if it is set."""
    settings = settings_of_text(os.environ.get(VARIABLE, ""))
    if settings is not None:
        _install(settings)


def install(
    *,
    on_unsupported: str = "error",
    rule: str = "match",
    backend: str = "auto",
    warmup: str = "start",
    v2: str | None = None,
) -> None:
    """Have the sampler draw in engines that are made from now on, here and in processes that vLLM starts.

    A second call has other settings for engines that are made after it. The environment variable is set too, from which
    other processes read them.

    Args:
        on_unsupported: "error" refuses a request that asks for what the sampler does not have where vLLM checks it, and
            an engine at its start; "stock" gives such batches to vLLM's own sampler, which ``statistics`` counts.
        rule: "match", "rejection" or "block", for drafts of which the drafter gives probabilities; others are verified
            by ``match`` in any case.
        backend: of ``Sampler``.
        warmup: "start" has background processes compile, from an engine's start on, all that batches run, but for rarer
            edits; until then they run in eager torch. "off" leaves it to the first batch of each kind.
        v2: deprecated; None or "untested", which V2 model runners needed once.

    Raises:
        ImportError: a vLLM that the adapter does not fit.
        ValueError: an argument out of range.
    """
    if v2 is not None:
        warn_of_v2(v2)
    settings = Settings(on_unsupported, rule, backend, warmup)
    _install(settings)
    os.environ[VARIABLE] = settings.text


def uninstall() -> None:
    """Have vLLM draw again as it did, and unset the environment variable; engines with a V2 runner keep our sampler."""
    _INSTALLED.restore()
    _INSTALLED.settings = None
    _INSTALLED.counts_v2.clear()
    os.environ.pop(VARIABLE, None)


def statistics() -> dict[str, int]:
    """Batches of this process: "batches" drawn here, "stock_batches" by vLLM's own sampler, and "stock: reason".

    Workers in other processes count for themselves: ``llm.collective_rpc(lambda worker: statistics())``.
    """
    total: Counter[str] = Counter({"batches": 0, "stock_batches": 0})
    total.update(_INSTALLED.counts_v2)
    for runner in _INSTALLED.runners:
        total.update(state_of(runner).counts)
    return dict(total)


def state_of(runner: Any) -> Any:
    """The RunnerState of a runner of V1; None for one that draws as it did."""
    return getattr(runner, _STATE, None)


def _install(settings: Settings) -> None:
    import vllm
    from vllm.platforms import current_platform

    from compiled_sampler.integrations.vllm import v2_sampler

    if _INSTALLED.settings is None:
        check_version(vllm.__version__)
        _INSTALLED.replace(f"{_RUNNER}.__init__", _checked_init)
        _INSTALLED.replace(f"{_RUNNER}._sample", _drawn)
        if current_platform.is_cpu():
            _INSTALLED.replace(f"{_CPU_WORKER}.compile_or_warm_up_model", _warmed_worker)
        else:
            _INSTALLED.replace(f"{_RUNNER}._dummy_sampler_run", _warmed_runner)
        _INSTALLED.replace_v2()
        _INSTALLED.replace(f"{_PROCESSOR}.__init__", _checking_init)
        _INSTALLED.replace(f"{_PROCESSOR}.process_inputs", _checked_inputs)
        _INSTALLED.replace("vllm.sampling_params:SamplingParams._validate_spec_decode", _wider_drafts)
    v2_sampler.SlotSampler.settings, v2_sampler.SlotSampler.counts = settings, _INSTALLED.counts_v2
    _INSTALLED.settings = settings


def _settings() -> Settings:
    assert _INSTALLED.settings is not None
    return _INSTALLED.settings


def _checked_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """``__init__`` of a runner, which then has a state of the adapter."""
    from compiled_sampler.integrations.vllm.v1_sampler import RunnerState

    def init(self: Any, *args: Any, **given: Any) -> None:
        original(self, *args, **given)
        if not self.is_pooling_model:
            _INSTALLED.hold(self, RunnerState(self, _settings()))

    return init


def _drawn(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_sample`` of a runner; one that was there before the adapter draws as it did."""

    def sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        state = state_of(self)
        output = None if state is None else state.draw(logits, spec_decode_metadata)
        return original(self, logits, spec_decode_metadata) if output is None else output

    return sample


def _warmed_runner(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_dummy_sampler_run`` of a runner, which warms up our sampler too."""

    # vLLM's GPU worker calls it first where it measures the memory that is left for the KV cache, so that ours counts.
    def run(self: Any, hidden_states: Any) -> Any:
        output = original(self, hidden_states)
        state = state_of(self)
        is_nothing = isinstance(output, Tensor) and not len(output)  # from a model that is an encoder alone
        if state is not None and not is_nothing:
            state.warm_up(hidden_states)
        return output

    return run


def _warmed_worker(original: Callable[..., Any]) -> Callable[..., Any]:
    """``compile_or_warm_up_model`` of the CPU worker, which runs vLLM's sampler only where vLLM compiles the model."""
    from vllm.distributed.parallel_state import get_pp_group

    def warm_up(self: Any) -> Any:
        state = state_of(self.model_runner)
        if state is not None and get_pp_group().is_last_rank:
            state.warm_up(self.model_runner._dummy_run(1)[1])
        return original(self)

    return warm_up


def _checking_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """``__init__`` of what checks an engine's requests, by the settings that the engine is made with."""

    def init(self: Any, *args: Any, **given: Any) -> None:
        original(self, *args, **given)
        _INSTALLED.processors[self] = _settings()

    return init


def _checked_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """``process_inputs``, which refuses a request alone, before an engine has it; a server answers 400."""
    from vllm.exceptions import VLLMValidationError

    def process_inputs(self: Any, *args: Any, **given: Any) -> Any:
        settings = _INSTALLED.processors.get(self)  # None for an engine that was there before the adapter
        before = _ADMITTING.set(settings)
        try:
            request = original(self, *args, **given)
        finally:
            _ADMITTING.reset(before)
        params = request.sampling_params
        if params is not None and settings is not None and settings.on_unsupported == "error":
            has_tokens = request.prompt_token_ids is not None
            reason = unsupported(params, self.model_config.get_vocab_size(), settings, has_tokens=has_tokens)
            if reason is not None:
                raise VLLMValidationError(reason)
        return request

    return process_inputs


def _wider_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_validate_spec_decode``, which refuses min_p and logit_bias; with drafts vLLM's own sampler has neither."""

    def validate(self: Any, speculative_config: Any) -> None:
        settings = _ADMITTING.get()
        if settings is None or settings.on_unsupported != "error":
            original(self, speculative_config)

    return validate
