"""The logprobs of every row, and what else is asked of its law: stages for each law in each mode.

Only what is asked for runs. The laws "raw" and "processed" take one pass over the row. The law "filtered" comes from
the candidates alone where the mode keeps no others, and in the greedy mode from the token; elsewhere a threshold is
found as for a draw, and one pass sums the kept tokens. A rank takes a pass of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from compiled_sampler.core.rows import RowSlots
from compiled_sampler.logprobs import LogprobInputs, LogprobOutputs, Logprobs
from compiled_sampler.modes import CAPACITIES, Mode
from compiled_sampler.passes.blocks import AnyLogits, values_of
from compiled_sampler.passes.candidates import all_blocks, select, sort
from compiled_sampler.passes.kept import (
    Cut,
    Kept,
    greedy_kept,
    kept_candidates,
    kept_in_blocks,
    sum_kept,
    unfiltered_cut,
)
from compiled_sampler.passes.logprobs import (
    Asked,
    law_in_blocks,
    law_scale,
    logprobs_from_kept,
    sum_block_laws,
    tokens_before,
    top_logprobs,
)
from compiled_sampler.passes.maxima import order_maxima
from compiled_sampler.pipeline.chunks import in_chunks, in_chunks_of
from compiled_sampler.pipeline.schedule import StepRun, schedule_for
from compiled_sampler.pipeline.search import block_maxima, find_candidates, ordered_candidates, searched_cut


class FoundLaw(NamedTuple):
    """What a draw has found of the edited logits of its rows, so that logprobs need not find it again."""

    kept: Kept | None
    """The tokens that the filters keep ``[R]``, with every sum that is asked for."""
    ordered: Tensor | None
    """int64 ``[R, C]``, packed (order key, id) of the first tokens in descending order."""
    cut: Cut | None = None
    """Which tokens are kept in rows without top-k and top-p ``[R]``, of which no sums are taken yet; else None."""


NOTHING_FOUND = FoundLaw(None, None)


def logprobs_of(
    run: StepRun,
    raw_logits: Tensor,
    edited_logits: Tensor,
    row_slots: RowSlots,
    token_ids: Tensor,
    asked: LogprobInputs,
) -> LogprobOutputs:
    """The logprobs of each row, ``[R]`` or ``[R, n]``, in chunks of rows where there are many."""
    # They depend on the row's logits and its request alone, and reading them changes no token.
    assert not run.mode.from_probabilities
    assert (asked.given_ids is None) == (asked.wanted.token_ids is None)

    def chunk_logprobs(
        raw: Tensor, edited: Tensor, row_slots: RowSlots, token_ids: Tensor, given_ids: Tensor | None
    ) -> LogprobOutputs:
        chunk_asked = asked._replace(given_ids=given_ids)
        return logprobs_of_chunk(run, (raw, edited), row_slots, token_ids, chunk_asked, NOTHING_FOUND)

    return in_chunks(run, chunk_logprobs, raw_logits, edited_logits, row_slots, token_ids, asked.given_ids)


def top_mode(vocab_size: int) -> Mode:
    """The mode whose schedule finds the first tokens of rows, where the mode of the step has no candidates."""
    return Mode("top", vocab_size, capacity=CAPACITIES[0])


def logprobs_of_chunk(
    run: StepRun,
    logits: tuple[Tensor, AnyLogits],
    row_slots: RowSlots,
    token_ids: Tensor,
    asked: LogprobInputs,
    found: FoundLaw,
) -> LogprobOutputs:
    """``logprobs_of`` of the raw and the edited logits of a chunk of rows, of which a draw has found something."""
    wanted, given_ids, processed_scale = asked
    (raw, edited), (kept, ordered, _) = logits, with_kept(run, logits[1], row_slots, wanted, found)
    x = raw if wanted.of == "raw" else edited
    if wanted.of == "filtered":
        assert kept is not None
        law = kept
    else:
        # all visible tokens, at temperature 1 or at that of the request
        scale = run(law_scale, row_slots, processed_scale) if wanted.of == "processed" else None
        sums = {**run.vocab, "moment": wanted.entropy, "by_bits": run.schedule.order.by_bits}
        law = run(sum_block_laws, run(law_in_blocks, x, scale, **sums), scale)
    before = run(tokens_before, x, token_ids, **run.schedule.order.blocks) if wanted.rank else None
    static = {name: getattr(wanted, name) for name in ("entropy", "num_kept", "boundary")}
    inputs = Asked(token_ids, given_ids, before)
    logprobs = run(logprobs_from_kept, x, row_slots, law, kept, inputs, **run.vocab, **static)
    if not wanted.top:
        return logprobs
    first = first_tokens(run, x, ordered if x is edited else None, wanted.top)
    top_ids, top = run(top_logprobs, row_slots, law, first, top=wanted.top)
    return logprobs._replace(top_token_ids=top_ids, top=top)


def with_kept(run: StepRun, edited: AnyLogits, row_slots: RowSlots, wanted: Logprobs, found: FoundLaw) -> FoundLaw:
    """What a draw has found, with the kept tokens of each row ``[R]`` if these are asked for."""
    is_known = found.kept is not None or not wanted.reads_filters
    return found if is_known else FoundLaw(*_filtered(run, edited, row_slots, wanted, found.cut))


def sums_kept(mode: Mode, wanted: Logprobs) -> bool:
    """Whether a pass sums the kept tokens of rows without top-k and top-p, for which it needs their largest logits."""
    # The boundary alone needs no pass without min_p: it is a constant, or the first token of a greedy row.
    is_summed = mode.filters_min_p or wanted.of == "filtered" or wanted.num_kept
    return mode.draws and is_summed and wanted.reads_filters and not (mode.searches or mode.capacity)


def _filtered(
    run: StepRun, logits: AnyLogits, row_slots: RowSlots, wanted: Logprobs, cut: Cut | None
) -> tuple[Kept, Tensor | None]:
    """The tokens of each row that the filters keep ``[R]``, and the row's candidates in their order, if found."""
    # Without top-k and top-p the draw may have found the cut.
    mode = run.mode
    sums = {"moment": wanted.entropy and wanted.of == "filtered", "num_kept": wanted.num_kept, "last": wanted.boundary}
    if mode.searches:
        assert isinstance(logits, Tensor)
        searched, search_inputs = searched_cut(run, logits, row_slots)
        return _summed(run, logits, searched, **sums), search_inputs.ordered
    if mode.capacity:
        candidates = find_candidates(run, logits, row_slots)
        kept = run(kept_candidates, candidates.tokens, row_slots, candidates.row_mass, by_bits=run.schedule.by_triton)
        return kept, candidates.tokens
    if not sums_kept(mode, wanted):
        return run(greedy_kept, block_maxima(run, logits, names=True), row_slots), None
    if cut is None:
        blocks = block_maxima(run, logits, names=True)
        cut, _ = run(unfiltered_cut, blocks, row_slots, filters_min_p=mode.filters_min_p)
    return _summed(run, logits, cut, **{**sums, "last": sums["last"] and mode.filters_min_p}), None


