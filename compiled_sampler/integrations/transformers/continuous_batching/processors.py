"""What travels with each request to the device: its seed, and its parameters where requests may differ in them.

Continuous batching keeps as many int32 a row as the list of processors asks for. A number of 64 bits takes two of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList

from compiled_sampler.integrations.request_seeds import seed_of
from compiled_sampler.params import SamplingParams
from compiled_sampler.scalars import as_int64

_OWN: dict[str, Callable[[Any], dict[str, Any]]] = {
    "TemperatureLogitsWarper": lambda each: {"temperature": each.temperature},
    "TopKLogitsWarper": lambda each: {"top_k": each.top_k},
    "TopPLogitsWarper": lambda each: {"top_p": each.top_p},
    "MinPLogitsWarper": lambda each: {"min_p": each.min_p},
    "LogitNormalization": lambda each: {},
}
"""Processors whose work the sampler does, with the parameters that they stand for."""

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
        states = [each.state for each in requests_in_batch if each.has_new_token]
        place = arg_storage.data_ptr()
        last = self._written.get(place, [])
        if len(states) == len(last) and all(map(operator.is_, states, last)):
            return arg_storage
        self._written.pop(place, None)  # until all of it is written
        columns = [np.array([self._seed(state) for state in states], np.int64)]
        for name in self._varying:
            given = [state.logit_processor_kwargs.get(name, self.fixed[name]) for state in states]
            columns.append(np.array(given, np.float64 if KINDS[name] is float else np.int64))
        halves = np.stack([each.view(np.int64) for each in columns]).view(np.int32)  # [numbers, 2 N], lower half first
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
    parameters, others, seen = dict[str, Any](), list[Any](), set[str]()
    for each in processors:
        name = type(each).__name__
        is_own = name in _OWN and type(each) is getattr(logits_process, name)
        if not is_own and getattr(each, "supports_continuous_batching", None) is False:
            raise ValueError(
                f"a generation config must have no {name} in continuous batching, which cannot run it; leave its field "
                "out, or call generate(custom_generate=sample)"
            )
        if not is_own:
            others.append(each)
            continue
        if name in seen:
            raise ValueError(f"logits processors must have one {name}, got two; set its field alone")
        seen.add(name)
        parameters |= _OWN[name](each)
    return parameters, others
