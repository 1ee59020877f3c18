"""Steps that are asked for logprobs, without an engine: inputs, and the rows of what they return."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compiled_sampler import Sampler
from compiled_sampler.batch import SampleInputs
from compiled_sampler.core.rows import RowSlots
from compiled_sampler.core.stage import Run, call
from compiled_sampler.logprobs import LAWS, LogprobInputs, LogprobOutputs, Logprobs
from compiled_sampler.modes import RULES, Mode
from compiled_sampler.params import SamplingParams
from compiled_sampler.pipeline.logprobs import logprobs_of
from compiled_sampler.pipeline.schedule import Schedule, StepRun, schedule_for
from tests.oracles import oracle_logprobs as oracle

EVERYTHING = [
    Logprobs(top=5, of=of, token_ids=(0, 3), rank=True, entropy=True, num_kept=True, boundary=True) for of in LAWS
]
"""Each law with all that can be asked for, of V > 3."""


def filters_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def processed_scale(params: Sequence[SamplingParams]) -> Tensor:
    """``log2(e) / temperature`` of each request, at temperature 1 for temperature 0."""
    return torch.tensor([math.log2(math.e) / (each.temperature or 1.0) for each in params])


def logprobs(
    mode: Mode,
    inputs: SampleInputs,
    token_ids: Tensor,
    wanted: Logprobs,
    run: Run = call,
    *,
    edited: Tensor | None = None,
    scale: Tensor | None = None,
    schedule: Schedule | None = None,
) -> LogprobOutputs:
    """The logprobs of the rows of a step in a mode; the results are on the device of the inputs."""
    raw = inputs.logits
    row_slots = RowSlots(inputs.table, inputs.slots, inputs.positions)
    schedule = schedule_for(mode, raw.shape[0], raw.device) if schedule is None else schedule
    ids = None if wanted.token_ids is None else torch.tensor([wanted.token_ids] * raw.shape[0], device=raw.device)
    tensors = (raw, raw if edited is None else edited, row_slots, token_ids)
    return logprobs_of(StepRun(run, schedule), *tensors, LogprobInputs(wanted, ids, scale))


def on_device(values: Any, device: torch.device) -> Any:
    """Nested tuples with their tensors on a device."""
    return tree_map_only(Tensor, lambda each: each.to(device), values)


def differing(left: LogprobOutputs, right: LogprobOutputs) -> list[str]:
    """Names of the fields that are not the same bits; a float has one NaN, and none is expected."""
    return [name for name in left._fields if not _same(getattr(left, name), getattr(right, name))]


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    left, right = (each.cpu().contiguous() for each in (left, right))
    if left.dtype == torch.float32:
        left, right = left.view(torch.int32), right.view(torch.int32)
    return left.dtype == right.dtype and torch.equal(left, right)


def rows_of(found: LogprobOutputs, index: Any) -> LogprobOutputs:
    return LogprobOutputs(*(None if each is None else each[index] for each in found))


def close(found: float, wanted: float) -> bool:
    """Within the error that the contract allows; -inf is exact."""
    if -math.inf in (found, wanted):
        return found == wanted
    return abs(found - wanted) <= oracle.error_bound(wanted)


def wrong_fields(
    found: Any,
    logits: tuple[list[float], list[float]],
    params: SamplingParams,
    wanted: Logprobs,
    token: int,
    base: str = "top_k",
) -> list[str]:
    """Names of the results of a row that are not the oracle's; logits before and after edits; -1 is no token.

    A boundary that was not asked for is not looked at.
    """
    raw, edited = logits
    filters, x = filters_of(params), raw if wanted.of == "raw" else edited
    law, keep = oracle.law(wanted.of, raw, edited, filters, base), oracle.kept(edited, filters, base)
    top = oracle.top(x, wanted.top, keep if wanted.of == "filtered" else None)
    right = {
        "token": close(found.token.item(), law.get(token, -math.inf)),
        "rank": found.rank.item() == oracle.rank(x, token),
        "top_token_ids": found.top_token_ids.tolist() == top,
        "top": all(close(a, law.get(i, -math.inf)) for a, i in zip(found.top.tolist(), top, strict=True)),
        "given": all(
            close(a, law.get(i, -math.inf)) for a, i in zip(found.given.tolist(), wanted.token_ids, strict=True)
        ),
        "entropy": found.entropy.item() == oracle.entropy(law)
        or abs(found.entropy.item() - oracle.entropy(law)) <= 1e-5,
        "num_kept": found.num_kept.item() == (len(keep) or -1),
        "boundary": not wanted.boundary or found.boundary.item() == oracle.boundary(edited, filters, base),
    }
    return [name for name, is_right in right.items() if not is_right]


def bare(out: Any) -> Any:
    return out._replace(logprobs=None)


def taken(
    sampler: Sampler, slots: list[int], logits: Tensor, positions: Tensor, given: tuple[Tensor | None, Tensor, Any]
) -> list[Any]:
    """Results of a step of each kind of three requests, with drafts of width 2 and 1.

    ``given`` is a mask ``[9, ...]`` like the logits or None, drafts ``[3, 2]``, and what is asked for or None.
    """
    mask, drafts, asked = given
    few, plan = None if mask is None else mask[:3], sampler.plan(slots)
    results = [sampler.sample(plan, logits[:3], positions, token_bitmask=few, logprobs=asked)]
    for rule, width in (*((rule, 2) for rule in RULES), ("match", 1)):
        rows, count = 3 * (width + 1), [width] * 3
        own = sampler.plan(slots, num_drafts=count)
        masked = {"token_bitmask": None if mask is None else mask[:rows], "logprobs": asked}
        results.append(sampler.verify(own, logits[:rows], drafts[:, :width], positions, rule, **masked))
    return results
