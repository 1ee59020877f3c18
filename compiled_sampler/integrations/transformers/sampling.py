"""The loop of ``GenerationMixin._sample`` with tokens of a sampler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.utils import ALL_CACHE_NAMES

from compiled_sampler.batch import VerifyOutputs
from compiled_sampler.engine.sampler import Sampler
from compiled_sampler.integrations.sampler_pool import SamplerForm, SamplerPool
from compiled_sampler.integrations.transformers import requests

_POOL = SamplerPool()
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def sample(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    *,
    seeds: Sequence[int | None] | None = None,
    sampler_backend: str = "auto",
    vocab_size: int | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode as ``generate`` does, with tokens that are a function of logits, parameters, seed and position.

    For ``model.generate(..., custom_generate=sample, seeds=[...])``, which prepares all but the last three arguments.
    It hands no ``streamer`` and no ``synced_gpus`` on; bind them, ``functools.partial(sample, streamer=streamer)``.

    Args:
        model: a decoder with ``GenerationMixin``.
        input_ids: int64 ``[B, T]``, with padding where ``attention_mask`` says; the last token is none. Ids that no
            logit has, such as placeholders of images, count for nothing.
        logits_processor: those whose work the sampler does are replaced by it; the others run on float32 logits before.
        stopping_criteria: end sequences, as they are.
        generation_config: see ``SamplingParams.from_generation_config``; eos and suppressed ids that no logit has are
            left out.
        synced_gpus: whether to go on until other processes have ended.
        streamer: takes tokens as they come.
        seeds: one for each sequence, None for one that is drawn; without seeds all are, from
            ``torch.default_generator``, so that ``torch.manual_seed`` repeats them.
        sampler_backend: of ``Sampler``.
        vocab_size: only ids below it are drawn; None for all that the model has logits of.
        model_kwargs: of the model.

    Returns:
        int64 ``[B, T]``, or with ``return_dict_in_generate`` a ``GenerateDecoderOnlyOutput``; its ``scores`` are the
        logarithms of the law that each token was drawn from.

    Raises:
        RuntimeError: a row whose tokens are all masked.
        TypeError, ValueError: wrong seeds; a field of the config that the sampler does not have.
    """
    requests.check_loop(model, generation_config, drafts_are_known=False)
    record = Record(generation_config)
    text = Text(input_ids, stopping_criteria, generation_config._pad_token_tensor, streamer)
    batch = Batch.of_call(generation_config, logits_processor, seeds, sampler_backend, input_ids, model_kwargs)
    forward = forward_of(model, generation_config, model_kwargs)
    is_first = not generation_config.is_assistant
    outputs = model._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=is_first)
    with batch.steps(outputs.logits, vocab_size) as steps, model._optimize_model_for_decode():
        while model._has_unfinished_sequences(text.is_finished, synced_gpus, device=input_ids.device):
            if outputs is None:
                count = 1 if model_kwargs["use_cache"] else None
                inputs = model.prepare_inputs_for_generation(text.token_ids, next_sequence_length=count, **model_kwargs)
                outputs = forward(**inputs, return_dict=True)
            model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
            if not text.is_finished:  # else another process still needs the forward pass
                draw_column(steps, text, record, outputs)
            outputs = None
    text.end()
    return record.result(text.token_ids, model_kwargs)


def draw_column(steps: Steps, text: Text, record: Record, outputs: Any) -> None:
    """Draw one token for every sequence from the last logits of a forward pass."""
    raw = outputs.logits[:, -1]
    record.add(logits=raw, attentions=outputs.get("attentions"), hidden_states=outputs.get("hidden_states"))
    logits = steps.prepared(text.token_ids, raw)
    if record.wants_scores:
        record.add(scores=steps.log_law(logits))
    text.append(steps.drawn(logits), record.scores)


