"""Requests for continuous batching of transformers, and the ways to run them that its tests compare."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tests.engines.tiny_models import EOS, PAD, continuation, padded

PROMPTS = [[5, 6, 7, 8, 9], [9, 3], [7, 7, 7], [4, 12, 33, 5, 6, 7, 8, 9, 21]]
SEEDS = [1, -5, 2**63 + 11, 2**40]
MOST = 12
LAWS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.3},
    "k_p": {"top_k": 20, "top_p": 0.9, "temperature": 0.8},
    "p": {"top_p": 0.7},
    "min_p": {"min_p": 0.05},
    "none": {},
    "greedy": {"do_sample": False},
}
Tokens = list[list[int]]


def config_of(**fields: Any) -> Any:
    """A GenerationConfig that draws up to ``MOST`` tokens."""
    from transformers import GenerationConfig

    fixed = {"do_sample": True, "eos_token_id": EOS, "pad_token_id": PAD, "max_new_tokens": MOST}
    return GenerationConfig(**{**fixed, **fields})


def cache_of(**fields: Any) -> Any:
    """A ContinuousBatchingConfig with a small cache; a default one takes most of the machine's memory."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    return ContinuousBatchingConfig(**{"num_blocks": 16, "max_batch_tokens": 64, **fields})


@contextmanager
def eagerly_paged(model: Any) -> Iterator[None]:
    """Has a model attend in eager torch, not by flash attention, which takes no float64."""
    theirs = model.config._attn_implementation
    model.set_attn_implementation("paged|eager")
    try:
        yield
    finally:
        model.set_attn_implementation(theirs)


def batched(model: Any, rows: Sequence[int], law: dict[str, Any], backend: str = "eager", **cache: Any) -> Tokens:
    """What some of the prompts are continued with by continuous batching.

    Args:
        model: of transformers.
        rows: of ``PROMPTS`` and ``SEEDS``, in the order of their arrival.
        law: fields of the generation config.
        backend: of the sampler.
        cache: fields of the batching config.
    """
    from compiled_sampler.integrations.transformers.continuous_batching import generate_batch

    prompts, seeds = [PROMPTS[row] for row in rows], [SEEDS[row] for row in rows]
    with eagerly_paged(model):
        outputs = generate_batch(model, prompts, seeds, config_of(**law), cache_of(**cache), backend=backend)
    return [output.generated_tokens for output in outputs]


def generated(model: Any, rows: Sequence[int], law: dict[str, Any]) -> Tokens:
    """What they are continued with by ``generate(custom_generate=sample)``, in one padded batch.

    Without a ``top_k`` that call takes 50, and continuous batching none: it is written down here.
    """
    from compiled_sampler.integrations.transformers import sample

    prompts, seeds = [PROMPTS[row] for row in rows], [SEEDS[row] for row in rows]
    given = {"do_sample": True, "max_new_tokens": MOST, "top_k": 0, **law, "sampler_backend": "eager"}
    inputs = {name: each.to(model.device) for name, each in padded(prompts).items()}
    drawn: Tensor = model.generate(**inputs, custom_generate=sample, seeds=seeds, **given)
    return [continuation(row, inputs["input_ids"].shape[1]) for row in drawn]
