"""Logprobs of tokens once more, from the logits that were sampled, and which tokens the filters had kept of them.

A sampler that is asked for the ``boundary`` tells with eight bytes a token which tokens its filters kept. For logits of
the same bits the kept set is the sampler's own, token for token; for other logits it is not: it is what stands at or
above an absolute place. A trainer with other weights needs the set itself, see ``replay``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.core.order import indices, is_visible, last_of, reaches
from compiled_sampler.params import SamplingParams
from compiled_sampler.shard import VocabularyShard

_NO_BOUNDARY = -1  # of padding and of rows that are all masked; no packed key has these bits


def replay(
    edited_logits: Tensor,
    params: SamplingParams | Sequence[SamplingParams],
    token_ids: Tensor,
    boundary: Tensor,
    *,
    dtype: torch.dtype = torch.float64,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor]:
    """The logprobs of tokens in the law that they were drawn from, and the tokens of that law.

    It is plain torch and differentiable with respect to the logits; the kept set is a constant of the gradient.

    The kept set is that of the sampler for the logits that were sampled, or others of the same bits. A boundary is the
    key of a logit, which no shift or change of the row moves along: of other logits the tokens at or above it are kept,
    and a drawn token below it has -inf. Of 4,096 rows (V = 1,000, ``3 * randn``, temperature 0.8, top_p 0.9) that is
    none with the same logits, 13.7% with all of them 1 lower, 1.8% rounded to bfloat16, 2.1% with ``0.05 * randn``
    added, and all with their ``log_softmax``. Requests without filters keep every visible token of any logits.

    So a trainer with other weights takes ``kept`` of the rollout's logits, and the law of its own over that set. Its
    logprobs of drawn tokens are finite, and comparable with those of the rollout; rows without a token have none::

        torch.where(kept, new_logits / temperature, -torch.inf).log_softmax(-1)

    Args:
        edited_logits: float32, bfloat16 or float16 ``[R, V]``, after edits and without columns of padding: those that
            were sampled, or of the same bits.
        params: of the request of each row, R of them, or one for all rows.
        token_ids: int64 or int32 ``[R]``; -1 for none. What is no token id has -inf.
        boundary: int64 ``[R]``, from ``LogprobOutputs.boundary``.
        dtype: that the logprobs are computed in. float64 is within 2e-6 of the sampler's "filtered" logprobs; float32
            takes half the memory. No other one.
        shard: of the columns that ``edited_logits`` are, of a head that is split over ranks; all else is the same on
            every rank. Logprobs are too, within the rounding of a sum in another order; the kept set has the shard's
            columns. Each rank takes the gradient of the same loss, and gets that of its own columns.

    Returns:
        Logprobs ``[R]`` of ``dtype``, -inf for tokens that are not kept; and the kept set, bool ``[R, V]``.

    Raises:
        TypeError: no tensors, tensors of other dtypes, or params that are none.
        ValueError: tensors of other shapes, or another number of params.
    """
    _check_params(params)
    _check(edited_logits, params, token_ids, boundary)
    if dtype not in (torch.float64, torch.float32):
        raise TypeError(f"dtype must be torch.float64 or torch.float32, got {dtype!r}; logprobs are computed in it")
    x, width, start = edited_logits.to(torch.float32), edited_logits.shape[1], 0 if shard is None else shard.start
    x = x if width else F.pad(x, (0, 1), value=float("-inf"))  # of a shard without a token
    ids = token_ids.to(torch.int64)[:, None] - start
    kept = kept_from_boundary(x.detach(), boundary, start)
    has_law = _any(kept, shard)
    in_law = torch.where(has_law, kept & _likely(x.detach(), kept, shard), True)  # a row without a law gets no NaN
    scaled = _below_largest(x, in_law, dtype, shard) * _inverse_temperatures(params, x).to(dtype)[:, None]
    law = torch.where(in_law, scaled, float("-inf"))
    is_token = (ids >= 0) & (ids < x.shape[1])
    index = torch.where(is_token, ids, 0)
    if shard is None:
        logprobs = law.log_softmax(-1).gather(1, index)
        is_kept = is_token & has_law & in_law.gather(1, index)
    else:
        is_own = is_token & in_law.gather(1, index)
        own = torch.where(is_own, law.gather(1, index), 0.0)
        summed = torch.stack([own, law.exp().sum(-1, keepdim=True)])
        token, total = _TotalOverRanks.apply(summed, shard).unbind()  # type: ignore[no-untyped-call]
        logprobs, is_kept = token - total.log(), has_law & _any(is_own, shard)
    return torch.where(is_kept, logprobs, float("-inf"))[:, 0], kept[:, :width]


class _TotalOverRanks(torch.autograd.Function):
    """The sum over ranks, all of which take the gradient of one loss: that of a summand is that of the sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, shard: VocabularyShard) -> Tensor:
        """The sum."""
        return shard.total(values.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient as it is."""
        return grad, None


def _any(mask: Tensor, shard: VocabularyShard | None) -> Tensor:
    """Whether a token of the row is in a mask, ``[R, V]`` or the columns of a shard: bool ``[R, 1]``."""
    found = mask.any(-1, keepdim=True)
    return found if shard is None else shard.maximum(found.to(torch.int64)) > 0


def kept_from_boundary(x: Tensor, boundary: Tensor, start: int = 0) -> Tensor:
    """Mask of the visible tokens that stand no later in the order than the boundary: bool ``[R, V]``.

    Args:
        x: float32 ``[R, V]``, logits after edits.
        boundary: int64 ``[R]``.
        start: the token id of the first column.
    """
    last = last_of(boundary[:, None], by_key=True)
    stands_before = reaches(x, indices(x.shape[1], x.device) + start, last)
    return is_visible(x) & stands_before & (boundary != _NO_BOUNDARY)[:, None]


def _likely(x: Tensor, kept: Tensor, shard: VocabularyShard | None) -> Tensor:
    """Mask of the tokens that can have a probability: all, but beside a ``+inf`` token only those."""
    infinite = kept & (x == float("inf"))
    return infinite | ~_any(infinite, shard)


def _below_largest(x: Tensor, in_law: Tensor, dtype: torch.dtype, shard: VocabularyShard | None) -> Tensor:
    """Logits of the law less the largest of them, ``[R, V]`` at most 0, which no temperature makes infinite; else 0."""
    is_finite = in_law & x.detach().isfinite()
    largest = torch.where(is_finite, x.detach(), float("-inf")).amax(-1, keepdim=True)
    if shard is not None:
        largest = shard.maximum(largest)
    return torch.where(is_finite, x.to(dtype) - largest.to(dtype), 0.0)


def _inverse_temperatures(params: SamplingParams | Sequence[SamplingParams], x: Tensor) -> Tensor:
    """``1 / temperature`` of each row, float64 ``[R]``; 1 for temperature 0, whose kept set is one token."""
    requests = [params] * x.shape[0] if isinstance(params, SamplingParams) else params
    return torch.tensor(
        [1.0 / (request.temperature or 1.0) for request in requests], dtype=torch.float64, device=x.device
    )


def _check_params(params: object) -> None:
    """Raise unless params are ``SamplingParams``, or a sequence of them."""
    one_or_more = [params] if isinstance(params, SamplingParams) else params
    if not isinstance(one_or_more, Sequence) or not all(isinstance(request, SamplingParams) for request in one_or_more):
        raise TypeError(f"params must be SamplingParams, or a list of them, got {params!r}; sampler.request(slot)")


def _check(
    logits: Tensor, params: SamplingParams | Sequence[SamplingParams], token_ids: Tensor, boundary: Tensor
) -> None:
    """Raise unless the arguments of ``replay`` have its dtypes and shapes."""
    for name, tensor in (("edited_logits", logits), ("token_ids", token_ids), ("boundary", boundary)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}; torch.as_tensor converts")
    if token_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"token_ids must be int64 or int32, got {token_ids.dtype}; token_ids.to(torch.int64)")
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16) or boundary.dtype != torch.int64:
        raise TypeError(
            "edited_logits must be float32, bfloat16 or float16 and boundary int64, got "
            f"{logits.dtype} and {boundary.dtype}; the kept set is exact for the dtype that was sampled"
        )
    if logits.dim() != 2 or token_ids.shape != boundary.shape or token_ids.shape != logits.shape[:1]:
        raise ValueError(
            "edited_logits must be [R, V], token_ids and boundary [R], got "
            f"{[*logits.shape]}, {[*token_ids.shape]} and {[*boundary.shape]}; flatten requests and places into rows"
        )
    if not isinstance(params, SamplingParams) and len(params) != logits.shape[0]:
        raise ValueError(
            f"params must be one for each of {logits.shape[0]} rows, got {len(params)}; pass one SamplingParams alone "
            "for all rows"
        )
