"""The functions themselves: a token for every row, its distribution, drafts that a rule accepts; and what runs them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.batch import ProbabilityOutputs, SampleInputs, SampleOutputs, VerifyInputs, VerifyOutputs
from compiled_sampler.core.stage import Run
from compiled_sampler.engine.boundary.arguments import check_progress
from compiled_sampler.engine.boundary.tensors import INTEGERS, RowFormat, check_rows, check_tensor, empty_outputs
from compiled_sampler.engine.drafts import in_sampler_dtype
from compiled_sampler.functional.arguments import (
    FloatOrRows,
    IntOrRows,
    Parameters,
    check_row_tensor,
    checked_rows,
    chosen_mode,
    draw_index_rows,
    known_keywords,
    parameter_rows,
    shard_rows,
)
from compiled_sampler.functional.row_table import marked, marked_requests, requests_with_rows
from compiled_sampler.lowering.compiled_stages import CompiledStages, Progress
from compiled_sampler.modes import MOST_DRAFTS, Mode, check_rule, check_tree_rule, probabilities_mode, verifying
from compiled_sampler.pipeline.chunks import eagerly
from compiled_sampler.pipeline.law import probability_step
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.pipeline.sharded import drawing_in
from compiled_sampler.pipeline.verify import verify_step
from compiled_sampler.scalars import check_choice
from compiled_sampler.shard import VocabularyShard

BACKENDS = ("auto", "compiled", "eager")


@known_keywords
def sample(
    logits: Tensor,
    *,
    temperature: FloatOrRows = 1.0,
    top_k: IntOrRows = 0,
    top_p: FloatOrRows = 1.0,
    min_p: FloatOrRows = 0.0,
    seeds: IntOrRows,
    positions: IntOrRows,
    draw_index: IntOrRows = 0,
    mode: str | None = None,
    vocab_size: int | None = None,
    top_p_base: str = "top_k",
    backend: str = "auto",
    shard: VocabularyShard | None = None,
) -> SampleOutputs:
    """One token for every row: the bits that ``Sampler.sample`` draws for a request with these parameters.

    A parameter is a number for all rows, or a tensor with one a row on the device of the logits. A number out of range
    raises. In a tensor it cannot: that row gets token -1 and the status ``PARAMETER_OUT_OF_RANGE``. A row in range that
    ``mode`` does not cover gets token -1 and ``NOT_COVERED``.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``, column stride 1.
        temperature: float32 or float64 ``[R]``, 0 (greedy) or in [1e-5, 1e30]; a float32 means the float64 it equals.
        top_k: int64 or int32 ``[R]``, 0 (off) or the number of tokens to keep; 1 is greedy.
        top_p: float32 or float64 ``[R]``, in (0, 1]; 1 keeps all.
        min_p: float32 or float64 ``[R]``, in [0, 1]; 0 keeps all.
        seeds: int64 ``[R]``; a number only for a single row, in [-2**63, 2**64).
        positions: int64 or int32 ``[R]``, >= 0, the position of the token that each row draws.
        draw_index: int64 or int32 ``[R]``, in [0, 2**24), which of several draws of the position this is, such as the
            codebook of a speech model; 0 where there is one.
        mode: name of a mode of ``Sampler.modes``, for tensors whose values are known to need no more; a row that it
            does not cover is ``NOT_COVERED``. None takes the cheapest that covers the numbers and any values of
            tensors.
        vocab_size: V; None takes all columns, with ``shard`` those of all ranks.
        top_p_base: as for ``Sampler``.
        backend: "auto" and "compiled" run in eager torch until background processes have compiled them; "eager" stays.
        shard: as for ``Sampler``: logits are ``[R, >= width]`` of this rank's columns, all else is the same on every
            rank, as are the results.

    Returns:
        New tensors on the device of the logits.

    Raises:
        RuntimeError: a capture needs a kernel that was never compiled.
        TypeError, ValueError: a wrong dtype, shape, device or number.
    """
    if shard is None:
        logits, form = checked_rows(logits, vocab_size)
    else:
        logits, form = shard_rows(logits, vocab_size, shard)
    parameters = Parameters(seeds, positions, temperature, top_k, top_p, min_p)
    static = chosen_mode(mode, form.vocab_size, top_p_base, parameters)
    run, count = run_of(backend), logits.shape[0]
    if not count:
        return empty_outputs(SampleOutputs, 0, form.device)
    inputs = _sample_inputs(static, logits, parameters, run)
    inputs = inputs._replace(draw_index=draw_index_rows(draw_index, count, form.device))
    drawn = sample_step(static, inputs, run, None if shard is None else drawing_in(shard))
    return run(marked, drawn, inputs.slots)


@known_keywords
def probs(
    logits: Tensor,
    *,
    temperature: FloatOrRows = 1.0,
    top_k: IntOrRows = 0,
    top_p: FloatOrRows = 1.0,
    min_p: FloatOrRows = 0.0,
    mode: str | None = None,
    vocab_size: int | None = None,
    top_p_base: str = "top_k",
    backend: str = "auto",
) -> Tensor:
    """The distribution that ``sample`` draws each row's token from, float32 ``[R, V]``; the bits of ``Sampler.probs``.

    Arguments and errors are those of ``sample``. A row that is all masked, out of range or
    not covered is 0 throughout.
    """
    logits, form = checked_rows(logits, vocab_size)
    seeds = torch.zeros(logits.shape[0], dtype=torch.int64, device=form.device)  # a law has no noise
    parameters = Parameters(seeds, 0, temperature, top_k, top_p, min_p)
    static = chosen_mode(mode, form.vocab_size, top_p_base, parameters)
    run = run_of(backend)
    if not len(logits):
        return empty_outputs(ProbabilityOutputs, form.vocab_size, form.device).probabilities
    return probability_step(static, _sample_inputs(static, logits, parameters, run), run).probabilities


def _sample_inputs(mode: Mode, logits: Tensor, parameters: Parameters, run: Run) -> SampleInputs:
    """Logits ``[R, n]`` with the parameters of their rows."""
    rows, positions = parameter_rows(mode, parameters, len(logits), logits.device, run)
    return SampleInputs(run.steady_rows(logits), rows.slots, positions, rows.table)


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


def warmup(progress: Progress | None = None) -> None:
    """Compile the stages of all calls that were made before, and wait for them.

    Until then, and until background processes have compiled them, calls run in eager torch with the same bits. A call
    can be captured in a CUDA graph after it was made, after ``warmup()``, and made once more.

    Args:
        progress: called as ``progress(done, total, label)`` for each stage that is ready.
    """
    check_progress(progress)
    _shared_stages().compile_all(progress)


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
    target = run.steady_rows(target)
    proposals = None if proposals is None else run.steady_rows(proposals)
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


def run_of(backend: str) -> Run:
    """What runs the stages of a call."""
    check_choice("backend", backend, BACKENDS, "to replay a graph, capture the call in your own")
    return eagerly if backend == "eager" else _shared_stages()


@functools.cache
def _shared_stages() -> CompiledStages:
    return CompiledStages()
