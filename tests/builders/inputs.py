"""Inputs of the sampler for tests: slot tables from parameters, rows of logits, and what a step does with them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_sampler.batch import SampleInputs, SampleOutputs, SlotTable
from compiled_sampler.core.filters import keep_candidates
from compiled_sampler.core.noise import TARGET
from compiled_sampler.core.order import MASKED_KEY, last_of, magnitude_bits, pack, packed_id, row_logits
from compiled_sampler.core.rows import RowParams, gather_rows, row_slots_of
from compiled_sampler.core.score import admitted_key, score_key
from compiled_sampler.core.stage import Run, call
from compiled_sampler.engine.requests.slots import SlotState
from compiled_sampler.modes import Mode, mode_table, uncovered
from compiled_sampler.params import SamplingParams
from compiled_sampler.passes.race import draw_from_candidates, race_maxima, tokens_from_packed
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.pipeline.schedule import StepRun, schedule_for
from compiled_sampler.pipeline.search import candidates_and_thresholds, threshold_of

VOCAB_SIZES = (1, 2, 63, 64, 127, 129, 600, 5000)
BASES = ("top_k", "all")

Numbers = Sequence[int] | Tensor


def slot_table(params: Sequence[SamplingParams], vocab_size: int) -> SlotTable:
    state = SlotState(len(params), mode_table(vocab_size, "top_k"), torch.device("cpu"))
    assert [state.add(p) for p in params] == list(range(len(params)))
    state.upload()
    return state.table


def sample_inputs(logits: Tensor, params: Sequence[SamplingParams], positions: Numbers | None = None) -> SampleInputs:
    """One row for each request, at positions 0, 1, ... unless given."""
    rows = torch.arange(logits.shape[0])
    where = rows if positions is None else torch.as_tensor(positions)
    return SampleInputs(logits, rows, where, slot_table(params, logits.shape[1]))


def repeated(logits: Tensor, params: SamplingParams, count: int) -> SampleInputs:
    """One request's row of logits at ``count`` consecutive positions."""
    slots = torch.zeros(count, dtype=torch.int64)
    table = slot_table([params], logits.shape[-1])
    return SampleInputs(logits.expand(count, -1), slots, torch.arange(count), table)


def modes_by_name(vocab_size: int, top_p_base: str = "top_k") -> dict[str, Mode]:
    return {mode.name: mode for mode in mode_table(vocab_size, top_p_base)}


def full_mode(vocab_size: int, top_p_base: str = "top_k") -> Mode:
    return modes_by_name(vocab_size, top_p_base)["full"]


def covering_modes(params: Sequence[SamplingParams], vocab_size: int, top_p_base: str = "top_k") -> list[Mode]:
    return [m for m in mode_table(vocab_size, top_p_base) if all(uncovered(m, p) is None for p in params)]


def race(logits: Tensor, rows: RowParams) -> SampleOutputs:
    """The unfiltered race over rows as wide as the vocabulary: for millions of draws from a few tokens."""
    ids = torch.arange(logits.shape[1], dtype=torch.int32)
    best = pack(score_key(logits, ids, rows), ids).amax(-1)
    return tokens_from_packed(best, magnitude_bits(logits).amax(-1), rows.idle)


Calls = dict[Callable[..., Any], tuple[tuple[Any, ...], Any]]
"""The tensors and the results of the last call of each stage."""


def keeping(calls: Calls, run: Run = call) -> Run:
    """A ``run`` that keeps the calls of the stages."""

    def watch(stage: Any, /, *tensors: Any, **static: Any) -> Any:
        made = run(stage, *tensors, **static)
        calls[stage] = tensors, made
        return made

    return Run(watch)


def kept_ids(mode: Mode, inputs: SampleInputs) -> list[list[int]]:
    """The tokens of each row that a step lets win, read from what the step passes to its last stages."""
    calls: Calls = {}
    sample_step(mode, inputs, keeping(calls))
    if draw_from_candidates in calls:
        (ordered, _, row_slots, row_mass), _ = calls[draw_from_candidates]
        rows = gather_rows(row_slots, stream=TARGET)
        keep = keep_candidates(ordered, rows, row_mass) & (ordered >> 32 > MASKED_KEY)
        return [sorted(packed_id(o[k]).tolist()) for o, k in zip(ordered, keep, strict=True)]
    (logits, rows, row_max, last), _ = calls[race_maxima]
    if mode.searches:  # rows race before they are searched, if they are
        run = StepRun(call, schedule_for(mode, logits.shape[0], logits.device))
        search_inputs = candidates_and_thresholds(run, logits, row_slots_of(inputs))
        last = last_of(threshold_of(run, logits, search_inputs), by_key=True)
    ids = torch.arange(mode.vocab_size, dtype=torch.int32)
    key = admitted_key(row_logits(logits, mode.vocab_size), ids, rows, row_max, last)
    return [row.nonzero().flatten().tolist() for row in key > MASKED_KEY]
