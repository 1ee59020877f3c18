"""Does a verification of drafts keep the target's law, or its tokens, and count what it emits?

Trials have two drafts from known laws, and target rows that depend on the tokens before them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_sampler.conformance.adapter import Drafted, Params, Verified
from compiled_sampler.conformance.bench import Bench, NotAsked
from compiled_sampler.conformance.evidence import ALARM, multinomial_p_value, rare_power
from compiled_sampler.conformance.question import Finding, Question
from compiled_sampler.conformance.questions.law import variation
from compiled_sampler.conformance.questions.paths import STREAM, VERIFICATION_PATHS
from compiled_sampler.conformance.rows import VOCAB, is_clear, oracle_law

LIVE = 4
"""Tokens that target and drafter use: ids below it."""

WIDTH, POSITION = 2, 10
"""Drafts of a trial, and where its first token is drawn."""

ONE_HOT = (0.5, 0.3, 0.15, 0.05)
"""How often each live token is a one-hot draft: not equally, or a wrong residual would cancel out."""

MOST_TRIALS = 2048
"""Of one call."""

PARAMS = (Params(temperature=0.9), Params(top_k=3), Params(top_p=0.8), Params(min_p=0.3))


class Game(NamedTuple):
    """The logits of every place after every live prefix, for target and drafter."""

    params: Params
    target: list[Tensor]
    """float32 ``[LIVE**j, VOCAB]`` for places j = 0, 1, 2; the row of a prefix is its number in base LIVE."""
    drafter: list[Tensor]
    """The same for the places of drafts, 0 and 1."""
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
    target, drafter = ([_rows(bench, params, LIVE**j) for j in range(places)] for places in (WIDTH + 1, WIDTH))
    laws = [[np.stack([oracle_law(bench, row, params) for row in rows]) for rows in side] for side in (target, drafter)]
    return Game(params, target, drafter, *laws)


def _rows(bench: Bench, params: Params, count: int) -> Tensor:
    rows = torch.full((count, VOCAB), -torch.inf)
    for row in rows:
        while True:
            row[:LIVE] = torch.from_numpy((bench.rng.standard_normal(LIVE) * 48).round() / 64).float()
            if is_clear(bench, row, params) and len(set(row[:LIVE].tolist())) == LIVE:
                break
    return rows


def new_trials(bench: Bench, game: Game, kind: str, rule: str, count: int) -> Drafted:
    """Requests with two drafts each."""
    seeds = bench.new_seeds(count)
    drafts, prefix, probs = np.zeros((count, WIDTH), np.int64), np.zeros(count, np.int64), []
    for j in range(WIDTH):
        if kind == "one_hot":
            drafts[:, j] = bench.rng.choice(LIVE, count, p=ONE_HOT)
        elif kind == "probabilities":
            drafts[:, j] = picked(bench, game.drafter_laws[j][prefix])
        else:
            draft = bench.method("draft", VOCAB)
            places = torch.full((count,), POSITION + j)
            logits = game.drafter[j][prefix].to(bench.device)  # a copy, as the assignment of what comes back
            drafts[:, j] = draft(logits, [game.params] * count, list(seeds), places, j, rule).cpu().numpy()
        probs.append(game.drafter_laws[j][prefix])
        prefix = prefix * LIVE + drafts[:, j]
    prefixes = np.stack([np.zeros(count, np.int64), drafts[:, 0], drafts[:, 0] * LIVE + drafts[:, 1]], 1)
    logits = torch.stack([game.target[j][prefixes[:, j]] for j in range(WIDTH + 1)], 1).flatten(0, 1)
    laws = None if kind == "one_hot" or rule == "match" else torch.from_numpy(np.stack(probs, 1)).float().flatten(0, 1)
    return Drafted(
        logits,
        [game.params] * count,
        seeds,
        torch.full((count,), POSITION),
        torch.from_numpy(drafts),
        [WIDTH] * count,
        laws,
    )


def picked(bench: Bench, laws: NDArray[np.float64]) -> NDArray[np.int64]:
    """One live token of each law ``[N, VOCAB]``."""
    u = bench.rng.random((len(laws), 1))
    tokens: NDArray[np.int64] = np.minimum((u >= laws[:, :LIVE].cumsum(1)).sum(1), LIVE - 1).astype(np.int64)
    return tokens


def completed(bench: Bench, game: Game, trials: Drafted, verified: Verified) -> NDArray[np.int64]:
    """Three tokens of each trial ``[N, 3]``: those emitted, then the target's own draws behind them."""
    tokens, emitted = verified.token_ids.numpy().copy(), verified.num_emitted.numpy()
    for j in range(1, WIDTH + 1):
        short = np.flatnonzero(emitted <= j)
        live = short[((tokens[short, :j] >= 0) & (tokens[short, :j] < LIVE)).all(1)]
        if len(live) == 0:
            continue
        prefix = np.zeros(len(live), np.int64)
        for place in range(j):
            prefix = prefix * LIVE + tokens[live, place]
        seeds = [trials.seeds[n] for n in live]
        logits = game.target[j][prefix]
        drawn = bench.sample(logits, [game.params] * len(live), seeds, [POSITION + j] * len(live))
        tokens[live, j] = drawn.numpy()
    return tokens


