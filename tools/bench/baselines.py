"""What else a user would call: small functions from logits to tokens, in torch and from engines that are installed.

They draw from the same law as a case of the benchmark (ties apart), with torch's or the engine's own random numbers.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_sampler import SamplingParams
from tools.bench.batches import Batch
from tools.bench.cases import Case

NOT_INSTALLED = "not installed"
BY_ROW, OF_ALL = "FlashInfer, parameters by row", "FlashInfer, one number for all"
"""FlashInfer as engines call it, with tensors of every row's k, p and temperature; and with numbers."""
Baseline = Callable[[Batch], Tensor]


def baselines_of(case: Case) -> dict[str, Baseline | str]:
    """The baselines of a case by name; ``NOT_INSTALLED`` in place of those that cannot be imported."""
    flashinfer, vllm = imported("flashinfer.sampling"), imported("vllm.v1.sample.ops.topk_topp_sampler")
    if case.rule is not None:
        found: dict[str, Baseline | str] = {"torch, sort-based filters": functools.partial(verified, case.params)}
        found["FlashInfer"] = _bound(flashinfer, flashinfer_verified, case.params)
        return found
    params = case.params
    if params.is_greedy:
        return {"torch.argmax": lambda batch: batch.logits.argmax(-1)}
    torch_only: dict[str, Callable[[SamplingParams, Tensor], Tensor]] = {}
    if not params.top_k and params.top_p == 1.0:
        torch_only["torch.compile, softmax + race"] = compiled(filtered_race)
    else:
        if params.top_k:
            torch_only["torch.topk + race"] = topk_race
        torch_only["torch, sort-based filters"] = sorted_race
    rows: dict[str, Baseline | str] = {name: _of_logits(each, params) for name, each in torch_only.items()}
    rows[BY_ROW] = _bound(flashinfer, functools.partial(flashinfer_sampled, by_row=True), params)
    rows[OF_ALL] = _bound(flashinfer, flashinfer_sampled, params)
    if not params.min_p:
        rows["vLLM"] = _bound(vllm, vllm_sampled, params)
    return rows


def imported(module: str) -> Any:
    """The module, or None where it or what it needs is missing."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError):
        return None


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function compiled for each shape, with code of its own: Dynamo limits the shapes of one code object."""
    copy = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(copy, fullgraph=True, dynamic=False)


def race(probs: Tensor) -> Tensor:
    """A token of each row of ``[R, V]`` by an exponential race: no sync, unlike torch.multinomial."""
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


def filtered_race(params: SamplingParams, logits: Tensor) -> Tensor:
    """Softmax, min_p, race."""
    return race(min_p_kept(params, torch.softmax(logits.float() / params.temperature, -1)))


def min_p_kept(params: SamplingParams, probs: Tensor) -> Tensor:
    """Probabilities ``[R, V]`` with 0 for tokens that min_p drops."""
    if not params.min_p:
        return probs
    return torch.where(probs >= params.min_p * probs.amax(-1, keepdim=True), probs, 0.0)


def topk_race(params: SamplingParams, logits: Tensor) -> Tensor:
    """The top_k largest logits, then top_p and min_p and a race among them."""
    values, ids = logits.float().topk(params.top_k, -1)
    return ids.gather(-1, race(nucleus(params, values / params.temperature))[:, None])[:, 0]


def sorted_race(params: SamplingParams, logits: Tensor) -> Tensor:
    """A race over ``sorted_probs``."""
    return race(sorted_probs(params, logits))


def sorted_probs(params: SamplingParams, logits: Tensor) -> Tensor:
    """What the filters keep of a row, ``[R, V]``: sort it, drop a suffix, scatter the rest back, as engines do."""
    values, ids = (logits.float() / params.temperature).sort(-1, descending=True)
    if params.top_k:
        values[:, params.top_k :] = -torch.inf
    kept = nucleus(params, values)
    return torch.zeros_like(kept).scatter_(-1, ids, kept / kept.sum(-1, keepdim=True))


def nucleus(params: SamplingParams, values: Tensor) -> Tensor:
    """Probabilities of scaled logits ``[R, n]`` in descending order, 0 where top_p or min_p drops the token."""
    probs = torch.softmax(values, -1)
    return min_p_kept(params, torch.where(probs.cumsum(-1) - probs < params.top_p, probs, 0.0))


def verified(params: SamplingParams, batch: Batch) -> Tensor:
    """Leviathan's rejection of the drafts by filtered probabilities: tokens ``[N, K + 1]``, -1 after the last."""
    drafts = _drafts(batch)
    (count, width), vocab_size = drafts.shape, batch.logits.shape[1]
    target = sorted_probs(params, batch.logits).view(count, width + 1, vocab_size)
    ratio = target[:, :width].gather(-1, drafts[..., None])[..., 0]
    if batch.draft_probs is not None:
        ratio = ratio / _proposals(batch, vocab_size).gather(-1, drafts[..., None])[..., 0]
    accepted = (torch.rand_like(ratio) < ratio).long().cumprod(-1).sum(-1)
    requests, judged = torch.arange(count, device=drafts.device), accepted.clamp(max=width - 1)
    if batch.draft_probs is not None:
        rejected = _proposals(batch, vocab_size)[requests, judged]
    else:
        rejected = torch.zeros_like(target[:, 0]).scatter_(-1, drafts[requests, judged][:, None], 1.0)
    residual = target[requests, accepted] - rejected * (accepted < width)[:, None]
    token = race(residual.clamp(min=0.0))
    places = torch.arange(width + 1, device=drafts.device)
    tokens = torch.where(places < accepted[:, None], torch.nn.functional.pad(drafts, (0, 1)), -1)
    return torch.where(places == accepted[:, None], token[:, None], tokens)


