"""A Llama in plain torch: embeddings, rotary attention of grouped queries, SwiGLU, RMS norms, tied output weights.

Dims: ``d`` hidden size, ``H`` heads of queries, ``G`` heads of keys and values, ``D`` numbers of a head, ``V``
vocabulary. What attends to what is the caller's: training attends within a batch of texts, decoding to a cache.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tools.model.weights import Weights, read_bfloat16

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Number of the layer, queries ``[..., H, D]``, keys and values ``[..., G, D]`` of the same tokens; the mixed values,
``[..., H, D]``."""


@dataclass(frozen=True)
class Config:
    """Sizes of a model, under the names of a LlamaConfig of transformers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 32
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 512

    @classmethod
    def from_json(cls, path: Path) -> Config:
        """Read a ``config.json``; what does not change the arithmetic is passed over."""
        stored = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{field.name: stored[field.name] for field in dataclasses.fields(cls)})

    def to_json(self) -> dict[str, Any]:
        """What a ``config.json`` of transformers holds."""
        constants = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "dtype": "bfloat16",
        }
        return {**constants, **dataclasses.asdict(self)}


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of every weight, under the names of LlamaForCausalLM; the output takes the weights of the embedding."""
    d, wide = config.hidden_size, config.intermediate_size
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    layer = {
        "input_layernorm": (d,),
        "self_attn.q_proj": (queries, d),
        "self_attn.k_proj": (keys, d),
        "self_attn.v_proj": (keys, d),
        "self_attn.o_proj": (d, queries),
        "post_attention_layernorm": (d,),
        "mlp.gate_proj": (wide, d),
        "mlp.up_proj": (wide, d),
        "mlp.down_proj": (d, wide),
    }
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, d)}
    for number in range(config.num_hidden_layers):
        found |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return found | {"model.norm.weight": (d,)}


@dataclass(frozen=True)
class Model:
    """Sizes and weights."""

    config: Config
    weights: Weights

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float64) -> Model:
        """Read a stored model.

        Args:
            folder: with ``config.json`` and ``model.safetensors``.
            dtype: of the weights, and so of the arithmetic.
        """
        return cls(Config.from_json(folder / "config.json"), read_bfloat16(folder / "model.safetensors", dtype))

    def to(self, device: torch.device | str) -> Model:
        """The same model on a device."""
        return Model(self.config, {name: weight.to(device) for name, weight in self.weights.items()})


def rotary_table(config: Config, length: int, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of each position, ``[2, length, D]``, from float32 frequencies as in transformers."""
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    angles = torch.outer(torch.arange(length).float(), 1.0 / config.rope_theta**exponents)
    angles = torch.cat([angles, angles], -1)
    return torch.stack([angles.cos(), angles.sin()]).to(dtype)


def logits(config: Config, weights: Weights, token_ids: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
    """The logits of the token behind each token, ``[..., V]``, in the dtype of the weights.

    Args:
        config: sizes.
        weights: of the dtype to compute in.
        token_ids: int64 ``[...]``.
        rotary: ``[2, ..., 1, D]``, rows of ``rotary_table`` for the positions of the tokens.
        attend: mixes values.
    """
    hidden = weights["model.embed_tokens.weight"][token_ids]
    for number in range(config.num_hidden_layers):
        layer = f"model.layers.{number}."
        normed = _norm(hidden, weights[f"{layer}input_layernorm.weight"], config.rms_norm_eps)
        hidden = hidden + _attention(config, weights, number, normed, rotary, attend)
        normed = _norm(hidden, weights[f"{layer}post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = (F.linear(normed, weights[f"{layer}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        hidden = hidden + F.linear(F.silu(gate) * up, weights[f"{layer}mlp.down_proj.weight"])
    normed = _norm(hidden, weights["model.norm.weight"], config.rms_norm_eps)
    return F.linear(normed, weights["model.embed_tokens.weight"])


def _norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return scale * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def _attention(config: Config, weights: Weights, number: int, x: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
    """What attention adds to ``[..., d]``."""
    name = f"model.layers.{number}.self_attn."
    q, k, v = (F.linear(x, weights[f"{name}{part}_proj.weight"]).unflatten(-1, (-1, config.head_dim)) for part in "qkv")
    mixed = attend(number, _rotated(q, rotary), _rotated(k, rotary), v)
    return F.linear(mixed.flatten(-2), weights[f"{name}o_proj.weight"])


def _rotated(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) by the angle of its position (arXiv 2104.09864)."""
    first, second = x.chunk(2, -1)
    return x * rotary[0] + torch.cat([-second, first], -1) * rotary[1]
