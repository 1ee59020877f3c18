"""Do draws follow the law of their parameters?"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_sampler.conformance.adapter import Params
from compiled_sampler.conformance.bench import FULL, MOST_LOGITS, Bench, NotAsked, copied
from compiled_sampler.conformance.evidence import (
    ALARM,
    Law,
    binomial_p_value,
    binomial_power,
    multinomial_p_value,
    multinomial_power,
    rare_power,
)
from compiled_sampler.conformance.question import Finding, Question
from compiled_sampler.conformance.rows import VOCAB, clear_row, law_difference, oracle_law

Case = tuple[Tensor, Params]

PARAMS = {
    "no_filter": (Params(), Params(temperature=0.6), Params(temperature=2.0)),
    "greedy": (Params(temperature=0.0),),
    "top_k": (Params(top_k=5), Params(top_k=1)),
    "top_p": (Params(top_p=0.7), Params(top_p=0.1)),
    "min_p": (Params(min_p=0.1), Params(temperature=1.5, min_p=0.3)),
    "mixed_filters": (Params(top_k=8, top_p=0.8), Params(temperature=1.3, top_k=12, top_p=0.85, min_p=0.04)),
}


def follows_law(bench: Bench, cases: list[Case], draws: int) -> Finding:
    """Whether the draws of every case follow its law."""
    least, cells, furthest = 1.0, 2, ""
    seconds, fewest = bench.effort.question_s / len(cases), draws
    for row, params in cases:
        probabilities = oracle_law(bench, row, params)
        counts = bench.counts(row, params, draws, seconds)
        fewest = min(fewest, int(counts.sum()))
        p_value, cells = law_p_value(counts, probabilities), max(cells, int((probabilities > 0).sum()))
        if p_value < least:
            least = p_value
            furthest = f"{params}, {row.dtype}: {law_difference(counts, probabilities)} (p < {p_value:.0e})"
        if p_value < ALARM:
            return Finding(False, furthest, "", p_value, 2 * len(cases))
    detail = f"{len(cases)} laws, at least {fewest} draws each" + (f"; furthest: {furthest}" if furthest else "")
    return Finding(True, detail, bias(fewest, cells), least, 2 * len(cases))


def law_p_value(counts: NDArray[np.int64], probabilities: Law) -> float:
    """The smaller p-value of two tests: of all tokens, and of the likeliest tokens of half the mass against the rest.

    The second one has two cells, and finds a smaller bias between likely and unlikely tokens.
    """
    ids = np.argsort(-probabilities, kind="stable")
    likely = ids[probabilities[ids].cumsum() - probabilities[ids] < 0.5]
    share = min(1.0, float(probabilities[likely].sum()))
    halves = binomial_p_value(int(counts[likely].sum()), int(counts.sum()), share)
    return min(multinomial_p_value(counts, probabilities), halves)


def variation(draws: int, cells: int) -> str:
    """The power of a test of all tokens, in words."""
    return f"total variation {multinomial_power(draws, cells):.2%}"


def bias(draws: int, cells: int) -> str:
    """The power of a test of a law, in words."""
    below, above = binomial_power(draws, 0.5)
    return f"{variation(draws, cells)}; of halves {0.5 * max(above - 1.0, 1.0 - below):.2%}"


def of_parameters(bench: Bench, name: str) -> Finding:
    """The laws of one kind of parameters, for a random row each."""
    params = bench.supported(PARAMS[name])
    if not params:
        raise NotAsked(f"declared: unsupported={sorted(bench.semantics.unsupported)}")
    return follows_law(bench, [(clear_row(bench, p), p) for p in params], bench.effort.draws)


def top_p_base(bench: Bench) -> Finding:
    """A row on which the two bases of top_p differ: .35, .25, .20, .05, ..., k = 4, p = .82."""
    probabilities = np.array([0.35, 0.25, 0.20, 0.05] + [0.15 / 28] * 28)
    row = torch.from_numpy(np.log(probabilities) + np.r_[np.zeros(4), np.linspace(0.0, -0.3, 28)]).float()
    return follows_law(bench, [(row, Params(top_k=4, top_p=0.82))], bench.effort.draws // 4)


def top_p_boundary(bench: Bench) -> Finding:
    """Four equal tokens and p = 1/2: two are kept, three where the token at the boundary is, or all that are equal."""
    row = torch.full((VOCAB,), -torch.inf)
    row[4:8] = 0.0
    counts = bench.counts(row, Params(top_p=0.5), bench.effort.draws // 4, bench.effort.question_s)
    wanted = 4 if bench.semantics.top_p_ties == "all" else 2 + bench.semantics.keeps_at_boundary
    num_drawn = int((counts > 0).sum())
    detail = f"{num_drawn} of four equal tokens are drawn under top_p=0.5, the declared boundary keeps {wanted}"
    return Finding(num_drawn == wanted, detail, f"a leak of {rare_power(int(counts.sum())):.0e}")


def top_k_ties(bench: Bench) -> Finding:
    """Six tokens tie for the last two places of top_k = 5."""
    row = torch.full((VOCAB,), -3.0)
    row[[30, 11, 20]] = torch.tensor([2.0, 2.5, 3.0])
    row[[25, 3, 17, 9, 28, 14]] = 1.0
    params = Params(top_k=5)
    if bench.semantics.top_k_ties != "any":
        return follows_law(bench, [(row, params)], bench.effort.draws)
    counts = bench.counts(row, params, bench.effort.draws, bench.effort.question_s)
    kept = np.flatnonzero(counts)
    is_kept = len(kept) <= 5 and bool((row.numpy()[kept] >= 1.0).all())
    return Finding(
        is_kept, f"tokens {kept.tolist()} are drawn under top_k=5", f"a leak of {rare_power(counts.sum()):.0e}"
    )


def ties_in_16_bits(bench: Bench) -> Finding:
    """Rows of 16 bits, in which many logits are equal, without filters and under min_p, which ties cannot change."""
    dtypes = bench.semantics.dtypes
    bench.needs(bool(dtypes), "dtypes=()")
    cases = [
        ((clear_row(bench, params) * 4).round().div(4).to(dtype), params)
        for dtype in dtypes
        for params in bench.supported([Params(), Params(min_p=0.06)])
    ]
    return follows_law(bench, cases, bench.effort.draws // 2)


def flat_row(bench: Bench) -> Finding:
    """All tokens equal, at any height."""
    return follows_law(bench, [(torch.full((VOCAB,), x), Params()) for x in (0.0, -20.0)], bench.effort.draws)


def one_token(bench: Bench) -> Finding:
    """One token is left of a row, by a mask or by its lead."""
    masked, leading = torch.full((VOCAB,), -torch.inf), torch.zeros(VOCAB)
    masked[7], leading[19] = -5.0, 200.0
    cases = [(row, params) for row in (masked, leading) for params in bench.supported([Params(), Params(top_p=0.9)])]
    return follows_law(bench, cases, bench.effort.draws // 16)


def large_logits(bench: Bench) -> Finding:
    """Logits near 10,000 and -10,000, whose differences are like others."""
    cases = [(clear_row(bench, Params(), offset=offset), Params()) for offset in (1e4, -1e4)]
    return follows_law(bench, cases, bench.effort.draws // 4)


def kept_set(bench: Bench) -> Finding:
    """No token comes from outside of the kept set."""
    pool = bench.supported([Params(top_k=3), Params(top_p=0.5), Params(min_p=0.2)])
    if not pool:
        raise NotAsked("declared: no filters")
    draws, seconds, fewest = bench.effort.kept_draws, 2.0 * bench.effort.question_s / len(pool), bench.effort.kept_draws
    for params in pool:
        row = clear_row(bench, params)
        counts = bench.counts(row, params, draws, seconds)
        outside, fewest = counts * (oracle_law(bench, row, params) == 0.0), min(fewest, int(counts.sum()))
        if outside.any():
            token = int(outside.argmax())
            return Finding(False, f"{params}: token {token} is not kept and came {outside[token]} times", "")
    return Finding(True, f"{len(pool)} filters, at least {fewest} draws each", f"a leak of {rare_power(fewest):.0e}")


def tail(bench: Bench, probability: float) -> Finding:
    """Tokens of a tiny probability each, counted together: does a row's light tail come as often as it must?"""
    columns = 2**15
    row = torch.full((columns,), float(np.log(probability)))
    row[columns // 3] = 0.0
    share = float(1.0 - oracle_law(bench, row, Params())[columns // 3])
    rows = MOST_LOGITS // columns // 4
    bench.counts(row, Params(), rows)  # the first call may compile
    start = time.perf_counter()
    bench.counts(row, Params(), rows)
    affordable = int(bench.effort.tail_s / (time.perf_counter() - start)) * rows
    wanted = int(bench.effort.tail_events / share)
    draws = min(wanted, affordable)
    below, above = binomial_power(draws, share) if draws else (-1.0, 0.0)
    if below < 0.0:
        hint = "" if bench.effort.tail_s >= FULL.tail_s else "; try --full"
        raise NotAsked(f"{draws} draws in {bench.effort.tail_s:.0f} s are too few to miss the tail{hint}")
    count = draws - int(bench.counts(row, Params(), draws)[columns // 3])
    p_value = binomial_p_value(count, draws, share)
    detail = f"{count} tokens of probability {probability:.0e} came in {draws} draws, the law says {draws * share:.1f}"
    return Finding(p_value >= ALARM, detail, f"a tail of {below:.2f} or {above:.2f} times its mass", p_value, 1)


def probs(bench: Bench) -> Finding:
    """``probs`` is the law that is drawn from."""
    method, errors = bench.method("probs", VOCAB), list[float]()
    for params in bench.supported([p for group in PARAMS.values() for p in group]):
        row = clear_row(bench, params)
        declared = method(copied(row[None], bench.device), [params])[0].to("cpu", torch.float64).numpy()
        errors.append(0.5 * float(np.abs(declared - oracle_law(bench, row, params)).sum()))
    worst, tolerance = largest(errors), bench.semantics.tolerance
    return Finding(
        worst <= tolerance, f"the largest error is {worst:.1e} in total variation", f"an error above {tolerance:.0e}"
    )


def logprobs(bench: Bench) -> Finding:
    """``logprobs`` is the logarithm of the law that is drawn from."""
    method, errors = bench.method("logprobs", VOCAB), list[float]()
    for params in bench.supported([p for group in PARAMS.values() for p in group]):
        row = clear_row(bench, params)
        probabilities = oracle_law(bench, row, params)
        ids = np.resize(np.flatnonzero(probabilities), VOCAB)  # as many for every law: a shape more is a program more
        rows = row.to(bench.device).expand(len(ids), -1).contiguous()
        declared = method(rows, [params] * len(ids), torch.from_numpy(ids)).to("cpu", torch.float64).numpy()
        errors.append(float(np.abs(declared - np.log(probabilities[ids])).max()))
    worst = largest(errors)
    return Finding(worst <= 1e-4, f"the largest error is {worst:.1e}", "an error above 1e-04")


def largest(errors: Sequence[float]) -> float:
    """The largest error; NaN, which is within no tolerance, if there is one."""
    return float(np.max(errors))


QUESTIONS = (
    *(
        Question(
            f"law.{name}",
            f"draws follow the law: {name.replace('_', ' ')}",
            functools.partial(of_parameters, name=name),
        )
        for name in PARAMS
    ),
    Question("law.top_p_base", "top_p after top_k is a share of the declared base", top_p_base),
    Question("law.top_p_boundary", "top_p keeps the token at its boundary as declared", top_p_boundary),
    Question("law.top_k_ties", "of equal tokens, top_k keeps those declared", top_k_ties),
    Question("law.16_bits", "draws follow the law: rows of 16 bits, with ties", ties_in_16_bits),
    Question("law.flat_row", "draws follow the law: equal logits", flat_row),
    Question("law.one_token", "draws follow the law: one token left", one_token),
    Question("law.large_logits", "draws follow the law: logits near 10,000", large_logits),
    Question("law.kept_set", "no token comes from outside the kept set", kept_set),
    Question(
        "law.tail_1e-7",
        "tokens of probability 1e-7 come as often as they must",
        functools.partial(tail, probability=1e-7),
    ),
    Question(
        "law.tail_1e-8",
        "tokens of probability 1e-8 come as often as they must",
        functools.partial(tail, probability=1e-8),
    ),
    Question("law.probs", "probs is the law drawn from", probs),
    Question("law.logprobs", "logprobs are those of the law drawn from", logprobs),
)
