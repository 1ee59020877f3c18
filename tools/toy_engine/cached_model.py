"""A model whose texts live in slots: rows of logits for any tokens of any slots, with what was read before in a cache.

Dims: ``R`` rows, ``S`` slots, ``T`` positions of a slot, ``V`` vocabulary; heads as in ``tools.model.transformer``.

A row is (slot, position, token). Reading a prompt, decoding a token and looking behind drafts are the same thing: all
keys and values of a pass are written before any row attends, and a row attends to the positions of its slot up to its
own. What a rejected draft left behind is overwritten when its position is read again, and nobody attends to it before.

Arithmetic is float64 and logits are rounded to float32 at the end. The order of additions differs between devices and
numbers of rows, which moves a logit by some 1e-14: its float32 stays the same but for one in about 1e8, and a token
changes only where such a logit decides a race within the last bit. So streams can be compared token by token across
devices and batches, though the sampler's guarantee begins at the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tools.model import transformer
from tools.model.transformer import Model


class CachedModel:
    """Logits of texts in slots.

    Args:
        model: on the device to compute on, in float64.
        num_slots: S; slot -1 is padding, whose rows are computed and mean nothing.
        length: T, positions that a text may have.
    """

    def __init__(self, model: Model, num_slots: int, length: int) -> None:
        """Allocate the cache, with one slot more for padding."""
        self._model = model
        embedding = model.weights["model.embed_tokens.weight"]
        config = model.config
        shape = (config.num_hidden_layers, num_slots + 1, length, config.num_key_value_heads, config.head_dim)
        self._keys, self._values = (embedding.new_zeros(shape) for _ in range(2))
        self._rotary = transformer.rotary_table(config, length, embedding.dtype).to(embedding.device)
        self._places = torch.arange(length, device=embedding.device)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._model.config.vocab_size

    def read(self, slot: int, token_ids: Sequence[int]) -> None:
        """Begin the text of a slot with tokens, of which no logits are wanted."""
        if token_ids:
            positions = self._places[: len(token_ids)]
            self.logits(torch.full_like(positions, slot), positions, torch.tensor(token_ids, device=positions.device))

    def logits(self, slots: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
        """The logits behind each token, float32 ``[R, V]``. Nothing waits for the device, so a graph can hold it.

        Args:
            slots: int64 ``[R]``.
            positions: int64 ``[R]``, of the tokens, below T; a negative one makes its row padding. No slot but padding
                has a position twice.
            token_ids: int64 ``[R]``, below V; negative ones count as 0.
        """
        slots, positions = torch.where(positions < 0, -1, slots), positions.clamp(min=0)
        is_seen = (self._places <= positions[:, None])[:, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._keys[layer], self._values[layer]
            keys[slots, positions], values[slots, positions] = k, v
            return _mixed(q, keys[slots], values[slots], is_seen)

        rotary = self._rotary[:, positions, None]
        found = transformer.logits(*self._parts, token_ids.clamp(min=0), rotary, attend)
        return found.to(torch.float32)

    @property
    def _parts(self) -> tuple[transformer.Config, transformer.Weights]:
        return self._model.config, self._model.weights


def _mixed(q: Tensor, keys: Tensor, values: Tensor, is_seen: Tensor) -> Tensor:
    """Attention of one token a row: queries ``[R, H, D]``, keys and values ``[R, T, G, D]``, bool ``[R, 1, 1, T]``."""
    grouped = q.unflatten(1, (keys.shape[2], -1))
    scores = torch.einsum("rghd,rtgd->rght", grouped, keys) * keys.shape[-1] ** -0.5
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    return torch.einsum("rght,rtgd->rghd", weights, values).flatten(1, 2)
