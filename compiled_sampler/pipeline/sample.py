"""Sampling: one token for every row of logits, as the list of stages of each mode.

Every ``run(stage, ...)`` is a point where results are written to memory. Eager code calls the stage; the lowering
compiles each stage on its own; a CUDA graph then records all of them. The list of stages, and so the token, is the
same. A token is drawn by a race, ``argmax(x * c + G)`` with Gumbel noise G, over the tokens that the filters keep; how
these are found depends on the mode:

- ``greedy``: no noise; the first token of the row's order.
- ``no_filter``, ``min_p``: the race reads whole rows. For large batches on a GPU, upper bounds of scores come first.
- ``top_k_top_p[C]``: every filter ends within the candidates, the first C tokens of the order; only these race.
- ``top_k``, ``full``: a filter may keep more tokens than the C candidates (``top_k`` has none), up to an exact
  threshold. On a GPU, rows with a top-k up to 1,024 are searched and draw from the list that is found; others race over
  the whole row, and are searched where nothing proves that the winner is kept. On the CPU, every row races first, and a
  threshold is searched only where the winner may be a token that a filter drops.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from torch import Tensor

from compiled_sampler.batch import SampleInputs, SampleOutputs
from compiled_sampler.core.order import Last, last_of
from compiled_sampler.core.rows import RowParams, RowSlots, gather_rows, row_slots_of
from compiled_sampler.core.stage import Run, call
from compiled_sampler.edits.masks import MaskedLogits
from compiled_sampler.edits.recording import with_finished
from compiled_sampler.edits.tables import EditInputs, NoiseInputs
from compiled_sampler.edits.watermark import noise_positions
from compiled_sampler.exact import row_race
from compiled_sampler.logprobs import Logprobs
from compiled_sampler.modes import Mode
from compiled_sampler.passes import race
from compiled_sampler.passes.blocks import AnyLogits
from compiled_sampler.passes.bounds import Leaders, draw_from_leaders, race_bounds, race_leaders, race_masked_bounds
from compiled_sampler.passes.kept import cut_of_drawn, kept_of_token
from compiled_sampler.passes.maxima import BlockMaxima, rows_of_blocks
from compiled_sampler.pipeline.chunks import in_chunks
from compiled_sampler.pipeline.edits import (
    Edited,
    drawing_schedule,
    edited_logits,
    logits_to_draw_from,
    step_run,
    with_one_mask,
)
from compiled_sampler.pipeline.law import row_law, summed
from compiled_sampler.pipeline.logprobs import NOTHING_FOUND, FoundLaw, logprobs_of_chunk, sums_kept, with_kept
from compiled_sampler.pipeline.schedule import StepRun
from compiled_sampler.pipeline.search import (
    SearchInputs,
    block_maxima,
    candidates_and_thresholds,
    find_candidates,
    threshold_of,
)

Draw = Callable[[StepRun, SampleInputs], SampleOutputs]
"""``edit_and_draw``, or what draws as it does from logits that are split over ranks."""


def sample_step(mode: Mode, inputs: SampleInputs, run: Run = call, draw: Draw | None = None) -> SampleOutputs:
    """One token id, int64, and its status, int32, for every row: ``[R]`` each."""
    run = StepRun(run, drawing_schedule(mode, inputs.logits, inputs.edits, inputs.logprobs))
    drawn = (draw or edit_and_draw)(run, inputs)
    if inputs.stops is None:
        return drawn
    ended = run(with_finished, drawn._replace(logprobs=None), inputs.slots, inputs.stops)
    return ended._replace(logprobs=drawn.logprobs)


def edit_and_draw(run: StepRun, inputs: SampleInputs, noise_slots: RowSlots | None = None) -> SampleOutputs:
    """One token for every row of logits before edits, with logprobs if asked; in chunks where rows are many."""
    # noise_slots: keyed_by, where that is known
    row_slots, logprobs = row_slots_of(inputs), inputs.logprobs
    noise_slots = noise_slots or keyed_by(row_slots, inputs.noise, run)

    def drawn_chunk(
        logits: Tensor, row_slots: RowSlots, noise_slots: RowSlots, edits: EditInputs | None, given_ids: Tensor | None
    ) -> SampleOutputs:
        with ExitStack() as undo:
            edited = logits_to_draw_from(run, logits, row_slots, edits, undo)
            if logprobs is None:
                return draw_tokens(run, edited.logits, noise_slots, edited.maxima)
            wanted = logprobs.wanted
            drawn, law = _draw_and_find(run, logits, edited, noise_slots, wanted)
            if wanted.of == "raw":
                law = with_kept(run, edited.logits, row_slots, wanted, law)
                undo.close()  # the edited logits are not read any more
            raw_and_edited, asked = (logits, edited.logits), logprobs._replace(given_ids=given_ids)
            of_tokens = logprobs_of_chunk(run, raw_and_edited, row_slots, drawn.token_ids, asked, law)
            return drawn._replace(logprobs=of_tokens)

    given_ids = None if logprobs is None else logprobs.given_ids
    return in_chunks(run, drawn_chunk, inputs.logits, row_slots, noise_slots, inputs.edits, given_ids)


def best_step(mode: Mode, inputs: SampleInputs, count: int, run: Run = call) -> SampleOutputs:
    """The ``count`` best tokens of the race of each row, int64 ``[R, count]``, of which a draw is the first."""
    # Of drafts with noise of their own they are ``count`` draws without replacement.
    run, row_slots = step_run(mode, inputs, run), row_slots_of(inputs)
    noise_slots = keyed_by(row_slots, inputs.noise, run)
    row_slots = row_slots._replace(offsets=None)  # a law has no noise
    static = {**run.vocab, "count": count, "stream": noise_slots.stream}

    def best_of_chunk(
        logits: Tensor, row_slots: RowSlots, noise_slots: RowSlots, edits: EditInputs | None
    ) -> SampleOutputs:
        logits = edited_logits(run, logits, row_slots, edits)
        law = summed(run, row_law(run, logits, row_slots)[0])
        return run(race.best_of_race, logits, law, noise_slots, **static)

    return in_chunks(run, best_of_chunk, inputs.logits, row_slots, noise_slots, inputs.edits)


def keyed_by(row_slots: RowSlots, noise: NoiseInputs | None, run: Run) -> RowSlots:
    """The rows with the positions that key their noise: their own, or of the target's noise those of a watermark."""
    if noise is None or row_slots.offsets is not None:
        return row_slots
    return row_slots._replace(positions=run(noise_positions, row_slots.slots, row_slots.positions, *noise))


