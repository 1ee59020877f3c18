"""The draw of vLLM's V2 model runner: two methods of its samplers, of tensors by the slots that never move.

vLLM's edits (penalties, biases, bad words, a thinking budget, custom processors) stay vLLM's. Temperature, filters,
noise and the verification of drafts, by ``match``, are those of ``compiled_sampler.functional``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_sampler import functional
from compiled_sampler.integrations.engine_interface import Interface
from compiled_sampler.modes import narrow_mode

SAMPLER = "vllm.v1.worker.gpu.sample.sampler:Sampler"
VERIFIER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler"
PROCESSED = ("processed_logprobs", "processed_logits")
"""vLLM's ``logprobs_mode`` whose logits are those behind the filters."""
_STATES = "vllm.v1.worker.gpu.sample.states:SamplingStates"
# fmt: off
INTERFACE = Interface(
    parameters={
        f"{SAMPLER}.sample": (
            "self", "logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos", "input_ids",
            "expanded_local_pos", "seq_lens_upper_bound_np", "return_logprobs",
        ),
        f"{VERIFIER}._verify": (
            "self", "logits", "draft_logits", "draft_sampled", "pos", "cu_num_logits", "idx_mapping", "idx_mapping_np",
            "expanded_idx_mapping", "expanded_local_pos", "seq_lens_upper_bound_np", "verify_draft_sampled",
        ),
    },
    fields={
        "vllm.v1.worker.gpu.sample.logits_processor.interface:LogitsContext": (
            "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "expanded_local_pos", "input_ids", "pos",
            "seq_lens_upper_bound_np",
        ),
    },
    attributes={
        f"{SAMPLER}.__init__": (
            "sampling_states", "logits_processors", "thinking_budget_state", "needs_logits_processing",
            "return_sampling_mask", "logprobs_mode",
        ),
        f"{SAMPLER}.apply_sampling_params": ("needs_logits_processing", "logits_processors", "thinking_budget_state"),
        f"{VERIFIER}.__init__": ("sampler", "num_speculative_steps", "synthetic_conditional_rates"),
        f"{_STATES}.__init__": ("temperature", "top_k", "top_p", "min_p", "seeds", "vocab_size"),
    },
)
# fmt: on


class Rows(NamedTuple):
    """Which slots a call of vLLM is about."""

    slots: Tensor
    """int ``[R]``, on the device."""
    slots_np: np.ndarray
    """The same slots, each once, on the host."""


def unsupported_runner(runner: Any, rule: str) -> str | None:
    """The first thing that keeps a V2 runner, after its ``__init__``, from drawing here, in one line; else None."""
    config = runner.vllm_config
    drafts = config.speculative_config
    if rule != "match":
        return f"rule must be 'match' with a V2 runner, got {rule!r}; leave it out"
    if config.watermark_config is not None:
        return "watermark_config must be None; seeded noise takes no other watermark"
    if drafts is not None and drafts.rejection_sample_method == "synthetic":
        return "rejection_sample_method must not be 'synthetic'; it accepts drafts that the model would not"
    return None


def law_arguments(states: Any, rows: Rows) -> dict[str, Any]:
    """The parameters of rows as ``functional.sample`` takes them; filters that no row has are numbers."""
    # A parameter means the float32 number that vLLM's states hold.
    heat = states.temperature.np[rows.slots_np]
    seeds = {"seeds": states.seeds.gpu[rows.slots]}
    if not heat.any():
        return {"temperature": 0.0, **seeds}
    top_k, top_p, min_p = (column.np[rows.slots_np] for column in (states.top_k, states.top_p, states.min_p))
    cuts = bool((top_k != states.vocab_size).any())
    return {
        "temperature": states.temperature.gpu[rows.slots],
        "top_k": states.top_k.gpu[rows.slots] if cuts else 0,
        "top_p": states.top_p.gpu[rows.slots] if (top_p != 1.0).any() else 1.0,
        "min_p": states.min_p.gpu[rows.slots] if min_p.any() else 0.0,
        "mode": narrow_mode(int(top_k[heat != 0].max())) if cuts else None,
        **seeds,
    }


