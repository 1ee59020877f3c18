"""This package's sampler, a class for each backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

import compiled_sampler
from compiled_sampler import RowStatus, Sampler, SamplingParams
from compiled_sampler.conformance.adapter import Drafted, Params, Semantics, Target, Verified

SEMANTICS = Semantics(padded_vocab=True, largest_logit=2e38, rules=("match", "rejection", "block"))
SLOTS, LARGEST_BUCKET = 2**15, 64
NAMES = {RowStatus.NAN_SEEN: "nan", RowStatus.POSITIVE_INFINITY: "infinity", RowStatus.ALL_MASKED: "all_masked"}


class Ours:
    """The sampler with the backend that it chooses itself; requests are added for a call and removed behind it.

    Args:
        vocab_size: V.
        device: of the logits.
    """

    semantics: ClassVar[Semantics] = SEMANTICS
    backend: ClassVar[str] = "auto"

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Samplers are made when a dtype is first met."""
        self.vocab_size, self.device = vocab_size, device
        self._samplers: dict[torch.dtype, Sampler] = {}

    @staticmethod
    def versions() -> dict[str, str]:
        """The version of this package."""
        return {"compiled-sampler": compiled_sampler.__version__}

    def _sampler(self, dtype: torch.dtype) -> Sampler:
        """The sampler of a dtype; where graphs are captured, small batches are replayed."""
        if dtype not in self._samplers:
            buckets = [2**n for n in range(LARGEST_BUCKET.bit_length())]
            made = Sampler(self.vocab_size, SLOTS, self.device, dtype, self.backend, buckets=buckets)
            if made.backend == "graph" and self.device.type == "cuda" and self.vocab_size <= 1024:
                made.warmup()
            self._samplers[dtype] = made
        return self._samplers[dtype]

    @contextmanager
    def _requests(self, sampler: Sampler, params: Sequence[Params], seeds: Sequence[int | None]) -> Iterator[list[int]]:
        """A slot for each row; rows of one seed and one set of parameters share it."""
        slots: dict[object, int] = {}
        chosen = []
        for row, (each, seed) in enumerate(zip(params, seeds, strict=True)):
            key = (each, seed) if seed is not None else row
            if key not in slots:
                asked = SamplingParams(each.temperature, each.top_k, each.top_p, each.min_p, seed)
                slots[key] = sampler.add_request(asked)
            chosen.append(slots[key])
        try:
            yield chosen
        finally:
            for slot in slots.values():
                sampler.remove_request(slot)

    def _drawn(
        self, logits: Tensor, params: Sequence[Params], seeds: Sequence[int | None], positions: Tensor
    ) -> compiled_sampler.SampleOutputs:
        sampler = self._sampler(logits.dtype)
        with self._requests(sampler, params, seeds) as slots:
            return sampler.sample(sampler.plan(slots), logits, positions.to(self.device))

    def sample(
        self, logits: Tensor, params: Sequence[Params], seeds: Sequence[int | None], positions: Tensor
    ) -> Tensor:
        """The token of each row, int64 ``[R]``."""
        return self._drawn(logits, params, seeds, positions).token_ids

    def status(
        self, logits: Tensor, params: Sequence[Params], seeds: Sequence[int | None], positions: Tensor
    ) -> list[set[str]]:
        """What was wrong with each row."""
        flags = self._drawn(logits, params, seeds, positions).status.tolist()
        return [{name for bit, name in NAMES.items() if each & bit} for each in flags]

    def probs(self, logits: Tensor, params: Sequence[Params]) -> Tensor:
        """The law of each row, float32 ``[R, V]``."""
        sampler = self._sampler(logits.dtype)
        with self._requests(sampler, params, [0] * len(params)) as slots:
            return sampler.probs(sampler.plan(slots), logits)

    def draft(
        self,
        logits: Tensor,
        params: Sequence[Params],
        seeds: Sequence[int | None],
        positions: Tensor,
        offset: int,
        rule: str,
    ) -> Tensor:
        """One draft of each request, coupled to the target's noise under match; int64 ``[N]``."""
        sampler = self._sampler(logits.dtype)
        with self._requests(sampler, params, seeds) as slots:
            places = positions.to(self.device)
            return sampler.draft(sampler.plan(slots), logits, places, rule == "match", offset).drawn.token_ids

    def verify(self, drafted: Drafted, rule: str) -> Verified:
        """What is committed of each request."""
        sampler = self._sampler(drafted.logits.dtype)
        with self._requests(sampler, drafted.params, drafted.seeds) as slots:
            plan = sampler.plan(slots, num_drafts=drafted.num_drafts)
            places = drafted.positions.to(self.device)
            out = sampler.verify(plan, drafted.logits, drafted.drafts, places, rule, draft_probs=drafted.probs)
            return Verified(out.token_ids, out.num_emitted, out.num_accepted)

    def paths(self) -> dict[str, Target]:
        """The other backends of this device, and eager torch on the CPU."""
        others: dict[str, type[Ours]] = {"eager": Eager, "compiled": Compiled, "eager on the CPU": OnCpu}
        return {name: each for name, each in others.items() if not isinstance(self, each)}


class Eager(Ours):
    """Plain torch."""

    backend = "eager"


class Compiled(Ours):
    """Compiled by Inductor."""

    backend = "compiled"


class Graph(Ours):
    """Compiled and captured in CUDA graphs."""

    backend = "graph"


class OnCpu(Eager):
    """Plain torch on the CPU, wherever the logits are."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Take the vocabulary and leave the device."""
        super().__init__(vocab_size, torch.device("cpu"))

    def sample(
        self, logits: Tensor, params: Sequence[Params], seeds: Sequence[int | None], positions: Tensor
    ) -> Tensor:
        """The token of each row, int64 ``[R]``, on the CPU."""
        return super().sample(logits.cpu(), params, seeds, positions)
