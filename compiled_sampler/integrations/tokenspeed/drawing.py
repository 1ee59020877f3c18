"""A sampling backend of TokenSpeed that draws and verifies by ``compiled_sampler.functional``, also in a graph."""

from __future__ import annotations

from typing import Any

import torch
from tokenspeed.runtime.sampling.backends.base import CUDA_GRAPH_VARIANT_DEFAULT, SamplingBackend
from tokenspeed.runtime.sampling.utils import gather_token_logprobs, nan_guard_logits
from torch import Tensor

from compiled_sampler import functional
from compiled_sampler.integrations.tokenspeed.pools import MODES, RequestPools
from compiled_sampler.integrations.tokenspeed.results import accepted_places, emitted

FULL = MODES[-1]


class CompiledSamplingBackend(SamplingBackend):  # type: ignore[misc]
    """Draws by the rule of the position; drafts are verified by ``match``, which keeps the tokens of plain decoding."""

    _HAS_POOL_STATE = True
    supports_tree_verify = False
    backend = "auto"  # of ``compiled_sampler.functional``; the plugin makes a class for each

    def __init__(self, config: Any) -> None:
        if config.enable_speculative_sampling:
            raise ValueError("enable_speculative_sampling must be off, got on; drafts are verified by match here")
        super().__init__(config)
        # Graphs read the tensors of these two, so they stay at their address.
        self._pools = RequestPools(config.max_req_pool_size + 1, config.vocab_size, config.device)
        self._ones = torch.ones(config.max_bs, dtype=torch.int32, device=config.device)
        self._mode = FULL
        self._lengths: Tensor | None = None

    def bind_lengths(self, lengths: Tensor) -> None:
        """Read the tokens of each request of a prefill here: int32 ``[max B]``, which the engine rewrites each step."""
        self._lengths = lengths  # ``sampling_info`` has those before the step alone

    def _reset_slot(self, pool_idx: int, sp: Any) -> None:
        self._pools.put(pool_idx, sp)

    def _prepare_step_hook(self, num_tokens_per_req: int, bs: int, request_pool_indices: list[int] | None) -> None:
        if request_pool_indices is not None:
            self._mode = self._pools.mode_of(request_pool_indices)

    def prepare_capture(self, bs: int, num_tokens_per_req: int = 1) -> None:
        """Take the mode that covers all requests."""
        self._mode = FULL

    def prepare_capture_variant(self, bs: int, num_tokens_per_req: int, variant: str) -> None:
        """Take the mode of a variant."""
        if variant not in self.cuda_graph_capture_variants(num_tokens_per_req):
            raise ValueError(f"variant must be one of {(CUDA_GRAPH_VARIANT_DEFAULT, *MODES[:-1])}, got {variant!r}")
        self._mode = FULL if variant == CUDA_GRAPH_VARIANT_DEFAULT else variant

    def cuda_graph_capture_variants(self, num_tokens_per_req: int) -> tuple[str, ...]:
        """The graphs that are captured for each batch size: one a mode."""
        return (CUDA_GRAPH_VARIANT_DEFAULT, *MODES[:-1])

    def cuda_graph_replay_variant(self, num_tokens_per_req: int) -> str:
        """The graph of the step that was prepared."""
        return CUDA_GRAPH_VARIANT_DEFAULT if self._mode == FULL else self._mode

    def sample(self, logits_output: Any, sampling_info: Any) -> tuple[Tensor, Tensor]:
        """The first token of each request behind its prompt, int32 ``[B]``, and ones."""
        logits = self._masked(logits_output, sampling_info)
        if self._lengths is None:
            raise RuntimeError("lengths must be bound before a prefill is drawn from; load the plugin")
        count, first = logits.shape[0], sampling_info.batch_row_offset
        token_ids = self._drawn(logits, sampling_info, self._lengths[first : first + count])
        self.maybe_broadcast(token_ids)
        self._write_logprobs(logits_output, logits, token_ids)
        return token_ids, self._ones[:count]

    def verify(self, logits_output: Any, sampling_info: Any, candidates: Tensor, *, tree: Any) -> tuple[Tensor, Tensor]:
        """The accepted drafts of each request and one token more, int32 ``[B * N]``, and how many these are ``[B]``."""
        if tree is not None:
            raise NotImplementedError("tree must be None; drafts are a chain here")
        logits = self._masked(logits_output, sampling_info)
        count, width = candidates.shape  # the last token of each request, then its drafts
        positions = drawn_positions(self._offsets_pool_for_kernels(sampling_info), _indices(sampling_info, count))
        if width == 1:
            token_ids = self._drawn(logits, sampling_info, positions)[:, None]
            lengths = self._ones[:count]
        else:
            token_ids, lengths = self._verified(logits, sampling_info, candidates, positions)
        made = self._predict_buf[: count * width].copy_(token_ids.reshape(-1))
        lengths = self._accept_length_buf[:count].copy_(lengths)
        self._accept_index_buf[: count * width].view(count, width).copy_(accepted_places(lengths, width))
        self.broadcast_verify_outputs()
        self._write_logprobs(logits_output, logits, made)
        return made, lengths

    def _masked(self, logits_output: Any, info: Any) -> Tensor:
        """The logits ``[R, >=V]``, to which TokenSpeed's functions have applied a grammar's mask."""
        logits: Tensor = nan_guard_logits(logits_output.next_token_logits, self.config.enable_nan_detection)
        if info.vocab_mask is not None:
            info.apply_vocab_mask(logits=logits, vocab_mask=info.vocab_mask)
        return logits

    def _drawn(self, logits: Tensor, info: Any, positions: Tensor) -> Tensor:
        """One token for every row, int32 ``[B]``; 0 for a row that has none."""
        made = functional.sample(logits, positions=positions, **self._arguments(info, logits.shape[0]))
        return made.token_ids.clamp(min=0).to(torch.int32)

    def _verified(self, logits: Tensor, info: Any, candidates: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens ``[B, N]``, and how many of each request are emitted ``[B]``."""
        arguments = self._arguments(info, candidates.shape[0])
        return emitted(functional.verify(logits, candidates[:, 1:].contiguous(), positions=positions, **arguments))

    def _arguments(self, info: Any, count: int) -> dict[str, Any]:
        given = {"mode": self._mode, "vocab_size": self.config.vocab_size, "backend": self.backend}
        return {**self._pools.rows(_indices(info, count)), **given}

    def _write_logprobs(self, logits_output: Any, logits: Tensor, token_ids: Tensor) -> None:
        if self.config.enable_output_logprobs:
            order = self.config.logprob_order
            logits_output.next_token_logprobs = gather_token_logprobs(logits, token_ids.long(), logprob_order=order)


def drawn_positions(cached: Tensor, indices: Tensor) -> Tensor:
    """The position of the first token that each request of a decode may draw, ``[B]``."""
    # Here alone lengths of TokenSpeed become positions of the sampler. ``cached`` counts, by pool index, the tokens
    # that were read before a step; a decode reads the last token at that position, and draws the next.
    return cached.index_select(0, indices) + 1


def _indices(info: Any, count: int) -> Tensor:
    return info.req_pool_indices[:count].long()  # type: ignore[no-any-return]
