"""Does a verification of drafts keep the target's law, or its tokens, and count what it emits?

Trials have two drafts from known laws, and target rows that depend on the tokens before them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_sampler.conformance.adapter import Drafted, Params, Verified
from compiled_sampler.conformance.bench import Bench, Effort
from compiled_sampler.conformance.evidence import (
    ALARM,
    furthest_cell,
    multinomial_p_value,
    variation,
)
from compiled_sampler.conformance.question import Count, Finding, comparison, counted, question
from compiled_sampler.conformance.rows import VOCAB, first_request, is_clear, matched, oracle_law, strays

LIVE = 4  # tokens that target and drafter use: ids below it
WIDTH, POSITION = 2, 10  # drafts of a trial, and where its first token is drawn

ONE_HOT = (0.5, 0.3, 0.15, 0.05)
"""How often each live token is a one-hot draft: not equally, or a wrong residual would cancel out."""

MOST_TRIALS = 2048  # of one call
COUNTED = 512  # requests whose counts are looked at, under each rule

PARAMS = (Params(temperature=0.9), Params(top_k=3), Params(top_p=0.8), Params(min_p=0.3))


class Game(NamedTuple):
    """The logits of every place after every live prefix, for target and drafter."""

    params: Params
    target: list[Tensor]
    """float32 ``[LIVE**j, VOCAB]`` for places j = 0, 1, 2; the row of a prefix is its number in base LIVE."""
    drafter: list[Tensor]  # the same for the places of drafts, 0 and 1
    target_laws: list[NDArray[np.float64]]
    drafter_laws: list[NDArray[np.float64]]

    def joint(self, places: int) -> NDArray[np.float64]:
        """The target's law of the first tokens, float64 ``[LIVE**places]``."""
        law = np.ones(1)
        for j in range(places):
            law = (law[:, None] * self.target_laws[j][:, :LIVE]).ravel()
        return law


def new_game(bench: Bench, params: Params) -> Game:
    """Random rows with clear cuts."""

    def random_rows(count: int) -> Tensor:
        rows = torch.full((count, VOCAB), -torch.inf)
        for row in rows:
            while True:
                row[:LIVE] = torch.from_numpy((bench.rng.standard_normal(LIVE) * 48).round() / 64).float()
                if is_clear(bench, row, params) and len(set(row[:LIVE].tolist())) == LIVE:
                    break
        return rows

    target, drafter = ([random_rows(LIVE**j) for j in range(places)] for places in (WIDTH + 1, WIDTH))
    laws = [[np.stack([oracle_law(bench, row, params) for row in rows]) for rows in side] for side in (target, drafter)]
    return Game(params, target, drafter, *laws)


def new_trials(bench: Bench, game: Game, kind: str, rule: str, count: int) -> Drafted:
    """Requests with two drafts each, of a kind: "one_hot", "probabilities", or "own" for those of the adapter."""
    seeds = bench.new_seeds(count)
    drafts, prefix = np.zeros((count, WIDTH), np.int64), np.zeros(count, np.int64)
    rows, laws = [game.target[0][prefix]], []
    for j in range(WIDTH):
        laws.append(game.drafter_laws[j][prefix])
        if kind == "one_hot":
            drafts[:, j] = bench.rng.choice(LIVE, count, p=ONE_HOT)
        elif kind == "probabilities":
            u = bench.rng.random((count, 1))
            drafts[:, j] = np.minimum((u >= laws[j][:, :LIVE].cumsum(1)).sum(1), LIVE - 1)
        else:
            draft = bench.method("draft", VOCAB)
            places = torch.full((count,), POSITION + j)
            logits = game.drafter[j][prefix].to(bench.device)  # a copy, as the assignment of what comes back
            drafts[:, j] = draft(logits, [game.params] * count, list(seeds), places, j, rule).cpu().numpy()
        prefix = prefix * LIVE + drafts[:, j]
        rows.append(game.target[j + 1][prefix])
    has_laws = kind != "one_hot" and rule != "match"
    return Drafted(
        torch.stack(rows, 1).flatten(0, 1),
        [game.params] * count,
        seeds,
        torch.full((count,), POSITION),
        torch.from_numpy(drafts),
        [WIDTH] * count,
        torch.from_numpy(np.stack(laws, 1)).float().flatten(0, 1) if has_laws else None,
    )


def completed(bench: Bench, game: Game, trials: Drafted, verified: Verified) -> NDArray[np.int64]:
    """Three tokens of each trial ``[N, 3]``: those emitted, then the target's own draws behind them."""
    tokens, emitted = verified.token_ids.numpy().copy(), verified.num_emitted.numpy()
    for j in range(1, WIDTH + 1):
        short = np.flatnonzero(emitted <= j)
        live = short[((tokens[short, :j] >= 0) & (tokens[short, :j] < LIVE)).all(1)]
        if len(live) == 0:
            continue
        prefix = tokens[live, :j] @ LIVE ** np.arange(j)[::-1]
        seeds = [trials.seeds[n] for n in live]
        drawn = bench.sample(game.target[j][prefix], [game.params] * len(live), seeds, [POSITION + j] * len(live))
        tokens[live, j] = drawn.numpy()
    return tokens


