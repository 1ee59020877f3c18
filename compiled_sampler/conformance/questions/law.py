"""Do draws follow the law of their parameters?"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_sampler.conformance.adapter import Params
from compiled_sampler.conformance.bench import FULL, MOST_LOGITS, Bench, Effort, NotAsked, copied
from compiled_sampler.conformance.evidence import (
    ALARM,
    Law,
    bias,
    binomial_p_value,
    binomial_power,
    furthest_cell,
    leak,
    multinomial_p_value,
)
from compiled_sampler.conformance.question import Count, Finding, Power, comparison, counted, question
from compiled_sampler.conformance.rows import VOCAB, WIDE_VOCAB, Batch, clear_row, first_row, oracle_law

PARAMS = {
    "no_filter": (Params(), Params(temperature=0.6), Params(temperature=2.0)),
    "greedy": (Params(temperature=0.0),),
    "top_k": (Params(top_k=5), Params(top_k=1)),
    "top_p": (Params(top_p=0.7), Params(top_p=0.1)),
    "min_p": (Params(min_p=0.1), Params(temperature=1.5, min_p=0.3)),
    "mixed_filters": (Params(top_k=8, top_p=0.8), Params(temperature=1.3, top_k=12, top_p=0.85, min_p=0.04)),
}
MOST_KEPT = {"greedy": 2, "top_k": 5, "mixed_filters": 12}  # tokens that a law of PARAMS keeps, where they are not all
TIED_ROWS = 64
TOLERANCE = 1e-4  # of logprobs


def of_draws(share: int, cells: int) -> Power:
    """The power of a share of an effort's draws from laws that keep so many tokens."""
    return lambda effort: bias(effort.draws // share, cells)


def follows_law(bench: Bench, cases: list[tuple[Tensor, Params]], draws: int) -> Finding:
    """Whether the draws of every row follow its law."""
    least, cells, furthest = 1.0, 2, ""
    seconds, fewest = bench.effort.question_s / len(cases), draws
    for row, params in cases:
        probabilities = oracle_law(bench, row, params)
        counts = bench.counts(row, params, draws, seconds)
        fewest = min(fewest, int(counts.sum()))
        p_value, cells = law_p_value(counts, probabilities), max(cells, int((probabilities > 0).sum()))
        if p_value < least:
            least = p_value
            token, n = furthest_cell(counts, probabilities), counts.sum()
            came = f"token {token} came {counts[token]} times in {n} draws, the law says {n * probabilities[token]:.1f}"
            furthest = f"{params}, {row.dtype}: {came} (p < {p_value:.0e})"
        if p_value < ALARM:
            return Finding(False, furthest, "", p_value, 2 * len(cases))
    detail = f"{len(cases)} laws, at least {fewest} draws each" + (f"; furthest: {furthest}" if furthest else "")
    return Finding(True, detail, bias(fewest, cells), least, 2 * len(cases))


def law_p_value(counts: NDArray[np.int64], probabilities: Law) -> float:
    """The smaller p-value of two tests: of all tokens, and of the likeliest of half the mass against the rest."""
    ids = np.argsort(-probabilities, kind="stable")
    likely = ids[probabilities[ids].cumsum() - probabilities[ids] < 0.5]
    share = min(1.0, float(probabilities[likely].sum()))
    # With two cells it finds a smaller bias between likely and unlikely tokens.
    halves = binomial_p_value(int(counts[likely].sum()), int(counts.sum()), share)
    return min(multinomial_p_value(counts, probabilities), halves)


def of_parameters(bench: Bench, name: str) -> Finding:
    params = bench.supported(PARAMS[name])
    bench.needs(bool(params), f"unsupported={sorted(bench.semantics.unsupported)}")
    return follows_law(bench, [(clear_row(bench, p), p) for p in params], bench.effort.draws)


for name in PARAMS:
    text = f"draws follow the law: {name.replace('_', ' ')}"
    ask = functools.partial(of_parameters, name=name)
    question(f"law.{name}", text, of_draws(1, MOST_KEPT.get(name, VOCAB)))(ask)


@question("law.top_p_base", "top_p after top_k is a share of the declared base", of_draws(4, 4))
def top_p_base(bench: Bench) -> Finding:
    probabilities = np.array([0.35, 0.25, 0.20, 0.05] + [0.15 / 28] * 28)  # the bases differ for k = 4, p = .82
    row = torch.from_numpy(np.log(probabilities) + np.r_[np.zeros(4), np.linspace(0.0, -0.3, 28)]).float()
    return follows_law(bench, [(row, Params(top_k=4, top_p=0.82))], bench.effort.draws // 4)


@question(
    "law.top_p_boundary", "top_p keeps the token at its boundary as declared", lambda effort: leak(effort.draws // 4)
)
def top_p_boundary(bench: Bench) -> Finding:
    row = torch.full((VOCAB,), -torch.inf)
    row[4:8] = 0.0
    counts = bench.counts(row, Params(top_p=0.5), bench.effort.draws // 4, bench.effort.question_s)
    # Two equal tokens have the half; a third is kept where the token at the boundary is, all where ties are.
    wanted = 4 if bench.semantics.top_p_ties == "all" else 2 + bench.semantics.keeps_at_boundary
    num_drawn = int((counts > 0).sum())
    detail = f"{num_drawn} of four equal tokens are drawn under top_p=0.5, the declared boundary keeps {wanted}"
    return Finding(num_drawn == wanted, detail, leak(int(counts.sum())))


@question("law.top_k_ties", "of equal tokens, top_k keeps those declared", of_draws(1, 5))
def top_k_ties(bench: Bench) -> Finding:
    row = torch.full((VOCAB,), -3.0)
    row[[30, 11, 20]] = torch.tensor([2.0, 2.5, 3.0])
    row[[25, 3, 17, 9, 28, 14]] = 1.0  # for the last two places of five
    params = Params(top_k=5)
    if bench.semantics.top_k_ties != "any":
        return follows_law(bench, [(row, params)], bench.effort.draws)
    counts = bench.counts(row, params, bench.effort.draws, bench.effort.question_s)
    kept = np.flatnonzero(counts)
    is_kept = len(kept) <= 5 and bool((row.numpy()[kept] >= 1.0).all())
    return Finding(is_kept, f"tokens {kept.tolist()} are drawn under top_k=5", leak(int(counts.sum())))


@comparison(
    "law.greedy_ties", "of equal largest logits, a greedy row takes one as declared", lambda effort: TIED_ROWS, "rows"
)
def greedy_ties(bench: Bench) -> Iterator[Count]:
    params, places = [Params(temperature=0.0)] * TIED_ROWS, list(range(TIED_ROWS))
    kinds = [(torch.float32, WIDE_VOCAB), *((dtype, VOCAB) for dtype in bench.semantics.dtypes)]
    for dtype, columns in kinds:  # of those that other questions have: each more may be a compilation
        x = torch.from_numpy(bench.rng.standard_normal((TIED_ROWS, columns))).round()
        x[::2] = x[::2].clamp(max=0.0)  # zeros of both signs, which are equal; the largest of other rows are few
        batch = Batch(x.to(dtype), params, bench.new_seeds(TIED_ROWS), places)
        tokens, is_largest = bench.sample(*batch), x == x.amax(-1, keepdim=True)
        first = is_largest.int().argmax(-1)
        is_declared = (is_largest & (torch.arange(columns) == tokens[:, None])).any(-1)  # tokens may be out of range
        if bench.semantics.greedy_ties == "lowest_id":
            is_declared = tokens == first
        yield counted(f"V = {columns}, {dtype}", ~is_declared, first_row(batch, tokens, first, ~is_declared))


@question("law.16_bits", "draws follow the law: rows of 16 bits, with ties", of_draws(2, VOCAB))
def ties_in_16_bits(bench: Bench) -> Finding:
    dtypes = bench.semantics.dtypes
    bench.needs(bool(dtypes), "dtypes=()")
    cases = [
        ((clear_row(bench, params) * 4).round().div(4).to(dtype), params)
        for dtype in dtypes
        for params in bench.supported([Params(), Params(min_p=0.06)])  # which ties cannot change
    ]
    return follows_law(bench, cases, bench.effort.draws // 2)


@question("law.flat_row", "draws follow the law: equal logits", of_draws(1, VOCAB))
def flat_row(bench: Bench) -> Finding:
    return follows_law(bench, [(torch.full((VOCAB,), x), Params()) for x in (0.0, -20.0)], bench.effort.draws)


@question("law.one_token", "draws follow the law: one token left", of_draws(16, VOCAB))
def one_token(bench: Bench) -> Finding:
    masked, leading = torch.full((VOCAB,), -torch.inf), torch.zeros(VOCAB)
    masked[7], leading[19] = -5.0, 200.0
    cases = [(row, params) for row in (masked, leading) for params in bench.supported([Params(), Params(top_p=0.9)])]
    return follows_law(bench, cases, bench.effort.draws // 16)


@question("law.large_logits", "draws follow the law: logits near 10,000", of_draws(4, VOCAB))
def large_logits(bench: Bench) -> Finding:
    cases = [(clear_row(bench, Params(), offset=offset), Params()) for offset in (1e4, -1e4)]
    return follows_law(bench, cases, bench.effort.draws // 4)


@question("law.kept_set", "no token comes from outside the kept set", lambda effort: leak(effort.kept_draws))
def kept_set(bench: Bench) -> Finding:
    pool = bench.supported([Params(top_k=3), Params(top_p=0.5), Params(min_p=0.2)])
    bench.needs(bool(pool), "no filters")
    draws, seconds, fewest = bench.effort.kept_draws, 2.0 * bench.effort.question_s / len(pool), bench.effort.kept_draws
    for params in pool:
        row = clear_row(bench, params)
        counts = bench.counts(row, params, draws, seconds)
        outside, fewest = counts * (oracle_law(bench, row, params) == 0.0), min(fewest, int(counts.sum()))
        if outside.any():
            token = int(outside.argmax())
            return Finding(False, f"{params}: token {token} is not kept and came {outside[token]} times")
    return Finding(True, f"{len(pool)} filters, at least {fewest} draws each", leak(fewest))


def tail(bench: Bench, probability: float) -> Finding:
    """Whether tokens of a tiny probability each, counted together, come as often as they must."""
    columns = 2**15
    row = torch.full((columns,), float(np.log(probability)))
    row[columns // 3] = 0.0
    share = float(1.0 - oracle_law(bench, row, Params())[columns // 3])
    rows = MOST_LOGITS // columns // 4
    bench.counts(row, Params(), rows)  # the first call may compile
    start = time.perf_counter()
    bench.counts(row, Params(), rows)
    affordable = int(bench.effort.tail_s / (time.perf_counter() - start)) * rows
    draws = min(int(bench.effort.tail_events / share), affordable)
    below, above = binomial_power(draws, share) if draws else (-1.0, 0.0)
    if below < 0.0:
        hint = "" if bench.effort.tail_s >= FULL.tail_s else "; try --full"
        raise NotAsked(f"{draws} draws in {bench.effort.tail_s:.0f} s are too few to miss the tail{hint}")
    count = draws - int(bench.counts(row, Params(), draws)[columns // 3])
    p_value = binomial_p_value(count, draws, share)
    detail = f"{count} tokens of probability {probability:.0e} came in {draws} draws, the law says {draws * share:.1f}"
    return Finding(p_value >= ALARM, detail, f"a tail of {below:.2f} or {above:.2f} times its mass", p_value, 1)


def of_tail(effort: Effort) -> str:
    below, above = binomial_power(10**9, effort.tail_events / 10**9)
    return f"a tail of {below:.2f} or {above:.2f} times its mass"


for rare in ("1e-7", "1e-8"):
    text = f"tokens of probability {rare} come as often as they must"
    question(f"law.tail_{rare}", text, of_tail)(functools.partial(tail, probability=float(rare)))


@question("law.probs", "probs is the law drawn from", "an error above 1e-05")
def probs(bench: Bench) -> Finding:
    method, errors = bench.method("probs", VOCAB), list[float]()
    for params in bench.supported([p for group in PARAMS.values() for p in group]):
        row = clear_row(bench, params)
        declared = method(copied(row[None], bench.device), [params])[0].to("cpu", torch.float64).numpy()
        errors.append(0.5 * float(np.abs(declared - oracle_law(bench, row, params)).sum()))
    worst, tolerance = float(np.max(errors)), bench.semantics.tolerance  # NaN, which is within none, if there is one
    detail = f"the largest error is {worst:.1e} in total variation"
    return Finding(worst <= tolerance, detail, f"an error above {tolerance:.0e}")


@question("law.logprobs", "logprobs are those of the law drawn from", f"an error above {TOLERANCE:.0e}")
def logprobs(bench: Bench) -> Finding:
    method, errors = bench.method("logprobs", VOCAB), list[float]()
    for params in bench.supported([p for group in PARAMS.values() for p in group]):
        row = clear_row(bench, params)
        probabilities = oracle_law(bench, row, params)
        ids = np.resize(np.flatnonzero(probabilities), VOCAB)  # as many for every law: a shape more is a program more
        rows = row.to(bench.device).expand(len(ids), -1).contiguous()
        declared = method(rows, [params] * len(ids), torch.from_numpy(ids)).to("cpu", torch.float64).numpy()
        errors.append(float(np.abs(declared - np.log(probabilities[ids])).max()))
    worst = float(np.max(errors))
    return Finding(worst <= TOLERANCE, f"the largest error is {worst:.1e}")
