"""Tiny random models of transformers in float64, whose logits in float32 are the same alone and in a padded batch."""

from typing import Any

import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams

FAMILIES = ("Qwen3", "Llama", "Gemma")
VOCAB_SIZE = 97
PAD, EOS = 0, 1


def tiny_model(family: str = "Qwen3", vocab_size: int = VOCAB_SIZE, seed: int = 0, noise: float = 0.0) -> Any:
    """A causal model with two layers of 16 numbers, with eos token 1 and padding 0.

    Args:
        family: of ``FAMILIES``.
        vocab_size: V.
        seed: of the weights.
        noise: what to add to the weights of the last layer, so that a model is near another of the same seed.
    """
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        pad_token_id=PAD,
        bos_token_id=2,
        eos_token_id=EOS,
        initializer_range=0.5,
        tie_word_embeddings=False,
    )
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