def rules_of(bench: Bench, kind: str = "own") -> tuple[str, ...]:
    """The declared rules that take a kind of drafts; the question is not asked where there is none."""
    bench.method("verify", VOCAB)
    rules, kinds = bench.semantics.rules, bench.semantics.draft_kinds
    bench.needs(bool(rules), "rules=()")
    taken = tuple(rule for rule in rules if kind == "own" or rule == "match" or kind in kinds)
    bench.needs(bool(taken), f"draft_kinds={kinds}")
    return taken


def lossless(bench: Bench, kind: str) -> Finding:
    """Whether tokens 1, (1, 2) and (1, 2, 3) have the target's law, under every rule and filter."""
    rules = rules_of(bench, kind)
    if kind == "own":
        bench.method("draft", VOCAB)
    least, furthest, tests, fewest = 1.0, "", 0, bench.effort.trials
    for rule in rules:
        for params in bench.supported(PARAMS) or [Params()]:
            p_value, text, trials = _lossless(bench, kind, rule, params)
            fewest = min(fewest, trials)
            tests += WIDTH + 1
            if p_value < least:
                least, furthest = p_value, text
            if p_value < ALARM:
                return Finding(False, text, "", p_value, tests)
    detail = f"{', '.join(rules)}: at least {fewest} trials each; furthest: {furthest}"
    return Finding(True, detail, variation(fewest, LIVE**3), least, tests)


