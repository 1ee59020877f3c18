"""One token for every row of logits, or the distribution that it is drawn from."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.batch import ProbabilityOutputs, SampleInputs, SampleOutputs
from compiled_sampler.core.stage import steady_rows
from compiled_sampler.engine.boundary.tensors import empty_outputs
from compiled_sampler.functional.arguments import (
    FloatOrRows,
    IntOrRows,
    Parameters,
    checked_rows,
    chosen_mode,
    draw_index_rows,
    known_keywords,
    parameter_rows,
    shard_rows,
)
from compiled_sampler.functional.backend import run_of
from compiled_sampler.functional.row_table import marked
from compiled_sampler.pipeline.law import probability_step
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.pipeline.sharded import drawing_in
from compiled_sampler.shard import VocabularyShard


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
        backend: "auto" and "compiled" compile at the first call; "eager" is plain torch.
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
    rows, row_positions = parameter_rows(static, parameters, count, form.device, run)
    draws = draw_index_rows(draw_index, count, form.device)
    inputs = SampleInputs(steady_rows(run, logits), rows.slots, row_positions, rows.table, draw_index=draws)
    drawn = sample_step(static, inputs, run, None if shard is None else drawing_in(shard))
    return run(marked, drawn, rows.slots)


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
    run, count = run_of(backend), logits.shape[0]
    if not count:
        return empty_outputs(ProbabilityOutputs, form.vocab_size, form.device).probabilities
    rows, row_positions = parameter_rows(static, parameters, count, form.device, run)
    inputs = SampleInputs(steady_rows(run, logits), rows.slots, row_positions, rows.table)
    return probability_step(static, inputs, run).probabilities
