"""Does the law of emitted tokens converge to the target's, whatever drafts and rules? Distances against draws.

    python -m tools.convergence [--draws 1000000] [--threads 1] [--json FILE] [--picture FILE.png]

The three tokens behind one prompt are drawn again and again: without drafts, and with two drafts of the smaller model
of ``tools.model`` under each rule; a token that a verification does not emit is drawn plainly behind it. Target and
drafter keep the 8 likeliest tokens, so the law of the three tokens is known: a softmax in float64, which takes nothing
from the library. The exit status is 1 if a distance is above what perfect draws have but once in a million times, or if
one of two controls, which draw from another law, is not found out by the most draws.
"""

from __future__ import annotations

import argparse
import operator
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_sampler import SamplingParams
from tools.convergence.contexts import contexts_of, law
from tools.convergence.distances import expected, limit, total_variation
from tools.convergence.draws import Drawer, ways, wrong_ways
from tools.convergence.picture import draw
from tools.convergence.tables import rendered
from tools.measuring.environment import environment, write_json
from tools.toy_engine.runs import load_models

LENGTH, TOP_K = 3, 8
PROMPT = "Lists\n   The items of a list are arbitrary Python objects.  Lists are for"
"""Of the text that the models were trained on; behind it they agree about as often as elsewhere."""
FEWEST, BATCH, SEED = 100, 50_000, 35


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, print, store; 1 if a law is not what it should be, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1_000_000, help="most draws of each way")
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--json", help="store the numbers in this file")
    parser.add_argument("--picture", type=Path, help="draw them into this file")
    options = parser.parse_args(argv)
    if options.draws < FEWEST:
        parser.error(f"--draws must be at least {FEWEST}, got {options.draws}")
    torch.set_num_threads(options.threads)
    measured = {**environment("cpu"), **measure(options.draws, options.backend)}
    print(rendered(measured))
    if options.json:
        write_json(options.json, measured)
    if options.picture:
        draw(measured, options.picture)
    return int(bool(wrong(measured)))


def measure(most: int, backend: str) -> dict[str, Any]:
    """Distances of every way at 100, 300, 1,000, ... draws, and those of perfect draws."""
    models, tokenizer = load_models()
    contexts = contexts_of(models, tokenizer.encode(PROMPT), LENGTH, TOP_K)
    target, draft = (law(each, contexts.following, LENGTH, TOP_K).numpy() for each in contexts[:2])
    drawer = Drawer(contexts, LENGTH, SamplingParams(top_k=TOP_K, seed=SEED), backend)
    points = checkpoints(most)
    return {
        "prompt": PROMPT,
        "outcomes": int((target > 0).sum()),
        "draft_distance": round(float(np.abs(target - draft).sum() / 2), 4),
        "draws": points,
        "expected": [round(expected(n, target), 6) for n in points],
        "limit": [round(limit(n, target), 6) for n in points],
        "right": {name: distances(way, points, target) for name, way in ways(drawer).items()},
        "controls": {name: distances(way, points, target) for name, way in wrong_ways(drawer).items()},
    }


def checkpoints(most: int) -> list[int]:
    """100, 300, 1,000, ... up to the most draws, which come last."""
    found = {factor * 10**power for power in range(2, 12) for factor in (1, 3) if factor * 10**power < most}
    return [*sorted(found), most]


def distances(way: Callable[[Tensor], Tensor], points: Sequence[int], target: np.ndarray) -> list[float]:
    """The distance from the target's law after each number of draws."""
    counts, done, found = np.zeros(len(target), dtype=np.int64), 0, []
    for point in points:
        while done < point:
            size = min(BATCH, point - done)
            counts += np.bincount(way(torch.arange(done, done + size)).numpy(), minlength=len(target))
            done += size
        found.append(round(total_variation(counts, target), 6))
    return found


def wrong(measured: dict[str, Any]) -> list[str]:
    """The ways that are too far from the target's law, and the controls that are not."""
    limits = measured["limit"]
    far = [name for name, found in measured["right"].items() if any(map(operator.gt, found, limits))]
    return far + [name for name, found in measured["controls"].items() if found[-1] <= limits[-1]]


if __name__ == "__main__":
    sys.exit(main())
