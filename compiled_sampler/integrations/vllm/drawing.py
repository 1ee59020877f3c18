"""The draw of a V1 model runner by a sampler that holds its requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from compiled_sampler.batch import SampleOutputs, VerifyOutputs
from compiled_sampler.engine.sampler import Sampler
from compiled_sampler.integrations.vllm import requests
from compiled_sampler.integrations.vllm.engine_checks import LAWS, unsupported_engine
from compiled_sampler.integrations.vllm.results import logprob_columns, with_endings
from compiled_sampler.integrations.vllm.settings import Settings
from compiled_sampler.integrations.vllm.slots import RequestSlots
from compiled_sampler.logprobs import Logprobs
from compiled_sampler.modes import Verification


def drawn_positions(input_batch: Any) -> np.ndarray:
    """The position of the first token that each request may draw, int64 ``[N]``: the tokens before it."""
    # Here alone positions of vLLM become those of the sampler. Its V1 runner counts the tokens of a request without
    # drafts, also before the chunks of its prompt are read, so the next one is drawn at that count.
    return np.asarray(input_batch.num_tokens_no_spec[: input_batch.num_reqs], dtype=np.int64)


def verifications(runner: Any, rule: str) -> tuple[Verification, ...]:
    """The ways in which drafts of an engine are verified; none without drafts."""
    width = runner.num_spec_tokens
    if not width:
        return ()
    found = [Verification("match", width)]
    if rule != "match" and runner.vllm_config.speculative_config.draft_sample_method == "probabilistic":
        found.append(Verification(rule, width, "probabilities"))
    return tuple(found)


class RunnerSampler:
    """Draws for one model runner."""

    def __init__(self, runner: Any, logits: Tensor, settings: Settings) -> None:
        self._runner, self._rule = runner, settings.rule
        drafts = runner.num_spec_tokens
        with torch.inference_mode(False):
            self._sampler = Sampler(
                runner.input_batch.vocab_size,
                runner.max_num_reqs,
                logits.device,
                logits.dtype,
                settings.backend,
                verifications=verifications(runner, settings.rule),
                history_len=runner.max_model_len + drafts + 1,
                edit_sizes=requests.SIZES,
            )
            self._slots = RequestSlots(self._sampler, int(runner.model_config.seed))
        self._law = LAWS[runner.model_config.logprobs_mode]

    def draw(self, logits: Tensor, drafts: Any, refused: Mapping[str, str]) -> SamplerOutput:
        """The tokens of a batch from a row of logits a request, or with drafts the rows of request 0, then of 1, ..."""
        batch = self._runner.input_batch
        states = [self._runner.requests[each] for each in batch.req_ids]
        slots = self._slots.of_batch(states, refused)
        positions = torch.from_numpy(drawn_positions(batch)).to(logits.device)
        wanted = self._logprobs(batch.sampling_metadata.max_num_logprobs)
        made = self._drawn(slots, logits, positions, wanted, drafts)
        tokens = made.token_ids if made.token_ids.dim() == 2 else made.token_ids[:, None]
        endings = self._slots.endings[torch.tensor(slots, device=logits.device)]
        for row, slot in enumerate(slots):
            if slot < 0:
                endings[row] = requests.ending_token(states[row].sampling_params)
        tokens = with_endings(tokens, endings)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=self._logprob_tensors(tokens, made))

    def warm_up(self) -> None:
        """Compile and capture what batches without edits and logprobs run."""
        self._sampler.warmup()

    def forget(self) -> None:
        """Hold no request, behind a batch that vLLM's own sampler drew."""
        self._slots.forget()

    def _drawn(
        self, slots: list[int], logits: Tensor, positions: Tensor, wanted: Logprobs | None, drafts: Any
    ) -> SampleOutputs | VerifyOutputs:
        """Draw, or verify drafts: by ``match`` where nobody knows their law, as it is right for all drafts."""
        if drafts is None:
            return self._sampler.sample(self._sampler.plan(slots), logits, positions, logprobs=wanted)
        plan = self._sampler.plan(slots, num_drafts=drafts.num_draft_tokens)
        probs = self._runner._get_spec_decode_draft_probs(drafts) if self._rule != "match" else None
        rule, given = ("match", {}) if probs is None else (self._rule, {"draft_probs": probs})
        return self._sampler.verify(plan, logits, drafts.draft_token_ids, positions, rule, logprobs=wanted, **given)

    def _logprobs(self, most: int | None) -> Logprobs | None:
        return None if most is None else Logprobs(top=most, of=self._law, rank=True)

    def _logprob_tensors(self, tokens: Tensor, made: SampleOutputs | VerifyOutputs) -> LogprobsTensors | None:
        if made.logprobs is None:
            return None
        return LogprobsTensors(*logprob_columns(tokens, made.logprobs, self._sampler.vocab_size))


