"""Samplers that the calls of an engine share, one call at a time, so that nothing is compiled or captured twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from compiled_sampler.edits import EDIT_SPECS
from compiled_sampler.edits.edit_spec import EditSizes
from compiled_sampler.edits.names import reading
from compiled_sampler.engine.sampler import Sampler
from compiled_sampler.params import SamplingParams

MOST_IDLE = 8  # samplers that are kept while nobody uses them


@dataclass(frozen=True)
class SamplerForm:
    """Arguments of ``Sampler``; sizes are powers of two, so that a few samplers serve many calls."""

    vocab_size: int
    max_num_requests: int
    device: torch.device
    logits_dtype: torch.dtype
    backend: str
    history_len: int
    edit_sizes: EditSizes

    @staticmethod
    def for_requests(
        params: list[SamplingParams],
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: str,
        longest: int,
    ) -> SamplerForm:
        """The form that serves requests, the longest of which has ``longest`` positions."""
        history_len = _power(longest) if any(reading(request.edits) for request in params) else 0
        least = EditSizes()
        counts = {name: max(map(count, params)) for spec in EDIT_SPECS for name, count in spec.entries.items()}
        sizes = EditSizes(**{name: max(getattr(least, name), _power(count)) for name, count in counts.items()})
        return SamplerForm(vocab_size, _power(len(params)), device, dtype, backend, history_len, sizes)


class SamplerPool:
    """Keeps idle samplers; one that is in use belongs to one call, so calls of several threads do not meet."""

    def __init__(self) -> None:
        self._idle: list[tuple[SamplerForm, Sampler]] = []
        self._lock = threading.Lock()

    @contextmanager
    def holding(
        self, form: SamplerForm, params: list[SamplingParams], prompts: list[list[int]]
    ) -> Iterator[tuple[Sampler, list[int]]]:
        """A sampler of a form and the slots of requests in it, which are free again behind the block."""
        sampler, slots = self._taken(form), list[int]()
        try:
            for request, prompt in zip(params, prompts, strict=True):
                slots.append(sampler.add_request(request, prompt if set(request.edits) - {"stops"} else ()))
            yield sampler, slots
        finally:
            for slot in slots:
                sampler.remove_request(slot)
            with self._lock:
                self._idle = [*self._idle, (form, sampler)][-MOST_IDLE:]

    def _taken(self, form: SamplerForm) -> Sampler:
        with self._lock:
            for place, (known, sampler) in enumerate(self._idle):
                if known == form:
                    del self._idle[place]
                    return sampler
        return Sampler(**vars(form), default_generator=torch.default_generator)


def _power(count: int) -> int:
    """The first power of two that is not smaller."""
    return 1 << max(0, count - 1).bit_length()
