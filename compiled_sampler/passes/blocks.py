"""Rows cut into blocks, and gathers of single tokens.

Inductor never splits a reduction over a whole row if it is an argmax, and splits it badly if it has a long producer.
Blocks that are padded before any arithmetic fuse with their producers, run wide even for a single row, and leave a
short second reduction.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import DraftTable
from compiled_sampler.core.order import MASKED_KEY, indices, row_logits
from compiled_sampler.edits.masks import MaskedLogits, has_bit, masked, token_words, unmasked

AnyLogits = Tensor | MaskedLogits
"""Logits ``[R, >=V]``, or such with masks beside them, which every function here that reads logits applies."""


class Slice(NamedTuple):
    """A slice of every block of a row; the slices of a block stand in the order of their token ids."""

    x: Tensor
    """float32 ``[R, B, n]``."""
    ids: Tensor
    """int32 ``[B, n]``, token ids."""


def in_blocks(x: Tensor, block: int, fill: float) -> Tensor:
    """``[R, n]`` as ``[R, ceil(n / block), block]``, padded at the end with ``fill``."""
    # The padded row is viewed by strides: Inductor then sees a reduction over a contiguous buffer, which never leaves
    # registers, and keeps a whole block of up to 1024 tokens in them. With view it loops over the block instead.
    padding = -x.shape[1] % block
    if not padding:
        return x.view(x.shape[0], x.shape[1] // block, block)
    x = F.pad(x, (0, padding), value=fill)
    return x.as_strided((x.shape[0], x.shape[1] // block, block), (x.shape[1], block, 1))


def values_of(logits: AnyLogits) -> Tensor:
    """The logits before masks that stand beside them, ``[R, >=V]``."""
    return logits.logits if isinstance(logits, MaskedLogits) else logits


def words_of(logits: AnyLogits, vocab_size: int) -> Tensor | None:
    """The bits of the tokens that each row may draw, int32 ``[R, ceil(V / 32)]``; None without a mask."""
    return logits.words(vocab_size) if isinstance(logits, MaskedLogits) else None


def logits_of_rows(logits: AnyLogits, row_ids: Tensor, vocab_size: int) -> Tensor:
    """Float32 logits of the rows ``row_ids``, int64 ``[n]``: ``[n, V]``."""
    if not isinstance(logits, MaskedLogits):
        return row_logits(logits[row_ids], vocab_size)
    words = token_words(logits.words(vocab_size)[row_ids], vocab_size)
    return unmasked(row_logits(logits.logits[row_ids], vocab_size), words, indices(vocab_size, row_ids.device))


def all_logits(logits: AnyLogits, vocab_size: int) -> Tensor:
    """Float32 logits ``[R, V]``."""
    return (
        masked(*logits, vocab_size=vocab_size) if isinstance(logits, MaskedLogits) else row_logits(logits, vocab_size)
    )


def logit_blocks(logits: AnyLogits, vocab_size: int, block: int) -> tuple[Tensor, Tensor]:
    """Float32 logits ``[R, B, block]``, padded with -inf, and their int32 token ids ``[B, block]``."""
    # The logits are padded before they are converted to float32: otherwise Inductor selects between logit and padding
    # once more for each 16-bit logit.
    x = in_blocks(values_of(logits)[:, :vocab_size], block, float("-inf"))
    ids = indices(x.shape[1] * block, x.device).view(-1, block)
    x = x.to(torch.float32)
    if isinstance(logits, MaskedLogits):
        words = logits.words(vocab_size)
        by_token = block % 32 != 0
        bits = in_blocks(token_words(words, vocab_size), block, 0) if by_token else _words_of(words, block, 1)[0]
        x = unmasked(x, bits, ids)
    return x, ids


def logit_slices(logits: AnyLogits, vocab_size: int, block: int, slices: int) -> list[Slice]:
    """The slices of each block, float32 logits padded with -inf and their token ids; ``slices`` of them."""
    # Several slices are not made from in_blocks: if a view by strides is cut, Inductor writes the padded row to memory
    # first.
    if slices == 1:
        return [Slice(*logit_blocks(logits, vocab_size, block))]
    x = F.pad(values_of(logits)[:, :vocab_size], (0, -vocab_size % block), value=float("-inf"))
    x = x.view(x.shape[0], x.shape[1] // block, block)
    parts = in_slices(x, indices(x.shape[1] * block, x.device).view(-1, block), slices)
    plain_slices = [Slice(part.to(torch.float32), ids) for part, ids in parts]
    if not isinstance(logits, MaskedLogits):
        return plain_slices
    words = _words_of(logits.words(vocab_size), block, slices)
    return [Slice(unmasked(x, bits, ids), ids) for (x, ids), bits in zip(plain_slices, words, strict=True)]


def _words_of(words: Tensor, block: int, slices: int) -> list[Tensor]:
    """The words with the bits of each slice's tokens, int32 ``[R, B, n]`` of ``[R, W]``; ``[R, B, 1]`` of one word."""
    # Each word is loaded for a block, a multiple of 32 tokens, and chosen by the token's place.
    width = block // slices
    block_words = [_every(words, block // 32, first) for first in range(block // 32)]
    place = indices(width, words.device) >> 5
    chosen_words = []
    for first in range(0, block, width):
        *others, chosen = (word[..., None] for word in block_words[first // 32 : -(-(first + width) // 32)])
        for number, word in enumerate(others):
            chosen = torch.where(place == number, word, chosen)
        chosen_words.append(chosen)
    return chosen_words


def _every(values: Tensor, step: int, first: int) -> Tensor:
    """Values ``[R, n]`` at ``first`` and every ``step`` places on, ``[R, ceil(n / step)]``; behind the last, any."""
    # The place is clamped rather than the values padded: Inductor would load a padded value for each token of a block.
    count, most = -(-values.shape[1] // step), values.shape[1] - 1
    if first + (count - 1) * step <= most:
        return values[:, first::step]
    return values[:, (indices(count, values.device) * step + first).clamp(max=most)]


def in_slices(x: Tensor, ids: Tensor, slices: int) -> list[Slice]:
    """Each block ``[R, B, block]`` with ids ``[B, block]`` as ``slices`` slices of neighbouring tokens."""
    # A thread of a GPU first reduces its elements of all slices on its own, so that fewer shuffles between threads
    # follow.
    num_rows, num_blocks, block = x.shape
    parts = x.view(num_rows, num_blocks, slices, block // slices).unbind(2)
    part_ids = ids.view(num_blocks, slices, block // slices).unbind(1)
    return [Slice(*part) for part in zip(parts, part_ids, strict=True)]


def all_rows(values: Tensor | DraftTable) -> Tensor:
    """The rows ``[R, >=V]`` that row ids count: of a draft table K for each slot, as a view."""
    return values if isinstance(values, Tensor) else values.logits.flatten(0, 1)


def rows_in_blocks(values: Tensor | DraftTable, row_ids: Tensor, vocab_size: int, block: int) -> Tensor:
    """Float32 values of the rows ``row_ids`` in blocks, ``[n, B, block]``, padded with -inf."""
    # The padding is masked by token id: Inductor would load the row ids under the mask of a pad, as floats.
    values = all_rows(values)
    if vocab_size % block == 0:
        return row_logits(values[row_ids], vocab_size).view(row_ids.shape[0], -1, block)
    ids = torch.arange(-(-vocab_size // block) * block, device=values.device).view(-1, block)
    x = values[row_ids[:, None, None], ids.clamp(max=vocab_size - 1)].to(torch.float32)
    return torch.where(ids < vocab_size, x, float("-inf"))


def rows_in_windows(values: Tensor | DraftTable, row_ids: Tensor, vocab_size: int, block: int) -> tuple[Tensor, Tensor]:
    """Float32 values of the rows ``row_ids`` in windows, ``[n, B, block]``, and int32 token ids ``[B, block]``."""
    # There is no padding: the last window reaches back into the block before it, which changes no maximum. Without a
    # mask or a clamp per token, loads are vectorised.
    values = all_rows(values)
    if vocab_size < block:
        x = rows_in_blocks(values, row_ids, vocab_size, block)
        return x, indices(block, values.device)[None]
    first = torch.arange(-(-vocab_size // block), device=values.device) * block
    ids = first.clamp(max=vocab_size - block)[:, None] + torch.arange(block, device=values.device)
    return values[row_ids[:, None, None], ids].to(torch.float32), ids.to(torch.int32)


def own_tokens(ids: Tensor, block: int) -> Tensor:
    """Mask of the tokens of each window that no window before it holds: bool ``[B, block]`` from int32 ids."""
    # False where the last window reaches back into the block before it.
    return ids >= indices(ids.shape[0], ids.device)[:, None] * block


def widened(values: Tensor, block: int) -> Tensor:
    """Int32 ``[R, max(B, block)]``: ``values`` ``[R, B]`` padded with ``MASKED_KEY`` to at least a block's width."""
    # A stage that reduces the blocks of a row and then the tokens of the best block becomes one kernel if both
    # reductions have one width.
    missing = block - values.shape[1]
    return F.pad(values, (0, missing), value=MASKED_KEY) if missing > 0 else values


def gather_logits(logits: AnyLogits, ids: Tensor, vocab_size: int) -> Tensor:
    """Float32 logits of the given token ids, in the shape of ``ids``; -inf for ids of V and above."""
    # A negative id reads token 0, and callers ignore what it gives.
    inside, read = ids < vocab_size, ids.clamp(0, vocab_size - 1).flatten(1)
    x = values_of(logits).gather(1, read).view(ids.shape).to(torch.float32)
    if isinstance(logits, MaskedLogits):
        inside = inside & has_bit(logits.words_at(read), read.to(torch.int32)).view(ids.shape)
    return torch.where(inside, x, float("-inf"))


def gather_logits_of(logits: Tensor | DraftTable, row_ids: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """``gather_logits`` of ``ids`` ``[n, m]`` in the rows ``row_ids``, int64 ``[n]``, without a copy of these rows."""
    x = all_rows(logits)[row_ids[:, None], ids.clamp(0, vocab_size - 1)].to(torch.float32)
    return torch.where(ids < vocab_size, x, float("-inf"))
