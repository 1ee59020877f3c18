"""Continuous batching of transformers (``generate_batch``, ``ContinuousBatchingManager``) with tokens of this library.

::

    outputs = generate_batch(model, prompts, seeds=[1, 2, 3], max_new_tokens=20)

    with installed(), model.continuous_batching_context_manager() as manager:
        manager.add_request(prompt, seed=1)

The draw is ``compiled_sampler.functional.sample``: a request's seed travels with it as numbers of its row, so there are
no slots, and a CUDA graph of transformers that holds the forward pass holds the draw too.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.utils import WorkloadHints

from compiled_sampler.functional import probs, sample
from compiled_sampler.functional.functions import run_of
from compiled_sampler.integrations.engine_interface import seed_of
from compiled_sampler.integrations.transformers.requests import REPLACED, check_version, sorted_processors
from compiled_sampler.params import SamplingParams
from compiled_sampler.scalars import as_int64

__all__ = ["generate_batch", "install", "installed", "uninstall"]


_LAW = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "LogitNormalization")
"""Processors whose work the sampler does here."""

KINDS: dict[str, type] = {"temperature": float, "top_k": int, "top_p": float, "min_p": float}
DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


class SeededProcessors(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]
    """The processors of a manager: first those that stay, as they are, then the numbers of each request."""

    def __init__(
        self,
        logits_processor: LogitsProcessorList,
        per_request_processors: bool = False,
        drop_unsupported_processors: bool = True,  # here no processor is dropped without a word
    ) -> None:
        parameters, others = _sorted(logits_processor)
        self.fixed: dict[str, Any] = {**DEFAULTS, **parameters}  # of all requests that say nothing else
        self.salt = 0  # makes seeds of requests without one; the runner sets it
        self._written: dict[int, list[Any]] = {}
        self._varying = list(KINDS) if per_request_processors else []
        super().__init__(LogitsProcessorList(others), False, drop_unsupported_processors)
        self.supported_keys |= {"seed": int, **{name: KINDS[name] for name in self._varying}}
        self.tensors_required = 2 * (1 + len(self._varying))
        self.do_processing = True  # else transformers leaves a tenth of the memory beside its cache instead of a fifth
        SamplingParams(**self.fixed)

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Raise unless the keywords of a request are known and in their ranges."""
        # transformers hands the message of an error on in ``GenerationOutput.error``.
        super().check_kwargs(kwargs)
        SamplingParams(**{**self.fixed, **kwargs})

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Write zeros; rows without a request are drawn from nothing, and nobody reads them."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Tensor) -> Tensor:
        """The storage, int32 ``[words, >=N]``, with the numbers of the requests that draw a token in it."""
        # One copy, and only when other requests draw than did last time: without asynchronous batching the storage is
        # on the device, and each copy waits for it. Requests are compared by identity: when transformers clears the
        # storage, it drops all requests.
        states = [request.state for request in requests_in_batch if request.has_new_token]
        place = arg_storage.data_ptr()
        last = self._written.get(place, [])
        if len(states) == len(last) and all(map(operator.is_, states, last)):
            return arg_storage
        self._written.pop(place, None)  # until all of it is written
        columns = [np.array([self._seed(state) for state in states], np.int64)]
        for name in self._varying:
            given = [state.logit_processor_kwargs.get(name, self.fixed[name]) for state in states]
            columns.append(np.array(given, np.float64 if KINDS[name] is float else np.int64))
        halves = np.stack([column.view(np.int64) for column in columns]).view(
            np.int32
        )  # ``[numbers, 2 N]``, lower first
        words = halves.reshape(len(columns), len(states), 2).transpose(0, 2, 1).reshape(2 * len(columns), len(states))
        arg_storage[: len(words), : len(states)].copy_(torch.from_numpy(np.ascontiguousarray(words)))
        self._written[place] = states
        return arg_storage

    def numbers(self, arguments: Tensor, count: int) -> tuple[Tensor, dict[str, Any]]:
        """Seeds int64 ``[N]``, and parameters by name: a number, or float64 or int64 ``[N]``."""
        seeds = _joined(arguments[:2, :count], torch.int64)
        parameters = dict(self.fixed)
        for place, name in enumerate(self._varying, start=1):
            dtype = torch.float64 if KINDS[name] is float else torch.int64
            parameters[name] = _joined(arguments[2 * place : 2 * place + 2, :count], dtype)
        return seeds, parameters

    def _seed(self, state: Any) -> int:
        """The seed of a request as an int64; without one, a hash of its name and the salt."""
        seed: int | None = state.logit_processor_kwargs.get("seed")
        if seed is None:
            seed = seed_of(state.request_id, self.salt)
        return as_int64(seed)


