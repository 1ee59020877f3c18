"""Trials of verification: two drafts from known laws, and target rows that depend on the tokens before them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_sampler.conformance.adapter import Drafted, Params, Verified
from compiled_sampler.conformance.bench import Bench
from compiled_sampler.conformance.questions.rows.batches import VOCAB, is_clear, oracle_law

LIVE = 4
"""Tokens that target and drafter use: ids below it."""

WIDTH, POSITION = 2, 10
"""Drafts of a trial, and where its first token is drawn."""

ONE_HOT = (0.5, 0.3, 0.15, 0.05)
"""How often each live token is a one-hot draft: not equally, or a wrong residual would cancel out."""

MOST_TRIALS = 2048
"""Of one call."""


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
    """Requests with two drafts each.

    Args:
        bench: to draw with.
        game: their rows.
        kind: of the drafts: "one_hot", any live token, some more often; "probabilities", of the drafter's laws and
            independent of all that the sampler draws; "own", drawn by the sampler's drafter.
        rule: the drafts are for.
        count: N.
    """
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
            logits = game.drafter[j][prefix].to(bench.device)
            drafts[:, j] = draft(logits, [game.params] * count, seeds, places, j, rule).cpu().numpy()
        probs.append(game.drafter_laws[j][prefix])
        prefix = prefix * LIVE + drafts[:, j]
    prefixes = np.stack([np.zeros(count, np.int64), drafts[:, 0], drafts[:, 0] * LIVE + drafts[:, 1]], 1)
    logits = torch.stack([game.target[j][prefixes[:, j]] for j in range(WIDTH + 1)], 1).flatten(0, 1)
    given = None if kind == "one_hot" or rule == "match" else torch.from_numpy(np.stack(probs, 1)).float().flatten(0, 1)
    return Drafted(
        logits,
        [game.params] * count,
        seeds,
        torch.full((count,), POSITION),
        torch.from_numpy(drafts),
        [WIDTH] * count,
        given,
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
        found = bench.sample(logits, [game.params] * len(live), seeds, [POSITION + j] * len(live))
        tokens[live, j] = found.numpy()
    return tokens