def draw_tokens(
    run: StepRun, logits: AnyLogits, row_slots: RowSlots, maxima: BlockMaxima | None = None
) -> SampleOutputs:
    """One token id and its status for every row, ``[R]`` each, in any mode; ``maxima`` as ``Edited`` has them."""
    mode = run.mode
    if not mode.draws:  # greedy: the largest logit, and of equal logits the lowest id
        if maxima is not None:
            return run(race.first_from_blocks, logits, maxima, row_slots, **run.schedule.copied.blocks)
        blocks = block_maxima(run, logits)
        return run(race.first_from_blocks, logits, blocks, row_slots, **run.schedule.order.blocks)
    if mode.searches:
        return _draw_beyond_candidates(run, logits, row_slots, maxima)
    if mode.capacity:  # every filter ends within the candidates, for rows with top_k <= C
        candidates = find_candidates(run, logits, row_slots, maxima=maxima, in_order=False)
        stage = race.draw_from_candidates if run.schedule.orders_candidates else race.draw_from_unordered_candidates
        among = candidates.tokens, candidates.nan_bits, row_slots, candidates.row_mass
        return run(stage, *among, stream=row_slots.stream)
    return _draw_from_rows(run, logits, row_slots)[0]


def _draw_from_rows(
    run: StepRun, logits: AnyLogits, row_slots: RowSlots, *, finds_max: bool = False
) -> tuple[SampleOutputs, Tensor | None]:
    """The winners of races over whole rows, ``[R]``, and each row's largest logit, float32 ``[R]``, or None."""
    # The largest logits are found for min_p, and with finds_max also where the race finds them without another pass.
    filters_min_p, stream = run.mode.filters_min_p, row_slots.stream
    if run.schedule.races_by_bounds:
        rows = run(gather_rows, row_slots, stream=stream)
        leaders, winners = race_by_bounds(run, logits, rows, finds_max=finds_max or filters_min_p)
        return run(draw_from_leaders, leaders, winners, rows.idle), leaders.row_max
    if filters_min_p:
        keys = block_maxima(run, logits).keys
        rows, row_max = run(rows_of_blocks, keys, row_slots, stream=stream)
    else:
        rows, row_max = run(gather_rows, row_slots, stream=stream), None
    return _raced_and_drawn(run, logits, rows, row_max, None), row_max


def _raced_and_drawn(
    run: StepRun, logits: AnyLogits, rows: RowParams, row_max: Tensor | None, last: Last | None
) -> SampleOutputs:
    """The winners of a race over whole rows, ``[R]``; with ``last``, only tokens up to it in the order race."""
    # The first stage reduces each block of a row to its best score, the second reduces the blocks to the winner.
    blocks = race_blocks(run, logits, rows, row_max, last)
    return run(race.draw_from_blocks, logits, blocks, rows, row_max, last, **run.schedule.race.blocks_by_bits)


def race_blocks(
    run: StepRun, logits: AnyLogits, rows: RowParams, row_max: Tensor | None, last: Last | None
) -> BlockMaxima:
    """The best score of each block of a row; arguments as ``_raced_and_drawn``."""
    static = {**run.schedule.race.reduction, "names": run.schedule.by_triton}
    return run(race.race_maxima, logits, rows, row_max, last, **static)


