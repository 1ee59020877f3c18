"""The samplers of vLLM's V2 model runner, made ours: its requests stay at their index, and tables are read by it.

vLLM's own samplers, of which these are kinds, still hold what its drafters and prompt logprobs read; with
``on_unsupported="stock"`` they draw for batches that cannot be drawn here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from vllm.v1.watermarking.gpu_sampler import GPUWatermarkSampler
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler, gather_draft_sampled

from compiled_sampler.edits.names import reading
from compiled_sampler.engine.requests.uploads import sent
from compiled_sampler.integrations.vllm import parameters
from compiled_sampler.integrations.vllm.engine_sampler import Drawn, EngineSampler, GaplessLogprobs, PlannedBatch
from compiled_sampler.integrations.vllm.parameters import Settings
from compiled_sampler.integrations.vllm.versions import WATERMARK, unsupported_v2

_LOG = logging.getLogger(__name__)
_OF_WARMUP = "_warmup_"  # what the ids of requests begin with that vLLM makes at its start, with every parameter set
_NO_TEXT: tuple[Any, ...] = _OF_WARMUP, [], 0  # of one that vLLM 0.33 makes to measure memory, without any state


class SlotSampler(Sampler):  # type: ignore[misc]
    """vLLM's V2 sampler, which draws by ours."""

    settings: ClassVar[Settings] = Settings()
    """Of engines that are made from now on; ``install`` sets it."""
    counts: ClassVar[Counter[str]] = Counter()
    """Of batches, as ``statistics`` has them."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._settings, self.rule = self.settings, self.settings.rule
        config, most = given["vllm_config"], given["max_num_reqs"]
        self._config, self._vocab_size = config, given["vocab_size"]
        self._of_engine = unsupported_v2(config, given["custom_logits_processors"])
        self._is_alone = self._settings.on_unsupported == "error"
        if self._is_alone:
            if self._of_engine is not None:
                raise RuntimeError(f"{self._of_engine}; or install(on_unsupported='stock') to draw by vLLM's sampler")
            # counts of every token and request, which nobody reads then
            self.penalties_state.output_bin_counts = self.penalties_state.prompt_bin_mask = None
        self._ones = torch.ones(most, dtype=torch.int32, device=given["device"])
        self._zeros = torch.zeros_like(self._ones)
        self._engine: EngineSampler | None = None
        self._added: dict[int, tuple[Any, ...]] = {}  # what the sampler is yet to be told, by index
        self._slots = np.full(most, -1, np.int64)  # by index; -1 for a request that is refused
        self._refused: dict[int, tuple[str, int]] = {}  # why, and the token that ends it, by index
        # vLLM tells its sampler neither the id nor the tokens of a request, but its states before.
        self._text = _NO_TEXT
        self.req_states.add_request = self._noting(self.req_states.add_request)

    def _noting(self, add: Callable[..., None]) -> Callable[..., None]:
        def add_request(req_id: str, prompt_len: int, all_token_ids: list[int], **rest: Any) -> None:
            add(req_id=req_id, prompt_len=prompt_len, all_token_ids=all_token_ids, **rest)
            self._text = req_id, all_token_ids, prompt_len

        return add_request

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """Hold a request at an index, in the place of one that was there before."""
        if self._is_alone:
            self.sampling_states.add_request(req_idx, sampling_params)  # drafters read temperatures and seeds
        else:
            super().add_request(req_idx, sampling_params)
        self._added[req_idx] = (sampling_params, *self._text)
        self._text = _NO_TEXT

    def apply_staged_writes(self) -> None:
        """Bring what vLLM holds of requests to the device."""
        if self._is_alone:
            self.sampling_states.apply_staged_writes()
        else:
            super().apply_staged_writes()

    def __call__(self, logits: Tensor, input_batch: Any) -> SamplerOutput:
        """One token for every row."""
        engine = self.engine_for(logits, input_batch.idx_mapping_np)
        if engine is None:
            return super().__call__(logits, input_batch)
        batch, count = self.planned(engine, input_batch), input_batch.num_reqs
        is_decode = not input_batch.has_prefill and input_batch.num_tokens == count  # a row for each input token
        if batch.reads_positions:
            inputs = input_batch.positions[:count] if is_decode else input_batch.positions[input_batch.logits_indices]
            torch.add(inputs, 1, out=batch.positions)
        dims = self.get_logprobs_dims(input_batch.idx_mapping_np, include_token_ids=False)
        drawn = engine.sample(batch, logits, None if dims is None else dims[0])
        return self.output(drawn, logits, input_batch, None if is_decode else self._ones[:count].clone())

    def engine_for(self, logits: Tensor, indices: np.ndarray) -> EngineSampler | None:
        """Our sampler with all requests, made for such logits; None for a batch that vLLM's own shall draw."""
        reason = self._of_engine
        if reason is None:
            self._bring_added(logits)
            if self._refused and self._settings.on_unsupported == "stock":
                reason = next((self._refused[index][0] for index in indices.tolist() if index in self._refused), None)
                if reason is not None:
                    self._let_go(indices)
        self.counts.update(["batches"] if reason is None else ["stock_batches", f"stock: {reason}"])
        return self._engine if reason is None else None

    def _let_go(self, indices: np.ndarray) -> None:
        """Leave to vLLM for good the requests whose edits read tokens, as ours does not learn those that vLLM draws."""
        assert self._engine is not None
        for index in indices.tolist():
            slot = int(self._slots[index])
            if slot >= 0 and reading(self._engine.sampler.request(slot).edits):
                self._engine.remove(slot)
                self._slots[index] = -1
                self._refused[index] = "its tokens were drawn by vLLM's own sampler", 0

    def _bring_added(self, logits: Tensor) -> None:
        """Add to our sampler the requests that came since the last step; the first time, make it."""
        if self._engine is None:
            given = self._vocab_size, len(self._slots), logits, self._settings, torch.int64
            self._engine = EngineSampler(self._config, *given)
            if self._settings.warmup == "start":
                self._engine.warm_up()
        for index in self._added:  # all leave before the first comes
            if self._slots[index] >= 0:
                self._engine.remove(int(self._slots[index]))
                self._slots[index] = -1
            self._refused.pop(index, None)
        for index, (params, request_id, tokens, prompt_len) in self._added.items():
            if request_id.startswith(_OF_WARMUP):
                params = params.clone()
                params.watermarking = None
            own, reason = self._engine.checked(params, request_id)
            if own is None:
                _LOG.error("request %s is not drawn here: %s", request_id, reason)
                self._refused[index] = str(reason), parameters.ending_token(params)
            else:
                prompt, drawn = tokens[:prompt_len], tokens[prompt_len:]
                self._slots[index] = self._engine.add(own, params, prompt, prompt_len, drawn)
        self._added.clear()

    def planned(self, engine: EngineSampler, input_batch: Any, counts: np.ndarray | None = None) -> PlannedBatch:
        """The plan of a batch; a row in the midst of its prompt draws nothing, and so records nothing there."""
        indices = input_batch.idx_mapping_np
        slots = self._slots[indices]
        if input_batch.has_prefill:
            is_unread = input_batch.seq_lens_cpu_upper_bound.numpy()[: len(slots)] < input_batch.prefill_len_np
            slots = np.where(is_unread, -1, slots)
        refused = None
        if self._refused:
            here = {row: self._refused.get(index) for row, index in enumerate(indices.tolist())}
            refused = {row: refusal[1] for row, refusal in here.items() if refusal is not None}
        return engine.planned(slots, counts, refused)

    def output(
        self,
        drawn: Drawn,
        logits: Tensor,
        input_batch: Any,
        num_sampled: Tensor | None,
        starts: list[int] | None = None,
    ) -> SamplerOutput:
        """The results in vLLM's form.

        ``num_sampled`` tokens of each request hold after its prompt, None for one of each in a batch without prompts;
        ``starts`` are the first rows of logprobs of each request, and their end.
        """
        num_nans = get_num_nans(logits) if self.compute_nans else None
        logprobs = None if drawn.logprobs is None else GaplessLogprobs(*drawn.logprobs, starts)
        if num_sampled is None:
            count = input_batch.num_reqs
            return SamplerOutput(drawn.token_ids, logprobs, num_nans, self._ones[:count], self._zeros[:count])
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        return SamplerOutput(drawn.token_ids, logprobs, num_nans, num_sampled, num_rejected)


