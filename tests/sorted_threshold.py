"""What a search of a threshold must find: the whole row sorted, the filters applied, the last token kept."""

import torch
from torch import Tensor

from compiled_sampler.core.filters import keep_prefix, keep_top_k, last_kept, ordered_logits
from compiled_sampler.core.mass import exp2_mass
from compiled_sampler.core.order import indices, order_key, pack, row_logits


def sorted_threshold(
    logits: Tensor, scale: Tensor, top_k: Tensor, top_p: Tensor, *, vocab_size: int, base_is_row: bool
) -> Tensor:
    """The last token that top-k and top-p keep, by sorting the row: int64 ``[R]``, packed (order key, id).

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        scale: float32 ``[R]``, ``log2(e) / temperature``.
        top_k: int64 ``[R]``.
        top_p: float64 ``[R]``.
        vocab_size: V.
        base_is_row: whether top-p is measured on the whole row rather than on the mass after top-k.
    """
    packed = pack(order_key(row_logits(logits, vocab_size)), indices(vocab_size, logits.device))
    ordered = packed.sort(-1, descending=True).values
    weights = exp2_mass(ordered_logits(ordered, scale))
    in_top_k = keep_top_k(ordered, top_k)
    base = torch.where(in_top_k | base_is_row, weights, 0).sum(-1)
    keep = keep_prefix(ordered, torch.where(in_top_k, weights, 0), top_k, top_p, base)
    return last_kept(ordered, keep)
