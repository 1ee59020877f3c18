"""What an engine is configured for that the adapter does not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LAWS = {"raw_logprobs": "raw", "processed_logprobs": "filtered"}
"""vLLM's ``logprobs_mode`` as a law of ``Logprobs``: the processed one is that which a token is drawn from."""
LOSSLESS = "standard", "block"
"""Methods of vLLM's verification that keep the model's law, as every rule of the sampler does."""
BUILTIN_PROCESSORS = ("MinTokensLogitsProcessor", "LogitBiasLogitsProcessor", "MinPLogitsProcessor")
"""Logits processors of vLLM whose work the sampler does."""
WATERMARK = "watermark_config must be None; seeded noise takes no other watermark"


def unsupported_engine(runner: Any) -> str | None:
    """The first thing that keeps a V1 runner, after its ``__init__``, from drawing here, in one line; else None."""
    foreign = [type(each).__name__ for each in runner.input_batch.logitsprocs.all]
    return _unsupported(runner.vllm_config, [name for name in foreign if name not in BUILTIN_PROCESSORS])


def unsupported_v2(config: Any, custom_processors: Sequence[Any]) -> str | None:
    """The first thing that keeps a V2 runner from drawing here, in one line; else None."""
    drafts = config.speculative_config
    if drafts is not None and drafts.enable_adaptive_verification:
        return "enable_adaptive_verification must be False, got True; the host does not know the numbers of drafts then"
    if config.parallel_config.enable_batch_sharded_sampling:
        return "enable_batch_sharded_sampling must be False, got True; it gathers logprobs of another form"
    if config.model_config.enable_trace_replay:
        return "enable_trace_replay must be False, got True; its tokens are not drawn"
    return _unsupported(config, [type(each).__name__ for each in custom_processors])


def _unsupported(config: Any, foreign_processors: Sequence[str]) -> str | None:
    model, drafts = config.model_config, config.speculative_config
    if model.logprobs_mode not in LAWS:
        return f"logprobs_mode must be one of {tuple(LAWS)}, got {model.logprobs_mode!r}; those of logits are not made"
    method = "standard" if drafts is None else drafts.rejection_sample_method
    if method not in LOSSLESS:
        return f"rejection_sample_method must be one of {LOSSLESS}, got {method!r}; others change the law of the tokens"
    if config.watermark_config is not None:
        return WATERMARK
    if model.return_sampling_mask:
        return "return_sampling_mask must be False, got True; the adapter returns none"
    if model.is_diffusion:
        return "the model must draw a token after the other, got one of diffusion"
    return f"logits_processors must be vLLM's own, got {', '.join(foreign_processors)}" if foreign_processors else None
