"""A step of each mode on random logits, for the tools that look at its kernels."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from compiled_sampler import SamplingParams
from compiled_sampler.batch import DraftTable, SampleInputs, VerifyInputs
from compiled_sampler.engine.requests.slots import SlotState, unfiltered_table
from compiled_sampler.logprobs import LogprobInputs, Logprobs
from compiled_sampler.modes import CACHE, PROCESSED, Mode, Verification, mode_table, verifying
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.pipeline.verify import verify_step
from tools.kernels.launches import Step
from tools.measuring import logits_like

REQUESTS = {
    "greedy": SamplingParams(temperature=0.0, seed=1),
    "no_filter": SamplingParams(temperature=0.8, seed=2),
    "min_p": SamplingParams(temperature=0.8, min_p=0.05, seed=3),
    "top_k_top_p[64]": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=4),
    "top_k": SamplingParams(temperature=0.8, top_k=1000, seed=6),
    "full": SamplingParams(temperature=0.8, top_p=0.99, seed=5),
}
"""A request of each mode; the top-p of the last one is so large that rows search beyond the candidates."""

_SLOTS = 256


def step_of(
    mode_name: str,
    rows: int,
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    verification: Verification | None = None,
    top_p_base: str = "top_k",
    logprobs: Logprobs | None = None,
) -> Step:
    """A step of a mode on random logits, as a function of what runs its stages.

    Args:
        mode_name: one of ``REQUESTS``.
        rows: R, with drafts N.
        vocab_size: V.
        dtype: of the logits.
        device: where.
        verification: how drafts are verified; None samples.
        top_p_base: as of a sampler.
        logprobs: that a step returns which samples; None for none.
    """
    modes = {mode.name: mode for mode in mode_table(vocab_size, top_p_base)}
    state = SlotState(_SLOTS, tuple(modes.values()), torch.device(device))
    slots = torch.full((rows,), state.add(REQUESTS[mode_name]), device=device)
    state.upload()
    positions = torch.arange(rows, device=device)
    if verification is None:
        logits = logits_like("peaked", rows, vocab_size, device, dtype)
        asked = None if logprobs is None else LogprobInputs(logprobs)
        return partial(
            sample_step, modes[mode_name], SampleInputs(logits, slots, positions, state.table, logprobs=asked)
        )
    width = verification.width
    mode = verifying(modes[mode_name], verification.rule, verification.drafts)
    inputs = VerifyInputs(
        logits_like("peaked", rows * (width + 1), vocab_size, device, dtype),
        slots,
        positions,
        torch.full((rows,), width, device=device),
        torch.randint(vocab_size, (rows, width), device=device),
        _proposals(mode, rows, width, dtype, device),
        state.table,
        draft_table=unfiltered_table(state.table, vocab_size),
        parents=(torch.arange(width, device=device) // 2 - 1).expand(rows, width) if verification.trees else None,
    )
    return partial(verify_step, mode, inputs)


def _proposals(mode: Mode, rows: int, width: int, dtype: torch.dtype, device: str) -> Tensor | DraftTable | None:
    """A row a draft: logits, probabilities, or None for one-hot drafts; in the cache, rows of as many slots."""
    if mode.drafts == "one_hot":
        return None
    count = rows * width + width * (mode.drafts == CACHE)
    logits = logits_like("peaked", count, mode.vocab_size, device, dtype, seed=1)
    if mode.drafts == CACHE:
        return DraftTable(logits.view(rows + 1, width, mode.vocab_size))
    return logits if mode.drafts in ("logits", PROCESSED) else torch.softmax(logits.float(), -1)