class RunnerState:
    """Decides who draws the batches of one model runner, and counts them."""

    def __init__(self, runner: Any, settings: Settings) -> None:
        self._runner, self._settings = runner, settings
        self._sampler: RunnerSampler | None = None
        self._reasons: dict[str, tuple[Any, str | None]] = {}
        self._of_engine = unsupported_engine(runner)
        self.counts: dict[str, int] = {"batches": 0, "stock_batches": 0}  # and "stock: reason"
        if self._of_engine is not None and settings.on_unsupported == "error":
            raise RuntimeError(f"{self._of_engine}; or install(on_unsupported='stock') to draw by vLLM's own sampler")

    def draw(self, logits: Tensor, drafts: Any) -> SamplerOutput | None:
        """The tokens of a batch; None where vLLM's own sampler shall draw them."""
        refused = self._of_batch()
        reason = self._of_engine or next(iter(refused.values()), None)
        if reason is not None and self._settings.on_unsupported == "stock":
            self._count("stock_batches", f"stock: {reason}")
            if self._sampler is not None:
                self._sampler.forget()
            return None
        if self._settings.on_unsupported == "error":
            # vLLM's generators draw nothing then, and its bookkeeping of a prompt's chunks fails with those of the CPU.
            self._runner.input_batch.generators.clear()
        # What was not refused when it came, though it asks for what the sampler does not have, ends here, alone.
        self._count("batches")
        return self._sampler_of(logits).draw(logits, drafts, refused)

    def warm_up(self, hidden_states: Tensor) -> None:
        """Prepare the sampler before the first batch, once, where it will draw and the settings say so."""
        if self._of_engine is None and self._sampler is None and self._settings.warmup == "start":
            # Whatever the states hold, their logits have the format of all batches.
            self._sampler_of(self._runner.model.compute_logits(hidden_states[:1])).warm_up()

    def _sampler_of(self, logits: Tensor) -> RunnerSampler:
        """The sampler, made for logits such as these."""
        if self._sampler is None:
            self._sampler = RunnerSampler(self._runner, logits, self._settings)
        return self._sampler

    def _of_batch(self) -> dict[str, str]:
        """What requests of the batch ask for that they cannot have, by their ids."""
        batch, known = self._runner.input_batch, dict[str, tuple[Any, str | None]]()
        for request_id in batch.req_ids:
            state = self._runner.requests[request_id]
            params, has_tokens = state.sampling_params, state.prompt_token_ids is not None
            found = self._reasons.get(request_id)
            if found is None or found[0] is not params:
                reason = requests.unsupported(params, batch.vocab_size, self._settings, has_tokens=has_tokens)
                found = params, reason
            known[request_id] = found
        self._reasons = known
        return {request_id: reason for request_id, (_, reason) in known.items() if reason is not None}

    def _count(self, *names: str) -> None:
        for name in names:
            self.counts[name] = self.counts.get(name, 0) + 1
