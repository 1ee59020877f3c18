"""The law of every row, its distribution in integers, for verification and ``probs``: the stages of each mode."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from compiled_sampler.batch import DraftTable, ProbabilityOutputs, SampleInputs
from compiled_sampler.core.rows import RowSlots, row_slots_of
from compiled_sampler.core.stage import Run, call
from compiled_sampler.edits.tables import EditInputs
from compiled_sampler.modes import Mode
from compiled_sampler.passes.law import (
    AnyLaw,
    Law,
    LawBlocks,
    UnfilteredLaw,
    candidate_law,
    probabilities,
    probability_blocks,
    sum_law,
    unfiltered_weights,
    weight_blocks,
)
from compiled_sampler.passes.maxima import BlockMaxima, coarser_keys
from compiled_sampler.pipeline.chunks import in_chunks
from compiled_sampler.pipeline.edits import edited_logits, step_run
from compiled_sampler.pipeline.schedule import StepRun
from compiled_sampler.pipeline.search import block_maxima, find_candidates, searched_cut


def probability_step(mode: Mode, inputs: SampleInputs, run: Run = call) -> ProbabilityOutputs:
    """The distribution that ``sample_step`` draws from, float32 ``[R, V]``; arguments as there."""
    run, row_slots = step_run(mode, inputs, run), row_slots_of(inputs)

    def law_of(logits: Tensor, row_slots: RowSlots) -> Law:
        return summed(run, row_law(run, logits, row_slots)[0])

    def probabilities_of_chunk(logits: Tensor, row_slots: RowSlots, edits: EditInputs | None) -> ProbabilityOutputs:
        logits = edited_logits(run, logits, row_slots, edits)
        law = law_of(logits, row_slots)
        return run(probabilities, logits, law, row_slots, **run.vocab)

    if inputs.edits is not None or not run.fuses:
        return in_chunks(run, probabilities_of_chunk, inputs.logits, row_slots, inputs.edits)
    law = in_chunks(run, law_of, inputs.logits, row_slots)  # as large as a result are the results alone
    return run(probabilities, inputs.logits, law, row_slots, **run.vocab)


def row_law(run: StepRun, logits: Tensor, row_slots: RowSlots) -> tuple[AnyLaw, Tensor | None]:
    """The law of every row ``[R]``, and its candidates if these hold every token that the filters keep."""
    # The law's sums may not be taken yet (sum_law); candidates are packed keys, int64 [R, C], or None.
    mode = run.mode
    if mode.searches:
        cut, search_inputs = searched_cut(run, logits, row_slots)
        weights = run(weight_blocks, logits, cut, **run.schedule.order.blocks)
        return LawBlocks(cut, weights, search_inputs.nan_bits), None
    if mode.capacity:
        candidates = find_candidates(run, logits, row_slots)
        draw_inputs = (candidates.tokens, candidates.nan_bits, row_slots, candidates.row_mass)
        return run(candidate_law, *draw_inputs, by_bits=run.schedule.by_triton), candidates.tokens
    blocks = block_maxima(run, logits, names=True)
    return unfiltered_law(run, logits, blocks, row_slots, None), None


def summed(run: StepRun, law: AnyLaw) -> Law:
    """The law with its sums taken; in no stage where they are, as Inductor compiles none that returns its arguments."""
    return law if isinstance(law, Law) else run(sum_law, law, filters_min_p=run.mode.filters_min_p)


def chunked_row_law(run: StepRun, logits: Tensor, row_slots: RowSlots) -> tuple[AnyLaw, Tensor | None]:
    """``row_law``, in chunks of rows where there are many."""
    return in_chunks(run, partial(row_law, run), logits, row_slots)


def probability_law(run: StepRun, values: Tensor, *, looks: bool) -> AnyLaw:
    """The law of rows of probabilities; ``looks`` as ``probability_blocks``."""
    return run(probability_blocks, values, **run.schedule.order.blocks_by_bits, looks=looks)


def unfiltered_law(
    run: StepRun, logits: Tensor | DraftTable, blocks: BlockMaxima, row_slots: RowSlots, row_ids: Tensor | None
) -> UnfilteredLaw:
    """The law of rows ``[n]`` in a mode without top-k and top-p, with sums not yet taken."""
    keys = blocks.keys
    if run.schedule.row_max_kernel:
        keys = run(coarser_keys, keys, ratio=keys.shape[1])
    static = {"filters_min_p": run.mode.filters_min_p, "per_block": run.schedule.by_triton}
    weights = run(unfiltered_weights, logits, row_ids, keys, row_slots, **run.schedule.order.blocks, **static)
    return UnfilteredLaw(blocks, row_slots, weights)