def _summed(run: StepRun, logits: AnyLogits, cut: Cut, *, moment: bool, num_kept: bool, last: bool) -> Kept:
    """The tokens that a cut keeps and their sums ``[R]``, in one pass over the rows."""
    static = {**run.schedule.mass.blocks, "moment": moment, "num_kept": num_kept, "last": last}
    return run(sum_kept, run(kept_in_blocks, logits, cut, **static))


def first_tokens(run: StepRun, logits: AnyLogits, ordered: Tensor | None, count: int) -> Tensor:
    """At least the first ``count`` tokens of each row's order, or all: int64 ``[R, n]`` packed, in descending order."""
    vocab_size, most = run.mode.vocab_size, CAPACITIES[0]
    if ordered is not None and ordered.shape[1] >= min(count, vocab_size):
        return ordered
    values = values_of(logits)
    narrow = StepRun(run, schedule_for(top_mode(vocab_size), values.shape[0], values.device))
    if min(count, vocab_size) <= most:
        blocks = run(order_maxima, logits, **narrow.schedule.stored.reduction)
        return ordered_candidates(narrow, logits, blocks.keys)

    def sorted_rows(logits: AnyLogits) -> Tensor:
        packed = run(all_blocks, logits, vocab_size=vocab_size, size=1)
        return run(sort if narrow.schedule.by_triton else select, packed, count=min(count, vocab_size))

    # A packed key for each token, several times, also where stages are compiled.
    return in_chunks_of(run.schedule.eager_chunk_rows, sorted_rows, logits)