def _joined(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of 64 bits ``[N]`` from their halves int32 ``[2, N]``, the lower ones first."""
    return words.T.contiguous().view(dtype).flatten()


def _sorted(processors: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
    """The parameters that processors of the sampler stand for, and the other processors."""
    parameters, others = sorted_processors(processors, _LAW)
    for processor in others:
        if getattr(processor, "supports_continuous_batching", None) is False:
            raise ValueError(
                f"a generation config must have no {type(processor).__name__} in continuous batching, which cannot run "
                "it; leave its field out, or call generate(custom_generate=sample)"
            )
    return parameters, others


_ROWS_OUT_OF_RANGE = "each row of logits must have a token to draw, got one whose tokens are all masked"


class SeededRunner(ModelRunner):  # type: ignore[misc]
    """Draws the tokens of a forward pass from logits, parameters, seeds and positions alone."""

    def __init__(self, logit_processor: Any, cb_config: Any, *, backend: str, **others: Any) -> None:
        if not isinstance(logit_processor, SeededProcessors):
            raise RuntimeError("the manager must be made after install(), got one from before; make it anew")
        for name in ("varlen_compile_config", "decode_compile_config"):
            if getattr(cb_config, name, None) is not None:
                raise ValueError(f"{name} must be None, got a CompileConfig; the sampler compiles its stages itself")
        super().__init__(logit_processor=logit_processor, cb_config=cb_config, **others)
        self._backend, self._batch_data = backend, dict[str, Any]()
        # transformers has seeded the generator, alike on every rank.
        logit_processor.salt = int(torch.randint(2**62, ()))

    def _forward_process_and_sample(self, model: Any, batch_data: dict[str, Any], *outputs: Tensor) -> None:
        """As in ``ModelRunner``; ``_sample`` reads the batch."""
        self._batch_data = batch_data
        super()._forward_process_and_sample(model, batch_data, *outputs)

    def _capture_graph(self, forward_fn: Callable[..., Any], compute_stream: Any, *args: Any) -> None:
        """As in ``ModelRunner``; but until the draw is compiled, a step runs and is not captured."""
        stages = run_of(self._backend)
        before = getattr(stages, "num_uncompiled_calls", 0)
        with torch.cuda.stream(compute_stream):
            forward_fn(*args)
        if getattr(stages, "num_uncompiled_calls", 0) == before:
            super()._capture_graph(forward_fn, compute_stream, *args)

    def _sample(self, scores: Tensor, output_ids: Tensor) -> None:
        """Write the tokens of logits float32 ``[1, N, V]``, and the bits of their logprobs where they are wanted."""
        # A graph of transformers captures this with the forward pass: on CUDA it waits for nothing, and each replay
        # reads its tensors.
        logits, data = scores[0], self._batch_data
        seeds, parameters = self.logit_processor.numbers(data["logits_processor_args"], len(logits))
        if not self.do_sample:
            parameters["temperature"] = 0.0
        positions = drawn_positions(data)
        token_ids = sample(logits, seeds=seeds, positions=positions, backend=self._backend, **parameters).token_ids
        # On CUDA the embedding of -1 ends the process.
        if token_ids.device.type == "cpu" and bool((token_ids < 0).any()):
            raise RuntimeError(_ROWS_OUT_OF_RANGE)
        output_ids[0, : len(logits)].copy_(token_ids)
        if self.return_logprobs:
            law = probs(logits, backend=self._backend, **parameters)
            is_token = token_ids >= 0  # rows that pad a graph's batch may have none
            of_tokens = law.gather(1, token_ids.clamp(min=0)[:, None])[:, 0].log()
            logprobs = torch.where(is_token, of_tokens, float("-inf"))
            output_ids[1, : len(logits)].copy_(logprobs.view(torch.int32))


def drawn_positions(batch_data: dict[str, Any]) -> Tensor:
    """The position of the token that each row of logits draws, int64 ``[N]``."""
    # Here alone positions of input tokens become those of drawn ones.
    positions: Tensor = batch_data["position_ids"][0, batch_data["logits_indices"]]
    return positions.to(torch.int64) + 1


_NAMES = ("ModelRunner", "ContinuousBatchingLogitsProcessorList")
_THEIRS: dict[str, Any] = {name: getattr(continuous_api, name, None) for name in _NAMES}


def install(backend: str = "auto") -> None:
    """Have every manager that is made from now on draw its tokens here; calling it twice is no harm.

    ``add_request`` and ``add_requests`` then take ``seed``, and with ``per_request_processors`` of the config also
    ``temperature``, ``top_k``, ``top_p`` and ``min_p``.

    Args:
        backend: of ``compiled_sampler.functional.sample``.

    Raises:
        ImportError: a version of transformers that lacks what is replaced.
        ValueError: an unknown backend.
    """
    if backend not in ("auto", "compiled", "eager"):
        raise ValueError(f"backend must be auto, compiled or eager, got {backend!r}")
    check_version(REPLACED)
    continuous_api.ModelRunner = functools.partial(SeededRunner, backend=backend)
    continuous_api.ContinuousBatchingLogitsProcessorList = SeededProcessors


def uninstall() -> None:
    """Put the classes of transformers back; managers that were made before stay what they are."""
    for name, theirs in _THEIRS.items():
        setattr(continuous_api, name, theirs)


@contextmanager
def installed(backend: str = "auto") -> Iterator[None]:
    """``install`` for a block. A manager that is to draw here is made and started inside.

    What was there before stands there again behind the block, also an ``install`` with another backend.
    """
    before = {name: getattr(continuous_api, name) for name in _NAMES}
    install(backend)
    try:
        yield
    finally:
        for name, theirs in before.items():
            setattr(continuous_api, name, theirs)


_WAIT = 1.0  # seconds between two looks at whether the thread that decodes still runs


def generate_batch(
    model: Any,
    inputs: Sequence[Sequence[int]],
    seeds: Sequence[int],
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    max_new_tokens: int | None = None,
    backend: str = "auto",
) -> list[Any]:
    """Decode prompts with continuous batching, each to the tokens that its logits, parameters and seed give.

    Args:
        model: a decoder with ``ContinuousMixin``.
        inputs: token ids of each prompt.
        seeds: one for each, in [-2**63, 2**64).
        generation_config: of transformers; without one the model's. Its ``num_return_sequences`` must be 1.
        continuous_batching_config: of transformers.
        max_new_tokens: of every request; without it the config's.
        backend: of ``compiled_sampler.functional.sample``.

    Returns:
        A ``GenerationOutput`` for each prompt, in their order.

    Raises:
        RuntimeError: a request failed.
        ValueError: a wrong number of seeds, several sequences for a prompt, or a field of the config that continuous
            batching cannot honour, also where transformers would pass over it.
    """
    config = generation_config or model.generation_config
    _check(config, len(inputs), len(seeds))
    if not inputs:
        return []
    most = config.max_new_tokens if max_new_tokens is None else max_new_tokens
    hints = WorkloadHints(max(map(len, inputs)), most or 0, len(inputs))
    given = {"continuous_batching_config": continuous_batching_config, "workload_hints": hints}
    with installed(backend), model.continuous_batching_context_manager(config, timeout=5, **given) as manager:
        names = [
            manager.add_request(list(prompt), max_new_tokens=most, eos_token_id=_eos(model, config), seed=seed)
            for prompt, seed in zip(inputs, seeds, strict=True)
        ]
        return _collected(manager, names)


def _check(config: Any, num_prompts: int, num_seeds: int) -> None:
    if num_seeds != num_prompts:
        raise ValueError(f"seeds must be one for each of the {num_prompts} prompts, got {num_seeds}")
    if (config.num_return_sequences or 1) != 1:
        raise ValueError(
            f"num_return_sequences must be 1, got {config.num_return_sequences}; give a prompt once for each seed"
        )
    edits = set(SamplingParams.from_generation_config(config, prompt_len=1).edits) - {"stops"}
    if edits:
        raise ValueError(
            f"the generation config must ask for no edits in continuous batching, got {', '.join(sorted(edits))}; "
            "leave its fields out, or call generate(custom_generate=sample)"
        )


def _eos(model: Any, config: Any) -> Any:
    """The eos ids that ``add_requests`` of transformers would take: of the config, of the model, or none."""
    eos = config.eos_token_id
    eos = model.config.eos_token_id if eos is None else eos
    return -1 if eos is None else eos


def _collected(manager: Any, names: list[str]) -> list[Any]:
    """The outputs of requests, in the order of their names."""
    outputs: dict[str, Any] = {}
    while len(outputs) < len(names):
        output = manager.get_result(timeout=_WAIT)
        if output is None and not manager.is_running():
            raise RuntimeError(
                f"continuous batching ended with {len(outputs)} of {len(names)} requests done; see its log"
            )
        if output is not None and output.error is not None:
            raise RuntimeError(f"request {output.request_id} failed: {output.error}")
        if output is not None and output.is_finished():
            outputs[output.request_id] = output
    return [outputs[name] for name in names]