def drawn_positions(input_positions: Tensor) -> Tensor:
    """The position of the token that each row draws, from that of its input token, which vLLM's V2 runner has."""
    return input_positions + 1


def edited_logits(sampler: Any, logits: Tensor, context: Any) -> Tensor:
    """The logits behind vLLM's edits, before temperature and filters; a copy in float32 where a request needs one."""
    # The first part of vLLM's ``apply_sampling_params``.
    if not sampler.needs_logits_processing[context.idx_mapping_np].any():
        return logits
    logits = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
    for processor in sampler.logits_processors:
        logits = processor.apply(logits, context)
    sampler.thinking_budget_state.apply(logits, context)
    return logits


def processed_logits(logits: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Edited logits by temperature, float32 ``[R, V]``, -inf where the filters drop a token; a greedy row keeps one."""
    given = {name: value for name, value in arguments.items() if name != "seeds"}
    heat = torch.as_tensor(given["temperature"], dtype=torch.float32, device=logits.device).view(-1, 1)
    scaled = logits.float() / torch.where(heat == 0, 1.0, heat)
    return torch.where(functional.probs(logits, **given) > 0, scaled, -torch.inf)


def sample(
    sampler: Any, logits: Tensor, context: Any, backend: str, *, return_logprobs: bool = False
) -> tuple[Tensor, Tensor]:
    """One token for every row, int64 ``[R]``, 0 where a row has none, and the logits for logprobs ``[R, V]``."""
    edited = edited_logits(sampler, logits, context)
    arguments = law_arguments(sampler.sampling_states, Rows(context.expanded_idx_mapping, context.idx_mapping_np))
    arguments["backend"] = backend
    made = functional.sample(edited, positions=drawn_positions(context.pos), **arguments)
    shown = sampler.return_sampling_mask or (return_logprobs and sampler.logprobs_mode in PROCESSED)
    return made.token_ids.clamp(min=0), processed_logits(edited, arguments) if shown else logits


def verify(
    verifier: Any, logits: Tensor, context: Any, first_rows: Tensor, drafts: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The logits for logprobs ``[R, V]``, the tokens ``[N, K+1]`` of each request, and how many these are ``[N]``."""
    sampler = verifier.sampler
    edited = edited_logits(sampler, logits, context)
    arguments = law_arguments(sampler.sampling_states, Rows(context.idx_mapping, context.idx_mapping_np))
    arguments["backend"] = backend
    chain, counts = padded_drafts(drafts, first_rows, verifier.num_speculative_steps)
    positions = drawn_positions(context.pos[first_rows[:-1].long()])
    made = functional.verify(edited, chain, num_drafts=counts, positions=positions, **arguments)
    shown = logits
    if sampler.return_sampling_mask or sampler.logprobs_mode in PROCESSED:
        by_row = law_arguments(sampler.sampling_states, Rows(context.expanded_idx_mapping, context.idx_mapping_np))
        shown = processed_logits(edited, {**by_row, "backend": backend})
    return shown, made.token_ids.clamp(min=0).to(drafts.dtype), made.num_emitted.clamp(min=1).to(torch.int32)


def padded_drafts(drafts: Tensor, first_rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The drafts of each request int32 ``[N, K]``, -1 behind the last, and how many these are ``[N]``."""
    # ``drafts`` are the input tokens of all rows, -1 where a draft is never right; a request's first row has no draft.
    # ``first_rows`` ``[N+1]`` ends with R.
    counts = first_rows.diff() - 1
    places = torch.arange(width, device=drafts.device)
    rows = (first_rows[:-1, None] + 1 + places).clamp(max=len(drafts) - 1).long()
    return torch.where(places < counts[:, None], drafts[rows], -1), counts
