"""What travels with each request to the device: its seed, and its parameters where requests may differ in them.

Continuous batching keeps one int32 a row for each processor that says so. A number of 64 bits takes two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)

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


class Word(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """Half of a number of 64 bits that each request brings along; it leaves the scores as they are.

    Args:
        name: of the keyword of ``add_request``.
        kind: float or int.
        half: 0 for the lower 32 bits, 1 for the upper.
        value: the number of a request, from its state.
    """

    ignored_kwargs = ()

    def __init__(self, name: str, kind: type, half: int, value: Callable[[Any], Any]) -> None:
        """Keep the arguments."""
        self.supported_kwargs = {name: kind}
        self._dtype = torch.float64 if kind is float else torch.int64
        self._half, self._value = half, value

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Write zeros; rows without a request are drawn from nothing, and nobody reads them."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        """Half of the numbers of requests, int32 ``[N]``."""
        numbers = [self._value(each.state) for each in requests_with_new_token]
        return torch.tensor(numbers, dtype=self._dtype).view(torch.int32)[self._half :: 2]

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """The scores, untouched."""
        return scores


class SeededProcessors(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]
    """The processors of a manager: first those that stay, as they are, then the numbers of each request.

    Args:
        logits_processor: as ``_get_logits_processor`` made them.
        per_request_processors: whether ``add_request`` takes temperature, top_k, top_p and min_p too.
        drop_unsupported_processors: here no processor is dropped without a word.

    Attributes:
        fixed: the parameters of all requests that say nothing else.
        salt: makes seeds of requests without one; the runner sets it.

    Raises:
        ValueError: a processor that continuous batching cannot run and the sampler has not, or one twice.
    """

    def __init__(
        self,
        logits_processor: LogitsProcessorList,
        per_request_processors: bool = False,
        drop_unsupported_processors: bool = True,
    ) -> None:
        """Sort the processors."""
        parameters, others = _sorted(logits_processor)
        self.fixed: dict[str, Any] = {**DEFAULTS, **parameters}
        self.salt = 0
        self._varying = list(KINDS) if per_request_processors else []
        words = [Word("seed", int, half, self._seed) for half in (0, 1)]
        for name in self._varying:
            words += [Word(name, KINDS[name], half, self._reader(name)) for half in (0, 1)]
        super().__init__(LogitsProcessorList([*others, *words]), False, drop_unsupported_processors)
        self.tensors_required = len(words)
        SamplingParams(**self.fixed)

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Raise unless the keywords of a request are known and in their ranges.

        Raises:
            TypeError, ValueError: they are not; transformers hands the message on in ``GenerationOutput.error``.
        """
        super().check_kwargs(kwargs)
        SamplingParams(**{**self.fixed, **kwargs})

    def numbers(self, arguments: Tensor, count: int) -> tuple[Tensor, dict[str, Any]]:
        """Seeds and parameters of rows.

        Args:
            arguments: int32 ``[words, >=N]``, as transformers keeps them on the device.
            count: N.

        Returns:
            Seeds int64 ``[N]``, and parameters by name: a number, or float64 or int64 ``[N]``.
        """
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

    def _reader(self, name: str) -> Callable[[Any], Any]:
        return lambda state: state.logit_processor_kwargs.get(name, self.fixed[name])


def _joined(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of 64 bits ``[N]`` from their halves int32 ``[2, N]``, the lower ones first."""
    return words.T.contiguous().view(dtype).flatten()


def _sorted(processors: Sequence[Any]) -> tuple[dict[str, Any], list[Any]]:
    """The parameters that processors of the sampler stand for, and the other processors.

    Raises:
        ValueError: see ``SeededProcessors``.
    """
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
