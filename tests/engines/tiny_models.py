"""Tiny random models of transformers in float64, and requests for them.

Their logits in float32 are the same alone and in a padded batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams

FAMILIES = ("Qwen3", "Llama", "Gemma")
VOCAB_SIZE = 97
PAD, EOS = 0, 1


def tiny_model(family: str = "Qwen3", vocab_size: int = VOCAB_SIZE, seed: int = 0, noise: float = 0.0) -> Any:
    """A causal model with two layers of 16 numbers; with a little ``noise`` it is near another of its seed."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": False}
    ids = {"vocab_size": vocab_size, "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": EOS}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads, **ids, initializer_range=0.5)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float64).eval()
    with torch.no_grad():
        model.lm_head.weight += noise * torch.randn_like(model.lm_head.weight)
    model.generation_config.assistant_confidence_threshold = 0.0
    model.generation_config.num_assistant_tokens = 3
    return model


def padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    """Prompts in a batch, padded on the left, with their mask."""
    longest = max(map(len, prompts))
    rows = [[PAD] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


@torch.no_grad()
def slowly(model: Any, prompt: list[int], params: SamplingParams, most: int) -> list[int]:
    """The tokens that follow a prompt, drawn by the definition from logits that are computed without a cache."""
    sampler = Sampler(model.config.vocab_size, 1, backend="reference", history_len=len(prompt) + most)
    slot, drawn = sampler.add_request(params, prompt), list[int]()
    plan = sampler.plan([slot])
    while len(drawn) < most and EOS not in drawn:
        text = torch.tensor([prompt + drawn])
        logits = model(text, use_cache=False).logits[:, -1].to(torch.float32)
        drawn += sampler.sample(plan, logits, positions=torch.tensor([text.shape[1]])).tolist()
    return drawn


def continuation(row: Tensor, width: int) -> list[int]:
    """The tokens behind a prompt of ``width`` columns, up to the eos token."""
    tokens: list[int] = row[width:].tolist()
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def with_larger_embedding(model: Any, rows: int) -> Any:
    """A model whose prompts may hold ids that no logit has, as those of multimodal models do."""
    width = model.get_input_embeddings().weight.shape[1]
    torch.manual_seed(3)
    embedding = torch.nn.Embedding(rows, width, dtype=torch.float64)
    with torch.no_grad():
        embedding.weight.mul_(0.5)
    model.set_input_embeddings(embedding)
    return model


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
    """What ``rows`` of the prompts, in the order of their arrival, are continued with by continuous batching."""
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