def forward_of(model: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The forward pass of a decode step, compiled where ``generate`` would compile it."""
    if model._valid_auto_compile_criteria(model_kwargs, generation_config):
        compiled: Callable[..., Any] = model.get_compiled_call(generation_config.compile_config)
        return compiled
    called: Callable[..., Any] = model.__call__
    return called


@dataclass(frozen=True)
class Batch:
    """The requests of a call of ``generate``."""

    params: list[Any]
    prompts: list[list[int]]  # without padding
    positions: Tensor  # int64 [B], of the first token of each
    processors: LogitsProcessorList  # those that run before the sampler
    backend: str
    longest: int  # positions of the longest sequence

    @staticmethod
    def of_call(
        generation_config: Any,
        processors: LogitsProcessorList,
        seeds: Sequence[int | None] | None,
        backend: str,
        input_ids: Tensor,
        model_kwargs: dict[str, Any],
    ) -> Batch:
        """The requests of a call, checked; arguments as ``sample``."""
        positions = requests.first_positions(input_ids, model_kwargs, generation_config)
        starts = positions.tolist()
        params, others = requests.parameters(generation_config, processors, seeds, starts)
        prompts = requests.prompt_tokens(input_ids, model_kwargs)
        requests.check_prompts(params, prompts, starts)
        longest = max(starts) + generation_config.max_length - input_ids.shape[1]
        return Batch(params, prompts, positions, others, backend, longest)

    @contextmanager
    def steps(self, logits: Tensor, vocab_size: int | None = None) -> Iterator[Steps]:
        """A sampler of the dtype of the model's first logits that holds the requests until the block ends."""
        most = logits.shape[-1] if vocab_size is None else min(vocab_size, logits.shape[-1])
        params = [request.for_vocab(most) for request in self.params]
        dtype = torch.float32 if self.processors or logits.dtype not in _DTYPES else logits.dtype
        form = SamplerForm.for_requests(params, most, dtype, self.positions.device, self.backend, self.longest)
        with _POOL.holding(form, params, self.prompts) as (sampler, slots):
            yield Steps(sampler, slots, self.positions, self.processors)


class Steps:
    """Draws the tokens of a call of ``generate``, step after step."""

    def __init__(self, sampler: Sampler, slots: list[int], positions: Tensor, processors: LogitsProcessorList) -> None:
        self.sampler, self.slots, self._processors = sampler, slots, processors
        self.positions = positions  # int64 ``[B]``, of the next token of each

    def prepared(self, token_ids: Tensor, logits: Tensor) -> Tensor:
        """Logits ``[B, V]`` of the sampler's dtype and device, behind the processors that are not the sampler's."""
        row = logits.to(self.sampler.device, self.sampler.logits_dtype, copy=bool(self._processors))
        return self._processors(token_ids, row) if self._processors else row

    def log_law(self, logits: Tensor) -> Tensor:
        """Logarithms of the law that the next tokens are drawn from, float32 ``[B, V]``."""
        return self.sampler.probs(self.sampler.plan(self.slots), logits, positions=self.positions).log()

    def drawn(self, logits: Tensor) -> Tensor:
        """The next token of every sequence, int64 ``[B]``, -1 where all are masked; positions move on by one."""
        token_ids = self.sampler.sample(self.sampler.plan(self.slots), logits, positions=self.positions).token_ids
        self.positions = self.positions + 1
        return token_ids

    @property
    def seeds(self) -> list[int | None]:
        """The seed of each sequence, also where the sampler drew it."""
        return [self.sampler.request(slot).seed for slot in self.slots]

    def prepared_columns(self, token_ids: Tensor, logits: Tensor) -> Tensor:
        """``prepared`` for the logits of drafts, ``[B, K+1, V]``; ``token_ids`` are the text with the drafts behind."""
        if not self._processors:
            return self.prepared(token_ids, logits)
        first = token_ids.shape[1] - logits.shape[1] + 1
        columns = [self.prepared(token_ids[:, : first + k], logits[:, k]) for k in range(logits.shape[1])]
        return torch.stack(columns, 1)

    def verified(self, logits: Tensor, drafts: list[list[int]], wants_laws: bool) -> tuple[VerifyOutputs, list[Tensor]]:
        """What the rule ``match`` emits, and if wanted the logarithms of the law of each column, float32 ``[B, V]``."""
        counts, width = [*map(len, drafts)], logits.shape[1] - 1
        plan = self.sampler.plan(self.slots, num_drafts=counts)
        rows = [row * (width + 1) + k for row, count in enumerate(counts) for k in range(count + 1)]
        flat = logits.flatten(0, 1)
        if len(rows) < len(flat):
            flat = flat[torch.tensor(rows, device=flat.device)]
        tokens = torch.tensor([*chain.from_iterable(drafts)], dtype=torch.int64, device=flat.device)
        # The caller moves positions on, because not all of it may be taken.
        verified = self.sampler.verify(plan, flat, tokens, positions=self.positions)
        laws = self.sampler.probs(plan, flat, positions=self.positions).log() if wants_laws else None
        return verified, [] if laws is None else _columns(laws, counts, plan.first_rows)


def _columns(rows: Tensor, counts: list[int], first_rows: Sequence[int]) -> list[Tensor]:
    """Rows of sequences one after the other as columns ``[B, V]``; the last row repeats where a sequence has fewer."""
    pairs = list(zip(first_rows, counts, strict=True))
    return [rows[[first + min(k, count) for first, count in pairs]] for k in range(max(counts) + 1)]


class Text:
    """Token ids that grow by one column at a time, until the stopping criteria end every sequence."""

    def __init__(
        self, input_ids: Tensor, stopping_criteria: StoppingCriteriaList, pad_token_id: Tensor | None, streamer: Any
    ) -> None:
        self.token_ids, self._criteria, self._streamer = input_ids, stopping_criteria, streamer
        self.unfinished = torch.ones(len(input_ids), dtype=torch.int64, device=input_ids.device)  # 1: goes on
        self.is_finished = False
        # Sequences that ended get padding; without an eos token they are drawn on.
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self._pad = input_ids.new_zeros(()) if pad_token_id is None else pad_token_id.to(input_ids.device)

    def append(self, token_ids: Tensor, scores: Any) -> None:
        """Add a token to every sequence, in the order of transformers: padding, the text, criteria, the streamer."""
        if self.pads:
            token_ids = torch.where(self.unfinished.bool(), token_ids, self._pad)
        lowest = token_ids.amin()
        self.token_ids = torch.cat([self.token_ids, token_ids[:, None]], -1)
        self.unfinished = self.unfinished & ~self._criteria(self.token_ids, scores)
        first, alive = torch.stack([lowest, self.unfinished.amax()]).tolist()  # one wait for both
        if first < 0:
            raise RuntimeError("each row of logits must have a token to draw, got one whose tokens are all masked")
        self.is_finished = alive == 0
        if self._streamer is not None:
            self._streamer.put(token_ids.cpu())

    def alive(self) -> list[bool]:
        """Whether each sequence still needs tokens: those that ended get padding if there is an eos token."""
        return [bool(goes_on) for goes_on in self.unfinished.tolist()] if self.pads else [True] * len(self.unfinished)

    def end(self) -> None:
        """Tell the streamer that nothing follows."""
        if self._streamer is not None:
            self._streamer.end()


class Record:
    """What ``generate`` returns beside the sequences, a tuple with an entry for each token."""

    def __init__(self, generation_config: Any) -> None:
        self._returns_dict = bool(generation_config.return_dict_in_generate)
        names = {"scores": "output_scores", "logits": "output_logits"}
        names |= {"attentions": "output_attentions", "hidden_states": "output_hidden_states"}
        wanted = {name for name, field in names.items() if self._returns_dict and getattr(generation_config, field)}
        self._parts: dict[str, tuple[Any, ...] | None] = {name: () if name in wanted else None for name in names}

    @property
    def scores(self) -> tuple[Any, ...] | None:
        """Log-probabilities float32 ``[B, V]`` of the law of each token, -inf for what a filter drops, if wanted."""
        return self._parts["scores"]

    @property
    def wants_scores(self) -> bool:
        """Whether scores are to be added."""
        return self._parts["scores"] is not None

    def add(self, **parts: Any) -> None:
        """Add the entries of one token, of which those that are wanted are kept."""
        for name, part in parts.items():
            kept = self._parts[name]
            if kept is not None:
                self._parts[name] = (*kept, part.to(torch.float32, copy=True) if name == "logits" else part)

    def result(self, token_ids: Tensor, model_kwargs: dict[str, Any]) -> Any:
        """What ``generate`` returns: int64 ``[B, T]``, or a ``GenerateDecoderOnlyOutput`` with parts and cache."""
        if not self._returns_dict:
            return token_ids
        fields = {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)}
        cache = {"cache" if "cache" in fields else "past_key_values": cache_of(model_kwargs)}
        return GenerateDecoderOnlyOutput(sequences=token_ids, **self._parts, **cache)


def cache_of(holder: Any) -> Any:
    """The cache in keyword arguments or outputs of a model, under whichever name it has there; None without one."""
    return next((holder[name] for name in ALL_CACHE_NAMES if holder.get(name) is not None), None)