class WatermarkSampler(GPUWatermarkSampler):  # type: ignore[misc]
    """vLLM's V2 sampler with a watermark, which draws as it did, or is refused."""

    def __init__(self, *args: Any, **given: Any) -> None:
        if SlotSampler.settings.on_unsupported == "error":
            raise RuntimeError(f"{WATERMARK}; or install(on_unsupported='stock') to draw by vLLM's sampler")
        super().__init__(*args, **given)


class SlotVerifier(RejectionSampler):  # type: ignore[misc]
    """vLLM's V2 verification of drafts, which verifies by ours."""

    sampler: SlotSampler

    def __call__(
        self,
        logits: Tensor,
        input_batch: Any,
        draft_logits: Tensor | None = None,
        invalid_drafts: Tensor | None = None,
    ) -> SamplerOutput:
        """The accepted drafts of every request, and one token more."""
        if not isinstance(self.sampler, SlotSampler):  # one of watermarks
            return super().__call__(logits, input_batch, draft_logits, invalid_drafts)
        sampler, indices = self.sampler, input_batch.idx_mapping_np
        engine = sampler.engine_for(logits, indices)
        if engine is None:
            return super().__call__(logits, input_batch, draft_logits, invalid_drafts)
        drafts, positions = gather_draft_sampled(
            input_batch.input_ids,
            input_batch.positions,
            input_batch.logits_indices,
            input_batch.expanded_idx_mapping,
            input_batch.expanded_local_pos,
            sampler.req_states.prefill_len.gpu,
        )
        if invalid_drafts is not None:
            drafts = drafts.masked_fill(invalid_drafts, -1)
        counts = input_batch.num_draft_tokens_per_req.astype(np.int64)
        batch = sampler.planned(engine, input_batch, counts)
        first_rows = input_batch.cu_num_logits[:-1]
        torch.add(positions[first_rows], 1, out=batch.positions)
        chain = padded_drafts(drafts, first_rows, batch.plan.draft_counts, self.num_speculative_steps)
        top = sampler.sampling_states.max_num_logprobs(indices)
        rule = "match" if draft_logits is None else sampler.rule
        probs = None if draft_logits is None or rule == "match" else self._draft_probs(draft_logits, input_batch)
        drawn = engine.verify(batch, logits, chain, None if top < 0 else top, rule, probs)
        starts = list(range(0, drawn.token_ids.numel() + 1, drawn.token_ids.shape[1]))
        drawn = drawn._replace(token_ids=drawn.token_ids.to(drafts.dtype))
        assert drawn.num_emitted is not None
        num_sampled = drawn.num_emitted.clamp(min=1).to(torch.int32)
        return sampler.output(drawn, logits, input_batch, num_sampled, starts)

    def _draft_probs(self, draft_logits: Tensor, input_batch: Any) -> Tensor:
        """The law of each draft, float32 ``[D, V]``: vLLM's drafters draw at the temperature, and filter nothing."""
        is_draft = np.ones(input_batch.cu_num_logits_np[-1], bool)
        is_draft[input_batch.cu_num_logits_np[:-1]] = False
        rows = sent(np.flatnonzero(is_draft), draft_logits.device)
        index, places = input_batch.expanded_idx_mapping[rows], input_batch.expanded_local_pos[rows] - 1
        logits = draft_logits[index, places].float()
        heat = self.sampler.sampling_states.temperature.gpu[index][:, None]
        greedy = torch.zeros_like(logits).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
        return torch.where(heat == 0, greedy, torch.softmax(logits / torch.where(heat == 0, 1.0, heat), -1))


def padded_drafts(drafts: Tensor, first_rows: Tensor, counts: Any, width: int) -> Tensor:
    """The drafts of each request ``[N, K]``, -1 after the last, of the input tokens ``[R]`` of all rows."""
    # A request's first row has no draft; a draft of -1 is never right.
    places = torch.arange(width, device=drafts.device)
    rows = (first_rows[:, None] + 1 + places).clamp(max=len(drafts) - 1)
    return torch.where(places < counts[:, None], drafts[rows], -1)
