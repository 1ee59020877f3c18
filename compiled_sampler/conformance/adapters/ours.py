"""This package's sampler, a class for each backend."""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

import compiled_sampler
from compiled_sampler import Logprobs, RowStatus, Sampler, Verification
from compiled_sampler.conformance.adapter import Drafted, Params, Semantics, Target, Verified
from compiled_sampler.conformance.adapters.ours_captured import CapturedStep, holding, mode_of

SEMANTICS = Semantics(padded_vocab=True, largest_logit=2e38, rules=("match", "rejection", "block"))
SLOTS, BUCKETS = 2**15, tuple(2**n for n in range(7))
REPLAYED_VOCAB = 512
"""Of the comparisons of batches, whose small calls are replayed where graphs are captured; calls of laws are large."""

REQUESTS = 256
"""Of a verification that is compiled or captured before it is called; calls of more requests run the same stages."""

MOST_GIVEN = 64
"""Tokens of a vocabulary whose logprobs are always asked for together: what is compiled depends on how many are."""

NAMES = {RowStatus.NAN_SEEN: "nan", RowStatus.POSITIVE_INFINITY: "infinity", RowStatus.ALL_MASKED: "all_masked"}


class Ours:
    """The sampler with the backend that it chooses itself; requests are added for a call and removed behind it.

    Args:
        vocab_size: V.
        device: of the logits.
    """

    semantics: ClassVar[Semantics] = SEMANTICS
    backend: ClassVar[str] = "auto"
    place: ClassVar[str | None] = None
    """Where it draws, wherever the logits are; None: where the adapter is made for."""
    mode: ClassVar[str | None] = None
    """Of every sampling plan; None: the cheapest that covers the batch."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Samplers are made when a dtype is first met."""
        self.vocab_size, self.device = vocab_size, torch.device(self.place or device)
        self._samplers: dict[torch.dtype, Sampler] = {}
        self._prepared: set[tuple[str, int, bool, str]] = set()

    @staticmethod
    def versions() -> dict[str, str]:
        """The version of this package, and the commit where it is a checkout."""
        return {"compiled-sampler": compiled_sampler.__version__, **commit()}

    @classmethod
    def preparations(cls, device: torch.device, names: Sequence[str]) -> list[Callable[[], object]]:
        """What questions of these names compile and was not compiled before, in parts for processes."""
        preparation = importlib.import_module("compiled_sampler.conformance.adapters.ours_preparation")
        missing: list[Callable[[], object]] = preparation.missing(device, names, compiles=cls.backend != "eager")
        return missing

    def _sampler(self, dtype: torch.dtype) -> Sampler:
        """The sampler of a dtype, made once."""
        if dtype not in self._samplers:
            self._samplers[dtype] = self._made(dtype)
        return self._samplers[dtype]

    def _made(self, dtype: torch.dtype) -> Sampler:
        """A sampler; where graphs are captured, small batches are replayed."""
        made = Sampler(self.vocab_size, SLOTS, self.device, dtype, self.backend, buckets=BUCKETS)
        if made.backend == "graph" and self.device.type == "cuda" and self.vocab_size == REPLAYED_VOCAB:
            made.warmup()
        return made

    def _drawn(
        self, logits: Tensor, params: Sequence[Params], seeds: Sequence[int | None], positions: Tensor
    ) -> compiled_sampler.SampleOutputs:
        sampler = self._sampler(logits.dtype)
        with holding(sampler, params, seeds) as slots:
            plan = sampler.plan(slots, self.mode)
            return sampler.sample(plan, logits.to(self.device), positions.to(self.device))

    def sample(
        self, logits: Tensor, params: Sequence[Params], seeds: Sequence[int | None], positions: Tensor
    ) -> Tensor:
        """The token of each row, int64 ``[R]``."""
        return self._drawn(logits, params, seeds, positions).token_ids

    def status(
        self, logits: Tensor, params: Sequence[Params], seeds: Sequence[int | None], positions: Tensor
    ) -> list[set[str]]:
        """What was wrong with each row."""
        return self.sample_with_status(logits, params, seeds, positions)[1]

    def sample_with_status(
        self, logits: Tensor, params: Sequence[Params], seeds: Sequence[int | None], positions: Tensor
    ) -> tuple[Tensor, list[set[str]]]:
        """The token of each row, int64 ``[R]``, and what was wrong with it."""
        drawn = self._drawn(logits, params, seeds, positions)
        flags = drawn.status.tolist()
        return drawn.token_ids, [{name for bit, name in NAMES.items() if each & bit} for each in flags]

    def probs(self, logits: Tensor, params: Sequence[Params]) -> Tensor:
        """The law of each row, float32 ``[R, V]``."""
        sampler = self._sampler(logits.dtype)
        with holding(sampler, params, [0] * len(params)) as slots:
            return sampler.probs(sampler.plan(slots), logits.to(self.device))

    def logprobs(self, logits: Tensor, params: Sequence[Params], token_ids: Tensor) -> Tensor:
        """Of the law that is drawn from, float32 ``[R]``."""
        few = self.vocab_size <= MOST_GIVEN
        ids = list(range(self.vocab_size)) if few else sorted(set(token_ids.tolist()))
        sampler = self._sampler(logits.dtype)
        wanted = Logprobs(of="filtered", token_ids=tuple(ids))
        places = torch.zeros(len(logits), dtype=torch.int64, device=self.device)
        with holding(sampler, params, [0] * len(params)) as slots:
            out = sampler.sample(sampler.plan(slots, self.mode), logits.to(self.device), places, logprobs=wanted)
        given = None if out.logprobs is None else out.logprobs.given
        assert given is not None  # they were asked for
        column = torch.searchsorted(torch.tensor(ids), token_ids.cpu()).to(self.device)
        return given.gather(1, column[:, None])[:, 0]

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
        with holding(sampler, params, seeds) as slots:
            plan, x, places = sampler.plan(slots), logits.to(self.device), positions.to(self.device)
            return sampler.draft(plan, x, places, rule == "match", offset).drawn.token_ids

    def prepare(self, params: Sequence[Params], rule: str, width: int, has_laws: bool) -> None:
        """Compile the stages of such verifications and of draws of their rows.

        A warm-up lists them before the first runs, so processes that need the same share the work; calls meet them one
        by one, and would wait for each other at each.
        """
        if self.backend == "eager" or self.device.type != "cuda":
            return
        work = (rule, width, has_laws, mode_of(self._sampler(torch.float32), params))
        if work in self._prepared:
            return
        self._verifier(rule, width, has_laws, torch.float32, "compiled").warmup(modes=[work[-1]])
        self._prepared.add(work)

    def _verifier(self, rule: str, width: int, has_laws: bool, dtype: torch.dtype, backend: str) -> Sampler:
        """A sampler whose warm-up compiles or captures such verifications of ``REQUESTS`` requests."""
        way = Verification(rule, width, "probabilities" if has_laws else "one_hot")
        return Sampler(self.vocab_size, SLOTS, self.device, dtype, backend, buckets=(REQUESTS,), verifications=(way,))

    def verify(self, drafted: Drafted, rule: str) -> Verified:
        """What is committed of each request."""
        return self._verified(self._sampler(drafted.logits.dtype), drafted, rule)

    def _verified(self, sampler: Sampler, drafted: Drafted, rule: str) -> Verified:
        logits, drafts, positions = drafted.logits, drafted.drafts.to(self.device), drafted.positions.to(self.device)
        laws = None if drafted.probs is None else drafted.probs.to(self.device)
        with holding(sampler, drafted.params, drafted.seeds) as slots:
            plan = sampler.plan(slots, self.mode, drafted.num_drafts)
            out = sampler.verify(plan, logits.to(self.device), drafts, positions, rule, draft_probs=laws)
            return Verified(out.token_ids, out.num_emitted, out.num_accepted)

    @property
    def capture(self) -> Callable[..., CapturedStep] | None:
        """Captures a call in a graph of its own, as an engine does; None where nothing can be captured."""
        return self._captured if self.device.type == "cuda" else None

    def _captured(
        self, logits: Tensor, params: Sequence[Params], seeds: Sequence[int | None], positions: Tensor
    ) -> CapturedStep:
        return CapturedStep(self._sampler(logits.dtype), logits, positions)

    def paths(self) -> dict[str, Target]:
        """Every backend and route of this machine but its own."""
        others = importlib.import_module("compiled_sampler.conformance.adapters.ours_paths").PATHS
        usable = {name: each for name, each in others.items() if each.place == "cpu" or torch.cuda.is_available()}
        own = (self.backend, self.device.type, self.mode)
        return {name: each for name, each in usable.items() if (each.backend, each.place, each.mode) != own}


def commit() -> dict[str, str]:
    """The commit that this package is a checkout of, or ``COMMIT`` of the environment; nothing if it is neither."""
    if "COMMIT" in os.environ:
        return {"commit": os.environ["COMMIT"]}
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return {"commit": subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()}
    except (OSError, subprocess.CalledProcessError):
        return {}


class Eager(Ours):
    """Plain torch."""

    backend = "eager"


class Compiled(Ours):
    """Compiled by Inductor."""

    backend = "compiled"


class Graph(Ours):
    """Compiled and captured in CUDA graphs."""

    backend = "graph"
