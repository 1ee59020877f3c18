"""The masked copy of the rows that race, which Inductor would make of every row."""

from __future__ import annotations

import triton.language as tl

from compiled_sampler.exact.triton.records import kernel


@kernel
def masked_rows_kernel(
    logits, row_stride, words, word_stride, slots, allowed, slot_stride, races, masked, num_rows, vocab_size,
    HAS_WORDS: tl.constexpr, HAS_ALLOWED: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The logits of rows that race, with -inf for masked tokens; of other rows nothing is written.

    Reads:
        logits ``[R, >=V]``, ``row_stride`` numbers a row; races, bool ``[R]``.
        words: int32 ``[R, >= ceil(V / 32)]``, ``word_stride`` numbers a row, with HAS_WORDS.
        slots: int64 ``[R]``, and allowed, int32 ``[S, ceil(V / 32)]``, ``slot_stride`` numbers a slot, if HAS_ALLOWED.
    Writes:
        masked: ``[R, V]``, of the dtype of the logits.
    Grid:
        ``(ceil(R / GROUP), ceil(V / TOKENS))``; mostly no row races: then the program ends after one look.
    Flags:
        EARLY: starts while the kernel before ends, and waits for that end.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0) * GROUP
    rows = first + tl.arange(0, GROUP)
    if tl.max((tl.load(races + rows, rows < num_rows, 0) != 0).to(tl.int32), 0) > 0:
        ids = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
        inside = ids < vocab_size
        for place in range(GROUP):
            index = first + place
            if tl.load(races + index, index < num_rows, 0) != 0:
                row = index.to(tl.int64)
                x = tl.load(logits + row * row_stride + ids, inside, 0.0)
                bits = tl.full((TOKENS,), -1, tl.int32)
                if HAS_WORDS:
                    bits &= tl.load(words + row * word_stride + (ids >> 5), inside, 0)
                if HAS_ALLOWED:
                    slot = tl.maximum(tl.load(slots + index), 0)
                    bits &= tl.load(allowed + slot * slot_stride + (ids >> 5), inside, 0)
                x = tl.where(((bits >> (ids & 31)) & 1) != 0, x, float("-inf"))
                tl.store(masked + row * vocab_size + ids, x, inside)
