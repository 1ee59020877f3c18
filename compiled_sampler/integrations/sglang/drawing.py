"""SGLang's Sampler with the draw of this library; its own work on logits, logprobs and ranks stays."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from sglang.srt.layers import sampler as stock
from sglang.srt.runtime_context import get_spec
from torch import Tensor

from compiled_sampler import functional
from compiled_sampler.functional.functions import run_of
from compiled_sampler.integrations.sglang.replays import Drawn, ReplayedDraws
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.modes import narrow_mode


class CompiledSampler(stock.Sampler):  # type: ignore[misc]
    """Draws by ``functional.sample``: parameters, seeds and positions are rows of SGLang's tensors."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self._backend = backend
        self._replays: dict[int, ReplayedDraws] = {}  # by stream
        algorithm = get_spec().speculative_algorithm
        if algorithm is not None:
            raise ValueError(
                f"speculative_algorithm must be None, got {algorithm!r}; SGLang verifies drafts without its Sampler"
            )
        if self.rl_on_policy_target is not None:
            raise ValueError(
                f"rl_on_policy_target must be None, got {self.rl_on_policy_target!r}; its law is of bfloat16 logprobs"
            )

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[Any],
        positions: Tensor,  # of the last token that each row read
    ) -> Tensor:
        """One token for every row, int32 ``[B]``; a row without any token gets 0, as SGLang's argmax gives."""
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        mode = mode_name(sampling_info)
        token_ids = self._drawn(mode, logits, row_inputs(mode, sampling_info, positions))
        if return_logprob:
            self.output_logprob_processor.compute_logprobs(
                _logprobs(logits, sampling_info), top_logprobs_nums, token_ids_logprobs, token_ids
            ).write_output_to(logits_output)
        if any(sampling_info.return_sampling_masks or []):
            parameters = law_arguments(mode, filter_rows(mode, sampling_info))
            law = functional.probs(logits, backend=self._backend, **parameters)
            ids = torch.arange(law.shape[1], device=law.device).expand_as(law)
            support = (ids, law, law > 0, law)  # of the law that the tokens were drawn from
            self._attach_sampling_mask_to_output(logits_output, sampling_info, token_ids.long(), support)
        self._sync_token_ids_across_tp(token_ids, sampling_info)
        return token_ids

    def _drawn(self, mode: str, logits: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """One token for every row, int32 ``[B]``."""
        replays = self._replays_for(logits)
        if replays is None:
            return drawn_tokens(self._backend, mode, logits, **rows).token_ids
        return replays(mode, logits, rows)

    def _replays_for(self, logits: Tensor) -> ReplayedDraws | None:
        """The replays of the current stream; None for draws that are not compiled, or not on CUDA."""
        stages = run_of(self._backend)
        if not logits.is_cuda or not isinstance(stages, CompiledStages):
            return None
        # With --enable-pdmux prompts and decodes are drawn on two streams at once, and buffers of graphs serve one.
        stream = torch.cuda.current_stream(logits.device).cuda_stream
        if stream not in self._replays:
            draw = functools.partial(drawn_tokens, self._backend)
            self._replays[stream] = ReplayedDraws(draw, stages, logits)
        return self._replays[stream]


def drawn_tokens(
    backend: str,
    mode: str,
    logits: Tensor,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    **rows: Tensor,
) -> Drawn:
    """One token for every row of logits ``[B, V]``, from the inputs of ``row_inputs``; a CUDA graph may hold it."""
    if seeds is None or positions is None:  # greedy rows meet no noise
        seeds = positions = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    drawn = functional.sample(
        logits, seeds=seeds, positions=drawn_positions(positions), backend=backend, **law_arguments(mode, rows)
    )
    return Drawn(drawn.token_ids.clamp(min=0).to(torch.int32))


def _logprobs(logits: Tensor, info: Any) -> Tensor:
    """The logprobs that SGLang returns, float32 ``[B, V]``: of the temperature, without filters, row by row."""
    # SGLang leaves the temperature out where all rows of a batch are greedy; here a row's logprobs are its own.
    scaled = logits if stock.SGLANG_RETURN_ORIGINAL_LOGPROB else logits / info.temperatures
    return torch.log_softmax(scaled, -1, dtype=torch.float32)


LEAST_TEMPERATURE = float(np.nextafter(np.float32(1e-5), np.float32(1)))
MOST_TEMPERATURE = float(np.nextafter(np.float32(1e30), np.float32(1)))
"""The sampler's limits, as float32 holds them inside; SGLang takes temperatures below 1e-6 as greedy, and any other."""


def drawn_positions(positions: Tensor) -> Tensor:
    """The position of the token that each row draws, ``[B]``, from that of the last token that it read."""
    # Here alone positions of SGLang become those of the sampler: it gives that of a decode's input token, and behind a
    # prompt or a part of it the length less one.
    return positions + 1


def mode_name(info: Any) -> str:
    """The cheapest mode that covers all rows of a batch, by what SGLang knows of them on the host."""
    if info.is_all_greedy:
        return "greedy"
    if info.need_top_k_sampling:
        wide = "full" if info.need_top_p_sampling else "top_k"
        return narrow_mode(getattr(info, "max_top_k", None)) or wide
    if info.need_top_p_sampling:
        return "full"
    return "min_p" if info.need_min_p_sampling else "no_filter"


_READ = {
    "greedy": (),
    "no_filter": ("temperature",),
    "min_p": ("temperature", "min_p"),
    "top_k": ("temperature", "top_k", "min_p"),
}
"""The parameters that a mode reads; other modes read all."""


def filter_rows(mode: str, info: Any) -> dict[str, Tensor]:
    """The parameters that a mode reads, ``[B]`` each, as SGLang has them."""
    rows = {
        "temperature": info.temperatures.view(-1),
        "top_k": info.top_ks,
        "top_p": info.top_ps,
        "min_p": info.min_ps,
    }
    return {name: rows[name] for name in _READ.get(mode, rows)}


def row_inputs(mode: str, info: Any, positions: Tensor) -> dict[str, Tensor]:
    """What a draw reads beside logits, ``[B]`` each: nothing where all rows are greedy."""
    if mode == "greedy":
        return {}
    if info.sampling_seed is None:
        raise RuntimeError("sampling_seed must be set; load the plugin, or use --enable-deterministic-inference")
    return {"seeds": info.sampling_seed, "positions": positions, **filter_rows(mode, info)}


def law_arguments(mode: str, rows: dict[str, Tensor]) -> dict[str, Any]:
    """The parameters of the rows, as ``sample`` and ``probs`` take them; 0 is the temperature of greedy rows."""
    temperature = rows["temperature"].clamp(LEAST_TEMPERATURE, MOST_TEMPERATURE) if rows else 0.0
    # top_p is a share of the whole row, as SGLang's filters are ("joint").
    return {**rows, "temperature": temperature, "mode": mode, "top_p_base": "all"}
