"""The drafts of every request that a rule accepts, and one token more."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.batch import VerifyInputs, VerifyOutputs
from compiled_sampler.core.stage import steady_rows
from compiled_sampler.engine.boundary.tensors import INTEGERS, RowFormat, check_rows, check_tensor, empty_outputs
from compiled_sampler.engine.drafts import in_sampler_dtype
from compiled_sampler.functional.arguments import (
    FloatOrRows,
    IntOrRows,
    Parameters,
    check_row_tensor,
    checked_rows,
    chosen_mode,
    known_keywords,
    parameter_rows,
)
from compiled_sampler.functional.backend import run_of
from compiled_sampler.functional.row_table import marked_requests, requests_with_rows
from compiled_sampler.modes import MOST_DRAFTS, Mode, check_rule, check_tree_rule, probabilities_mode, verifying
from compiled_sampler.pipeline.verify import verify_step


class _Rows(NamedTuple):
    """The rows of a verification, as a caller passes them."""

    target: Tensor
    """``[R, >=V]``, logits or probabilities."""
    form: RowFormat
    """Of the target."""
    draft_token_ids: Tensor
    """``[N, K]``."""
    num_drafts: Tensor | None
    """``[N]``; None for K of every request."""
    proposals: Tensor | None
    """``[D, >=V]``, logits or probabilities; None for one-hot drafts."""
    parents: Tensor | None = None
    """``[N, K]``; None for chains."""


@known_keywords
def verify(
    logits: Tensor,
    draft_token_ids: Tensor,
    *,
    temperature: FloatOrRows = 1.0,
    top_k: IntOrRows = 0,
    top_p: FloatOrRows = 1.0,
    min_p: FloatOrRows = 0.0,
    seeds: IntOrRows,
    positions: IntOrRows,
    num_drafts: Tensor | None = None,
    rule: str = "match",
    parents: Tensor | None = None,
    draft_probs: Tensor | None = None,
    draft_logits: Tensor | None = None,
    mode: str | None = None,
    vocab_size: int | None = None,
    top_p_base: str = "top_k",
    backend: str = "auto",
) -> VerifyOutputs:
    """The drafts of every request that the rule accepts, and one token more; the bits of ``Sampler.verify``.

    Parameters, seeds and positions are those of ``sample``, with one a request, ``[N]``, where they are tensors. A
    request out of range emits nothing and has the status ``PARAMETER_OUT_OF_RANGE``; one that ``mode`` does not cover
    likewise has ``NOT_COVERED``.

    Args:
        logits: ``[R, >=V]``, the k_n + 1 rows of request 0, then those of request 1, ...
        draft_token_ids: int64 or int32 ``[N, K]``; entries beyond ``num_drafts`` are not read.
        temperature: as for ``sample``; so are top_k, top_p, min_p and seeds.
        top_k: see there.
        top_p: see there.
        min_p: see there.
        seeds: see there.
        positions: int64 or int32 ``[N]``, or a number for all, >= 0, of the first token that may be drawn.
        num_drafts: int64 or int32 ``[N]`` on the device, k_n in [0, K], or -1 for padding without rows; None for K of
            every request. A request whose rows would lie behind the last row of logits or proposals is out of range.
        rule: "match", "rejection" or "block".
        parents: int64 or int32 ``[N, K]``, of trees of drafts as in ``Sampler.verify``; None for chains.
        draft_probs: float32 ``[D, >=V]`` in [0, 1], what the drafts were drawn from, request after request.
        draft_logits: ``[D, >=V]`` of the dtype of the logits, or of 16 bits beside float32 logits.
        mode: as for ``sample``; so are vocab_size, top_p_base and backend.
        vocab_size: see there.
        top_p_base: see there.
        backend: see there.

    Returns:
        New tensors ``[N, K+1]`` and ``[N]``.

    Raises:
        RuntimeError: a capture needs a kernel that was never compiled.
        TypeError, ValueError: a wrong dtype, shape, device, rule or number.
    """
    logits, form = checked_rows(logits, vocab_size)
    parameters = Parameters(seeds, positions, temperature, top_k, top_p, min_p)
    static = chosen_mode(mode, form.vocab_size, top_p_base, parameters)
    if draft_probs is not None and draft_logits is not None:
        raise ValueError("draft_probs and draft_logits must not both be given; pass what the drafts were drawn from")
    if draft_logits is None:
        proposals, drafts = draft_probs, "probabilities"
    else:
        proposals, drafts = in_sampler_dtype(draft_logits, form.dtype), "logits"
    rows = _Rows(logits, form, draft_token_ids, num_drafts, proposals, parents)
    return _verified(static, rule, drafts, rows, parameters, backend)


@known_keywords
def verify_from_probs(
    target_probs: Tensor,
    draft_token_ids: Tensor,
    *,
    seeds: IntOrRows,
    positions: IntOrRows,
    num_drafts: Tensor | None = None,
    rule: str = "match",
    draft_probs: Tensor | None = None,
    vocab_size: int | None = None,
    backend: str = "auto",
) -> VerifyOutputs:
    """``verify`` for a caller that has probabilities: no filter is applied; the bits of ``Sampler.verify_from_probs``.

    Args:
        target_probs: float32 ``[R, >=V]`` in [0, 1], rows as the logits of ``verify``; each is divided by its sum.
        draft_token_ids: as for ``verify``, like all that follows.
        seeds: see there.
        positions: see there.
        num_drafts: see there.
        rule: see there.
        draft_probs: see there.
        vocab_size: see there.
        backend: see there.

    Raises:
        RuntimeError, TypeError, ValueError: as ``verify``.
    """
    probs, form = checked_rows(target_probs, vocab_size, "target_probs")
    if form.dtype is not torch.float32:
        raise TypeError(f"target_probs must be torch.float32, got {form.dtype}; convert with .to(torch.float32)")
    rows = _Rows(probs, form, draft_token_ids, num_drafts, draft_probs)
    mode = probabilities_mode(form.vocab_size)
    return _verified(mode, rule, "probabilities", rows, Parameters(seeds, positions), backend)


def _verified(mode: Mode, rule: str, drafts: str, rows: _Rows, parameters: Parameters, backend: str) -> VerifyOutputs:
    """The outputs of a verification, after checks of all that is left to check."""
    check_rule(rule)
    _check_rows(rows, "target_probs" if mode.from_probabilities else "logits")
    target, form, draft_token_ids, num_drafts, proposals, parents = rows
    if parents is not None:
        check_tree_rule(rule, "one_hot" if proposals is None else drafts)
        check_tensor("parents", parents, INTEGERS, form.device)
        if parents.shape != draft_token_ids.shape:
            shapes = list(draft_token_ids.shape), list(parents.shape)
            raise ValueError(f"parents must be {shapes[0]} like draft_token_ids, got {shapes[1]}; pad with -1")
        parents = parents.to(torch.int64)
    if proposals is not None:
        _check_proposals(rule, drafts, proposals, rows)
        proposals = proposals.detach()
    run, (count, width) = run_of(backend), draft_token_ids.shape
    if not count:
        return empty_outputs(VerifyOutputs, width + 1, form.device, of_trees=parents is not None)
    target, proposals = steady_rows(run, target), None if proposals is None else steady_rows(run, proposals)
    requests, first_positions = parameter_rows(mode, parameters, count, form.device, run)
    tokens = draft_token_ids.to(torch.int64)
    counts = torch.full_like(first_positions, width) if num_drafts is None else num_drafts.to(torch.int64)
    slots, counts, flags = run(requests_with_rows, target, requests.slots, counts, tokens, proposals)
    inputs = VerifyInputs(target, slots, first_positions, counts, tokens, proposals, requests.table)
    inputs = inputs._replace(parents=parents)
    static = verifying(mode, rule, "one_hot" if proposals is None else drafts)
    return run(marked_requests, verify_step(static, inputs, run), flags)


def _check_rows(rows: _Rows, name: str) -> None:
    """Raise unless drafts are integers ``[N, K]`` on the device of the target, which has rows for them."""
    target, form, draft_token_ids, num_drafts, *_ = rows
    check_tensor("draft_token_ids", draft_token_ids, INTEGERS, form.device)
    if draft_token_ids.dim() != 2 or draft_token_ids.shape[1] > MOST_DRAFTS:
        shape = list(draft_token_ids.shape)
        raise ValueError(f"draft_token_ids must be [N, K], K at most {MOST_DRAFTS}, got {shape}; pad rows with -1")
    count, width = draft_token_ids.shape
    if num_drafts is not None:
        check_row_tensor("num_drafts", num_drafts, INTEGERS, count, form.device)
    elif target.shape[0] != count * (width + 1):
        raise ValueError(
            f"{name} must be [{count * (width + 1)}, >= V], {width + 1} rows a request, got {list(target.shape)}; "
            "num_drafts says how many drafts each request has"
        )
    if count and not target.shape[0]:
        raise ValueError(
            f"{name} must have a row at least for {count} requests, got {list(target.shape)}; num_drafts of -1 has none"
        )


def _check_proposals(rule: str, drafts: str, proposals: Tensor, rows: _Rows) -> None:
    """Raise unless proposals fit the rule, the target and, where it is known, the number of drafts."""
    form, count = rows.form, rows.draft_token_ids.numel() if rows.num_drafts is None else None
    name, dtype = ("draft_probs", torch.float32) if drafts == "probabilities" else ("draft_logits", form.dtype)
    if rule == "match":
        raise ValueError(f"rule 'match' never looks at draft_probs or draft_logits, got {name}; leave it out")
    wanted = RowFormat(form.vocab_size, dtype, form.device)
    check_rows(name, proposals, count, wanted, "reshape it", ", one row a draft")