class Filters(NamedTuple):
    """Parameters as an engine passes them: numbers, or ``[R]`` of all rows."""

    temperature: float | Tensor
    top_k: int | Tensor
    top_p: float | Tensor
    min_p: float | Tensor


@functools.lru_cache(maxsize=64)
def filters_by_row(params: SamplingParams, rows: int, device: torch.device) -> Filters:
    """Tensors of the parameters, int32 and float32 ``[R]``, made once, as an engine has them before a step."""
    k = torch.full((rows,), params.top_k, dtype=torch.int32, device=device)
    floats = [torch.full((rows,), value, device=device) for value in (params.temperature, params.top_p, params.min_p)]
    return Filters(floats[0], k, *floats[1:])


def flashinfer_sampled(sampling: Any, params: SamplingParams, batch: Batch, *, by_row: bool = False) -> Tensor:
    """FlashInfer's softmax and the sampling kernel for the parameters, given as numbers or ``by_row``."""
    given = Filters(params.temperature, params.top_k, params.top_p, params.min_p)
    if by_row:
        given = filters_by_row(params, batch.logits.shape[0], batch.logits.device)
    probs = sampling.softmax(batch.logits.float(), temperature=given.temperature)
    tokens: Tensor
    if params.min_p and params.top_k:
        probs = sampling.top_p_renorm_probs(sampling.top_k_renorm_probs(probs, given.top_k), given.top_p)
    if params.min_p:
        tokens = sampling.min_p_sampling_from_probs(probs, given.min_p)
    elif params.top_k and params.top_p < 1.0:
        tokens = sampling.top_k_top_p_sampling_from_probs(probs, given.top_k, given.top_p)
    elif params.top_k:
        tokens = sampling.top_k_sampling_from_probs(probs, given.top_k)
    elif params.top_p < 1.0:
        tokens = sampling.top_p_sampling_from_probs(probs, given.top_p)
    else:
        tokens = sampling.sampling_from_probs(probs)
    return tokens


def flashinfer_verified(sampling: Any, params: SamplingParams, batch: Batch) -> Tensor:
    """FlashInfer's filters and its chain of rejections: tokens ``[N, K + 1]``."""
    drafts, vocab_size = _drafts(batch), batch.logits.shape[1]
    probs = sampling.softmax(batch.logits.float(), temperature=params.temperature)
    if params.top_k:
        probs = sampling.top_k_renorm_probs(probs, params.top_k)
    if params.top_p < 1.0:
        probs = sampling.top_p_renorm_probs(probs, params.top_p)
    target = probs.view(batch.num_requests, -1, vocab_size)
    made = sampling.chain_speculative_sampling(_proposals(batch, vocab_size), drafts.int(), target)
    tokens: Tensor = made[0] if isinstance(made, tuple) else made
    return tokens


def vllm_sampled(ops: Any, params: SamplingParams, batch: Batch) -> Tensor:
    """VLLM's filters, which write into the scaled logits, softmax and random_sample."""
    logits = batch.logits.float() / params.temperature
    given = filters_by_row(params, logits.shape[0], logits.device)
    k, p = (given.top_k if params.top_k else None), (given.top_p if params.top_p < 1.0 else None)
    tokens: Tensor = ops.random_sample(torch.softmax(ops.apply_top_k_top_p(logits, k, p), -1), {})
    return tokens


def _drafts(batch: Batch) -> Tensor:
    if batch.draft_token_ids is None:
        raise ValueError("batch must have drafts, got none; make it with verification_batch()")
    return batch.draft_token_ids


def _proposals(batch: Batch, vocab_size: int) -> Tensor:
    """What the drafts were drawn from, ``[N, K, V]``; for one-hot drafts a row with one 1, as engines pass it."""
    drafts = _drafts(batch)
    if batch.draft_probs is not None:
        return batch.draft_probs.view(*drafts.shape, vocab_size)
    ones = torch.ones(*drafts.shape, 1, device=drafts.device)
    return torch.zeros(*drafts.shape, vocab_size, device=drafts.device).scatter_(-1, drafts[..., None], ones)


def _of_logits(function: Callable[[SamplingParams, Tensor], Tensor], params: SamplingParams) -> Baseline:
    return lambda batch: function(params, batch.logits)


def _bound(module: Any, function: Callable[..., Tensor], params: SamplingParams) -> Baseline | str:
    return NOT_INSTALLED if module is None else functools.partial(function, module, params)