def race_by_bounds(run: StepRun, logits: AnyLogits, rows: RowParams, *, finds_max: bool) -> tuple[Leaders, Tensor]:
    """The best scores of a race over whole rows by upper bounds, and the winners of rows that raced in full."""
    # For large batches on a GPU, where the instructions of scores limit the speed. Scores are computed only for the
    # blocks with the largest bounds; rows in which another block may hold the winner race over all their tokens.
    blocks = run.schedule.race.blocks
    if isinstance(logits, MaskedLogits):
        logits = with_one_mask(run, logits)
        bounds = run(race_masked_bounds, logits, rows, **blocks, finds_max=finds_max)
    else:
        bounds = run(race_bounds, logits, rows, **blocks, finds_max=finds_max)
    leaders = run(race_leaders, logits, bounds, rows, **blocks)
    best, _, needs_race, row_max = leaders
    return leaders, run(row_race.race_rows, logits, needs_race, rows, row_max, best, **run.vocab)


def _draw_beyond_candidates(
    run: StepRun, logits: AnyLogits, row_slots: RowSlots, maxima: BlockMaxima | None
) -> SampleOutputs:
    """The winners of races, ``[R]``, in modes whose filters may keep tokens beyond the candidates."""
    mode = run.mode
    if not run.schedule.by_triton:
        assert isinstance(logits, Tensor)  # C++ reads no masks
        search_inputs = candidates_and_thresholds(run, logits, row_slots, maxima=maxima)
        return _draw_and_recheck(run, logits, search_inputs)
    if isinstance(logits, MaskedLogits):
        logits = with_one_mask(run, logits)
    if not mode.capacity:  # top_k: a search, and a race of rows that keep more than a list holds; no pass before them
        rows = run(gather_rows, row_slots, stream=row_slots.stream)
        winners, nan_bits = run(row_race.race_top_k, logits, rows, **run.vocab)
        return run(row_race.draw_from_winners, winners, nan_bits, rows.idle)
    # Rows whose filters end within the candidates race among these; the kernels of race_beyond_candidates skip them.
    search_inputs = candidates_and_thresholds(run, logits, row_slots, maxima=maxima, races=True)
    ordered, nan_bits, rows, row_max, known, raced = search_inputs
    base = {**run.vocab, "base_is_row": mode.base_is_row}
    winners = run(row_race.race_beyond_candidates, logits, known, rows, row_max, raced, **base)
    return run(row_race.draw_from_candidates_and_winners, ordered, winners, nan_bits, rows, row_max, known)


def _draw_and_recheck(run: StepRun, logits: Tensor, search_inputs: SearchInputs) -> SampleOutputs:
    """The winners of races, ``[R]``, on the CPU: over the whole row, and again where a filter may drop the winner."""
    # In C++ a pass over a row costs much less than a search for its threshold. So every row races, the mass and the
    # number of tokens before the winner tell whether the filters keep it, and only the other rows are searched.
    ordered, _, rows, row_max, known, _ = search_inputs
    drawn = _raced_and_drawn(run, logits, rows, row_max, run(row_race.last_without_search, known))
    if not run.any_row(known.is_open):
        return drawn
    before = run(race.last_before_winner, logits, drawn.token_ids, **run.vocab)
    parts = run(row_race.mass_before_winner, logits, before, row_max, rows.scale, **run.schedule.mass.blocks)
    known = run(row_race.recheck_winners, ordered, known, parts, rows, **run.vocab, base_is_row=run.mode.base_is_row)
    if not run.any_row(known.is_open):
        return drawn
    last = run(last_of, threshold_of(run, logits, search_inputs._replace(known=known)), by_key=True)
    return _raced_and_drawn(run, logits, rows, row_max, last)


def _draw_and_find(
    run: StepRun, raw: Tensor, edited: Edited, row_slots: RowSlots, wanted: Logprobs
) -> tuple[SampleOutputs, FoundLaw]:
    """``draw_tokens`` of edited logits, and what it finds that logprobs, maybe of the raw ones, read too."""
    logits, maxima = edited
    mode = run.mode
    reads_first = wanted.top > 0 and (wanted.of != "raw" or logits is raw)
    if mode.capacity and not mode.searches and (wanted.reads_filters or reads_first):
        candidates = find_candidates(run, logits, row_slots, maxima=maxima, in_order=False)
        static = {"is_ordered": run.schedule.orders_candidates, "by_bits": run.schedule.by_triton}
        among = candidates.tokens, candidates.nan_bits, row_slots, candidates.row_mass
        drawn, kept, ordered = run(race.draw_and_keep, *among, stream=row_slots.stream, **static)
        return drawn, FoundLaw(kept, ordered)
    if sums_kept(mode, wanted):
        drawn, row_max = _draw_from_rows(run, logits, row_slots, finds_max=True)
        if row_max is None:
            return drawn, NOTHING_FOUND
        cut = run(cut_of_drawn, row_max, drawn.token_ids, row_slots, filters_min_p=mode.filters_min_p)
        return drawn, FoundLaw(None, None, cut)
    drawn = draw_tokens(run, logits, row_slots, maxima)
    if mode.draws or not wanted.reads_filters:
        return drawn, NOTHING_FOUND
    return drawn, FoundLaw(run(kept_of_token, logits, drawn.token_ids, row_slots, **run.vocab), None)