def _lossless(bench: Bench, kind: str, rule: str, params: Params) -> tuple[float, str, int]:
    """The least of three p-values, the cell that is furthest from its law, and the number of trials."""
    game, emitted = new_game(bench, params), []
    for count in bench.portions(bench.effort.trials, MOST_TRIALS, bench.effort.question_s / 4):
        trials = new_trials(bench, game, kind, rule, count)
        emitted.append(completed(bench, game, trials, bench.verify(trials, rule)))
    tokens, where = np.concatenate(emitted), f"{rule}, {kind} drafts, {params}"
    if (tokens < 0).any() or (tokens >= LIVE).any():
        n, j = np.argwhere((tokens < 0) | (tokens >= LIVE))[0]
        return 0.0, f"{where}: token {tokens[n, j]} at place {j} is masked or no token", 0
    number, least, text = np.zeros(len(tokens), np.int64), 1.0, where
    for places in range(1, WIDTH + 2):
        number = number * LIVE + tokens[:, places - 1]
        counts, law = np.bincount(number, minlength=LIVE**places), game.joint(places)
        p_value = multinomial_p_value(counts, law)
        if p_value < least:
            worst = furthest_cell(counts, law)
            prefix = [worst // LIVE**j % LIVE for j in reversed(range(places))]
            came = f"tokens {prefix} came {counts[worst]} times, the law says {len(tokens) * law[worst]:.1f}"
            least, text = p_value, f"{where}: {came}"
    return least, text, len(tokens)


for name, kind, drafts in (
    ("one_hot", "one_hot", "one-hot drafts"),
    ("drawn", "probabilities", "drafts of known laws"),
    ("own_drafts", "own", "the sampler's own drafts"),  # whose noise is independent where a rule needs it
):
    ask = functools.partial(lossless, kind=kind)
    question(f"verification.{name}", f"lossless: {drafts}", lambda effort: variation(effort.trials, LIVE**3))(ask)


def alike(bench: Bench, game: Game, drafts: Tensor, probs: Tensor | None) -> Drafted:
    """Requests of the game's first row at every place, as many places as in the trials of losslessness."""
    n = len(drafts)
    logits, places = game.target[0].repeat(n * (WIDTH + 1), 1), torch.full((n,), POSITION)
    return Drafted(logits, [game.params] * n, bench.new_seeds(n), places, drafts, [WIDTH] * n, probs)


def num_impossible(effort: Effort) -> int:
    """Drafts of probability 0, under each rule."""
    return min(effort.trials, 4 * MOST_TRIALS)


def impossible(bench: Bench, kind: str) -> Iterator[Count]:
    """Counts of requests that accept a draft whose probability is 0 in the target."""
    rules, count = rules_of(bench, kind), num_impossible(bench.effort)
    params = (bench.supported([Params(top_k=2)]) or [Params()])[0]
    for rule in rules:
        game = new_game(bench, params)
        dead = int(np.flatnonzero(game.target_laws[0][0] == 0.0)[0])
        probs = None
        if kind == "probabilities" and rule != "match":
            probs = torch.zeros(count * WIDTH, VOCAB)
            probs[:, :LIVE], probs[:, dead] = 0.1, 1.0 - 0.1 * (LIVE - (dead < LIVE))
        drafted = alike(bench, game, torch.full((count, WIDTH), dead), probs)
        verified = bench.verify(drafted, rule)
        is_wrong = verified.num_accepted > 0
        yield counted(f"{rule}, draft {dead}", is_wrong, first_request(drafted, verified, is_wrong))


for name, kind, drafts in (
    ("impossible", "one_hot", "a one-hot draft"),
    ("impossible_drawn", "probabilities", "a drawn draft"),
):
    text = f"{drafts} of probability 0 is never accepted"
    comparison(f"verification.{name}", text, num_impossible, "requests")(functools.partial(impossible, kind=kind))


@question(
    "verification.out_of_range",
    "a draft that is no token id is rejected",
    lambda effort: variation(min(effort.trials, MOST_TRIALS), LIVE),
)
def out_of_range(bench: Bench) -> Finding:
    rules, count = rules_of(bench, "one_hot"), min(bench.effort.trials, MOST_TRIALS)
    least, bad = 1.0, torch.tensor([-1, VOCAB, 2**31 - 1, -(2**31)])
    for rule in rules:
        game = new_game(bench, Params())
        drafted = alike(bench, game, bad[torch.arange(count) % len(bad)][:, None].repeat(1, WIDTH), None)
        verified = bench.verify(drafted, rule)
        first = verified.token_ids[:, 0]
        wrong = (verified.num_accepted > 0) | (verified.num_emitted != 1) | (first < 0) | (first >= VOCAB)
        if wrong.any():
            return Finding(False, f"{rule}, {VOCAB} tokens: {first_request(drafted, verified, wrong)}")
        # The token in the draft's place has the target's law.
        least = min(least, multinomial_p_value(np.bincount(first.numpy(), minlength=VOCAB), game.target_laws[0][0]))
    detail = f"{', '.join(rules)}: drafts {bad.tolist()}, {count} each (p < {least:.0e})"
    return Finding(least >= ALARM, detail, variation(count, LIVE), least, len(rules))


@comparison(
    "verification.counters",
    "emitted tokens are the accepted drafts and one more",
    lambda effort: COUNTED,
    "requests of 0, 1 and 2 drafts",
)
def counters(bench: Bench) -> Iterator[Count]:
    for rule in rules_of(bench):
        game = new_game(bench, Params())
        drafted = ragged(new_trials(bench, game, [*bench.semantics.draft_kinds, "one_hot"][0], rule, COUNTED))
        verified = bench.verify(drafted, rule)
        tokens, emitted, accepted = verified
        last = tokens.gather(1, accepted.clamp(0, WIDTH)[:, None])[:, 0]
        fits = (emitted == accepted + 1) & (accepted >= 0) & (accepted <= torch.tensor(drafted.num_drafts))
        agrees = (tokens[:, :WIDTH] == drafted.drafts) | (torch.arange(WIDTH) >= accepted[:, None])
        wrong = ~(fits & agrees.all(1) & (last >= 0) & (last < VOCAB))
        yield counted(rule, wrong, first_request(drafted, verified, wrong))


def ragged(trials: Drafted) -> Drafted:
    """The same trials with 0, 1 and 2 drafts in turn."""
    counts = torch.arange(len(trials.seeds)) % (WIDTH + 1)
    is_row, is_draft = torch.arange(WIDTH + 1) <= counts[:, None], torch.arange(WIDTH) < counts[:, None]
    return trials._replace(
        logits=trials.logits[is_row.flatten()],
        drafts=torch.where(is_draft, trials.drafts, -1),
        num_drafts=counts.tolist(),
        probs=None if trials.probs is None else trials.probs[is_draft.flatten()],
    )


@comparison("verification.trees", "trees of drafts commit the tokens of sampling", lambda effort: COUNTED, "trees")
def trees(bench: Bench) -> Iterator[Count]:
    bench.method("verify_trees", VOCAB)
    bench.needs_row_seeds()
    nodes, rows = 6, 7
    parents = torch.tensor([[int(bench.rng.integers(-1, node)) for node in range(nodes)] for _ in range(COUNTED)])
    depths = torch.zeros(COUNTED, rows, dtype=torch.int64)
    for node in range(nodes):
        depths[:, node + 1] = depths.gather(1, parents[:, node : node + 1] + 1)[:, 0] + 1
    params, seeds = (bench.supported([Params(top_k=3)]) or [Params()])[0], bench.new_seeds(COUNTED)
    logits = torch.from_numpy(bench.rng.standard_normal((COUNTED * rows, VOCAB))).float()
    of_rows = [seed for seed in seeds for _ in range(rows)]
    own = bench.sample(logits, [params] * len(logits), of_rows, depths.flatten() + POSITION)
    drafts = own.view(COUNTED, rows).gather(1, parents + 1)  # every draft is right, but for some
    drafts = torch.where(torch.from_numpy(bench.rng.random(drafts.shape)) < 0.5, drafts, (drafts + 1) % VOCAB)
    starts = torch.full((COUNTED,), POSITION)
    drafted = Drafted(logits, [params] * COUNTED, seeds, starts, drafts, [nodes] * COUNTED, None)
    verified = bench.verify(drafted, parents=parents)
    wrong, first = strays(drafted, own, verified, parents), ""
    if wrong.any():
        n = int(wrong.nonzero()[0])
        wanted = matched(own.view(COUNTED, rows)[n].tolist(), drafts[n].tolist(), parents[n].tolist())
        first = f"not {wanted}: {first_request(drafted, verified, wrong)}, tree {parents[n].tolist()}"
    yield counted(f"{nodes} nodes", wrong, first)
