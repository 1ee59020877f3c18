"""A proof, without a search, that top-p keeps the winner of the race over a whole row.

Top-p keeps a token if the mass before it is below the cut, that is, if from it on the row weighs more than the mass
less the cut. Part of the row may show as much, if the winner is not among the last that are kept. The weights are the
exact integers, so what is shown is true; if nothing is, all of the row is measured.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_sampler.exact.triton.keys import exp2_mass, finite, mass_cut, order_key


@triton.jit
def is_dropped(mass_from, row_mass, top_p):
    """Whether top-p drops a token, or may, by the mass of the row from it on, or a part of that."""
    return mass_from <= row_mass - mass_cut(top_p, row_mass)


@triton.jit
def sample_ids(vocab_size, SAMPLE: tl.constexpr, RUN: tl.constexpr):
    """Tokens all over a row in runs of neighbours, int32 ``[SAMPLE]``; the n-th sample after it is ``n * RUN`` on."""
    number = tl.arange(0, SAMPLE)
    run = (number // RUN).to(tl.int64) * vocab_size // (SAMPLE // RUN)
    return run.to(tl.int32) + number % RUN


@triton.jit
def _is_shown_to_be_kept(
    row, its, token, row_mass, row_max, scale, top_p, vocab_size, SAMPLE: tl.constexpr, RUN: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """Whether up to ``MOST`` samples, while as many would do by what is seen, show that top-p keeps a token."""
    most = tl.minimum(vocab_size // SAMPLE, MOST)  # more would overlap
    ids = sample_ids(vocab_size, SAMPLE, RUN)
    needed = (row_mass - mass_cut(top_p, row_mass)).to(tl.float32)
    is_shown = most < 0
    seen, samples = tl.zeros((), tl.int64), tl.zeros((), tl.int32)
    goes_on = most > 0
    while goes_on:
        x = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        is_after = (x < its) | ((x == its) & (ids >= token))
        seen += tl.sum(tl.where(is_after, exp2_mass(x, row_max, scale), 0))
        ids += RUN
        samples += 1
        is_shown = is_dropped(seen, row_mass, top_p) == 0
        will_do = seen.to(tl.float32) * most.to(tl.float32) > needed * samples.to(tl.float32)
        goes_on = (is_shown == 0) & (samples < most) & will_do
    return is_shown


@triton.jit
def is_open(
    row, winner, row_mass, row_max, scale, top_k, top_p, place, vocab_size, SAMPLE: tl.constexpr, RUN: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """Whether the winner of the race over a row may be another under its filters.

    Args:
        row: logits.
        winner: int64, packed (score key, id).
        row_mass: int64.
        row_max: of the row.
        scale: of the row.
        top_k: int64; where it is below V there is no proof.
        top_p: float64, below 1 where top_k is not below V.
        place: where to leave the winner's order key, int32; the mass from it on decides what is not proven.
        vocab_size: V.
        SAMPLE: tokens of a sample.
        RUN: neighbours in it.
        MOST: samples that are looked at.
    """
    has_winner = (winner >> 32) > -2147483648  # a row without tokens needs no search
    is_open = (top_k < vocab_size) | has_winner
    if (top_k >= vocab_size) & has_winner:
        token = 2147483647 - (winner & 0x7FFFFFFF).to(tl.int32)
        its = tl.load(row + token).to(tl.float32)
        tl.store(place, order_key(its))
        shown = _is_shown_to_be_kept(
            row, its, token, row_mass, finite(row_max), scale, top_p, vocab_size, SAMPLE, RUN, MOST
        )
        is_open = shown == 0
    return is_open