def rules_of(bench: Bench, kind: str = "own") -> tuple[str, ...]:
    """The declared rules that take a kind of drafts, "own" for the drafts of the adapter.

    The question is not asked where there is none.
    """
    bench.method("verify", VOCAB)
    rules, kinds = bench.semantics.rules, bench.semantics.draft_kinds
    bench.needs(bool(rules), "rules=()")
    taken = tuple(rule for rule in rules if kind == "own" or rule == "match" or kind in kinds)
    bench.needs(bool(taken), f"draft_kinds={kinds}")
    return taken


def lossless(bench: Bench, kind: str) -> Finding:
    """Whether tokens 1, (1, 2) and (1, 2, 3) have the target's law, under every rule and filter."""
    rules = rules_of(bench, kind)
    least, detail, tests, fewest = 1.0, "", 0, bench.effort.trials
    for rule in rules:
        for params in bench.supported(PARAMS) or [Params()]:
            p_value, text, trials = _lossless(bench, kind, rule, params)
            fewest = min(fewest, trials)
            tests += WIDTH + 1
            if p_value < least:
                least, detail = p_value, text
            if p_value < ALARM:
                return Finding(False, text, "", p_value, tests)
    detail = f"{', '.join(rules)}: at least {fewest} trials each; furthest: {detail}"
    return Finding(True, detail, variation(fewest, LIVE**3), least, tests)


def _lossless(bench: Bench, kind: str, rule: str, params: Params) -> tuple[float, str, int]:
    """The least of three p-values, the cell that is furthest from its law, and the number of trials."""
    game, tuples = new_game(bench, params), []
    for count in bench.portions(bench.effort.trials, MOST_TRIALS, bench.effort.question_s / 4):
        trials = new_trials(bench, game, kind, rule, count)
        tuples.append(completed(bench, game, trials, bench.verify(trials, rule)))
    tokens, least, text = np.concatenate(tuples), 1.0, f"{rule}, {params}"
    if (tokens < 0).any() or (tokens >= LIVE).any():
        n, j = np.argwhere((tokens < 0) | (tokens >= LIVE))[0]
        return 0.0, f"{rule}, {kind} drafts, {params}: token {tokens[n, j]} at place {j} is masked or no token", 0
    number = np.zeros(len(tokens), np.int64)
    for places in range(1, WIDTH + 2):
        number = number * LIVE + tokens[:, places - 1]
        counts, law = np.bincount(number, minlength=LIVE**places), game.joint(places)
        p_value = multinomial_p_value(counts, law)
        if p_value < least:
            worst = int(np.abs((counts - len(tokens) * law) / np.sqrt(np.maximum(len(tokens) * law, 1e-9))).argmax())
            prefix = [worst // LIVE**j % LIVE for j in reversed(range(places))]
            counted = f"tokens {prefix} came {counts[worst]} times, the law says {len(tokens) * law[worst]:.1f}"
            least, text = p_value, f"{rule}, {kind} drafts, {params}: {counted}"
    return least, text, len(tokens)


def impossible(bench: Bench, kind: str) -> Finding:
    """A draft whose probability is 0 in the target is never accepted."""
    rules, count = rules_of(bench, kind), min(bench.effort.trials, MOST_TRIALS * 4)
    params = bench.supported([Params(top_k=2)]) or [Params()]
    for rule in rules:
        game = new_game(bench, params[0])
        row = game.target[0][0]
        dead = int(np.flatnonzero(game.target_laws[0][0] == 0.0)[0])
        probs = None
        if kind == "probabilities" and rule != "match":
            probs = torch.zeros(count * WIDTH, VOCAB)
            probs[:, :LIVE], probs[:, dead] = 0.1, 1.0 - 0.1 * (LIVE - (dead < LIVE))
        drafted = _alike(bench, game.params, row, torch.full((count, WIDTH), dead), probs)
        accepted = bench.verify(drafted, rule).num_accepted
        if (accepted > 0).any():
            n = int((accepted > 0).nonzero()[0, 0])
            where = f"{game.params}, seed {drafted.seeds[n]}, position {POSITION}"
            return Finding(False, f"{rule}: draft {dead} of probability 0 was accepted; row {n}, {where}", "")
    return Finding(True, f"{', '.join(rules)}: {count} drafts", f"acceptance of {rare_power(count):.0e}")


def _alike(bench: Bench, params: Params, row: Tensor, drafts: Tensor, probs: Tensor | None) -> Drafted:
    """Requests with the same draft at every place, as many places as in the trials of losslessness."""
    n = len(drafts)
    places = torch.full((n,), POSITION)
    return Drafted(
        row.expand(n * (WIDTH + 1), -1).contiguous(),
        [params] * n,
        bench.new_seeds(n),
        places,
        drafts,
        [WIDTH] * n,
        probs,
    )


def out_of_range(bench: Bench) -> Finding:
    """A draft that is no token id is rejected, and the token in its place has the target's law."""
    rules, count = rules_of(bench, "one_hot"), min(bench.effort.trials, MOST_TRIALS)
    least, bad = 1.0, torch.tensor([-1, VOCAB, 2**31 - 1, -(2**31)])
    for rule in rules:
        game = new_game(bench, Params())
        drafts = bad[torch.arange(count) % len(bad)][:, None].expand(-1, WIDTH).contiguous()
        drafted = _alike(bench, Params(), game.target[0][0], drafts, None)
        verified = bench.verify(drafted, rule)
        first, accepted = verified.token_ids[:, 0], verified.num_accepted
        wrong = ((accepted > 0) | (verified.num_emitted != 1) | (first < 0) | (first >= VOCAB)).nonzero()[:, 0].tolist()
        if wrong:
            n = wrong[0]
            counts = f"{int(accepted[n])} accepted, {int(verified.num_emitted[n])} emitted, token {int(first[n])}"
            return Finding(False, f"{rule}: draft {int(drafts[n, 0])} of {VOCAB} tokens: {counts}", "")
        p_value = multinomial_p_value(
            np.bincount(first.numpy(), minlength=VOCAB), oracle_law(bench, game.target[0][0], Params())
        )
        least = min(least, p_value)
    detail = f"{', '.join(rules)}: drafts {bad.tolist()}, {count} each (p < {least:.0e})"
    return Finding(least >= ALARM, detail, variation(count, LIVE), least, len(rules))


def counters(bench: Bench) -> Finding:
    """Emitted tokens are the accepted drafts and one more, for requests of different numbers of drafts."""
    rules, count, rows = rules_of(bench), 512, 0
    for rule in rules:
        game = new_game(bench, Params())
        kind = next((k for k in bench.semantics.draft_kinds), "one_hot")
        drafted = _ragged(new_trials(bench, game, kind, rule, count))
        verified = bench.verify(drafted, rule)
        rows += count
        for n in range(count):
            complaint = _miscounted(drafted, verified, n)
            if complaint:
                return Finding(False, f"{rule}: {complaint}; row {n}, seed {drafted.seeds[n]}, position {POSITION}", "")
    return Finding(
        True, f"{', '.join(rules)}: {rows} requests of 0, 1 and 2 drafts", f"one request in {1 / rare_power(rows):.0f}"
    )


def _ragged(trials: Drafted) -> Drafted:
    """The same trials with 0, 1 and 2 drafts in turn."""
    kept = [n % (WIDTH + 1) for n in range(len(trials.seeds))]
    rows = [n * (WIDTH + 1) + j for n, k in enumerate(kept) for j in range(k + 1)]
    drafted = [n * WIDTH + j for n, k in enumerate(kept) for j in range(k)]
    drafts = torch.where(torch.arange(WIDTH) < torch.tensor(kept)[:, None], trials.drafts, -1)
    probs = None if trials.probs is None else trials.probs[drafted]
    return trials._replace(logits=trials.logits[rows], drafts=drafts, num_drafts=kept, probs=probs)


def _miscounted(drafted: Drafted, verified: Verified, n: int) -> str:
    """What is wrong with the counts of a request, or nothing."""
    emitted, accepted = int(verified.num_emitted[n]), int(verified.num_accepted[n])
    tokens, drafts = verified.token_ids[n].tolist(), drafted.drafts[n].tolist()
    counts = f"{accepted} accepted and {emitted} emitted of {drafted.num_drafts[n]} drafts {drafts}, tokens {tokens}"
    fits = emitted == accepted + 1 and 0 <= accepted <= drafted.num_drafts[n]
    return "" if fits and tokens[:accepted] == drafts[:accepted] and 0 <= tokens[accepted] < VOCAB else counts


def own_drafts(bench: Bench) -> Finding:
    """Losslessness where the sampler draws its drafts itself: its noises must be independent where a rule needs it."""
    rules_of(bench)
    if not hasattr(bench.adapter(VOCAB), "draft"):
        raise NotAsked("the adapter has no draft")
    return lossless(bench, "own")


def _lossless_question(name: str, drafts: str, asks: Callable[[Bench], Finding]) -> Question:
    return Question(f"verification.{name}", f"lossless: {drafts}", asks, is_long=True)


QUESTIONS = (
    _lossless_question("one_hot", "one-hot drafts", functools.partial(lossless, kind="one_hot")),
    _lossless_question("drawn", "drafts of known laws", functools.partial(lossless, kind="probabilities")),
    _lossless_question("own_drafts", "the sampler's own drafts", own_drafts),
    STREAM,
    VERIFICATION_PATHS,
    Question(
        "verification.impossible",
        "a one-hot draft of probability 0 is never accepted",
        functools.partial(impossible, kind="one_hot"),
    ),
    Question(
        "verification.impossible_drawn",
        "a drawn draft of probability 0 is never accepted",
        functools.partial(impossible, kind="probabilities"),
    ),
    Question("verification.out_of_range", "a draft that is no token id is rejected", out_of_range),
    Question("verification.counters", "emitted tokens are the accepted drafts and one more", counters),
)
