"""Do all paths that a sampler names draw, and commit, the same bits, for as many hard rows as a run asks for?"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from compiled_sampler.conformance.adapter import Drafted
from compiled_sampler.conformance.bench import MOST_LOGITS, Bench, Effort, NotAsked
from compiled_sampler.conformance.question import Count, comparison, counted
from compiled_sampler.conformance.rows import (
    NUM_FAMILIES,
    REQUESTS,
    VOCAB,
    WIDE_VOCAB,
    committed,
    drafted_rows,
    first_request,
    first_row,
    mixed_batch,
    strays,
)

MANY_ROWS = 10_000  # from so many rows on, several kinds of rows are compared

VERY_MANY_ROWS = 100_000
"""From so many rows on, also what shorter runs would compile for little: a third kind of rows, and some paths."""

MOST_ROWS = 4096  # of one batch

KINDS: tuple[tuple[int, torch.dtype, float], ...] = (
    (127, torch.float32, 0.6),
    (257, torch.bfloat16, 0.385),
    (4099, torch.float16, 0.015),
)
"""Vocabularies and dtypes of many rows, with their shares; a third one is left to ``VERY_MANY_ROWS``."""

MANY_VOCAB = 127  # of many requests: more than the candidates that a sampler may keep aside
SHARE_OF_MATCH = 10  # requests under match for each one under another rule

MOST_REQUESTS, ROWS_OF_A_REQUEST = 20_000, 5
"""As many requests as rows are asked for, up to so many; above, as many as have the rows, with 4 drafts on average."""


def paths_of(bench: Bench, vocab_size: int) -> dict[str, Bench]:
    """A bench for each of the other samplers that promise the same tokens, by name."""
    targets = bench.method("paths", vocab_size)()
    if bench.effort.rows < VERY_MANY_ROWS:
        # A target that is ``short_on`` one type of device takes long to prepare on others.
        here = bench.device.type
        targets = {name: target for name, target in targets.items() if getattr(target, "short_on", here) == here}
    if not targets:
        raise NotAsked("the adapter names no other path")
    return {name: Bench(target, None, bench.device, bench.effort, bench.seed) for name, target in targets.items()}


def kinds_of(bench: Bench) -> list[tuple[int, torch.dtype, int]]:
    """The vocabularies and formats that are declared, with the rows of each, which are as many as asked for or more."""
    rows = bench.effort.rows
    if rows < MANY_ROWS:
        return [(WIDE_VOCAB, torch.float32, rows)]
    taken = [kind for kind in KINDS if kind[1] == torch.float32 or kind[1] in bench.semantics.dtypes]
    taken = taken if rows >= VERY_MANY_ROWS else taken[:2]
    total = sum(share for *_, share in taken)
    return [(vocab_size, dtype, math.ceil(rows * share / total)) for vocab_size, dtype, share in taken]


def sampled(bench: Bench, vocab_size: int, dtype: torch.dtype, rows: int) -> Iterator[Count]:
    """Counts of rows whose token or status differs; the other paths get the rows in another order."""
    others = paths_of(bench, vocab_size)
    # There is a batch for each family of requests at least, if there are as many rows.
    most = min(MOST_ROWS, max(1, MOST_LOGITS // vocab_size), -(-rows // NUM_FAMILIES))
    for number, start in enumerate(range(0, rows, most)):
        size = min(most, rows - start)
        batch = mixed_batch(bench, size, vocab_size, 1 + number % NUM_FAMILIES)
        batch = batch._replace(logits=batch.logits.to(dtype))
        order = torch.from_numpy(bench.rng.permutation(size))
        moved = batch.take(order.tolist())
        wanted, wanted_status = bench.sample_with_status(*batch)
        for path, other in others.items():
            tokens, status = other.sample_with_status(*moved)
            differs = tokens != wanted[order]
            if status is not None and wanted_status is not None:
                pairs = zip(status, order.tolist(), strict=True)
                differs |= torch.tensor([names != wanted_status[row] for names, row in pairs])
            yield counted(path, differs, first_row(moved, tokens, wanted[order], differs))


@comparison("determinism.paths", "other backends, devices and routes draw the same", lambda effort: effort.rows, "rows")
def draws_on_other_paths(bench: Bench) -> Iterator[Count]:
    bench.needs_row_seeds()
    for kind in kinds_of(bench):
        yield from sampled(bench, *kind)


def requests_of(effort: Effort, rule: str) -> int:
    """Requests with drafts that are compared under a rule."""
    requests = max(min(effort.rows, MOST_REQUESTS), effort.rows // ROWS_OF_A_REQUEST)
    return requests if rule == "match" else max(1, requests // SHARE_OF_MATCH)


def requests_vocab(bench: Bench) -> int:
    """The vocabulary of requests with drafts."""
    return VOCAB if bench.effort.rows < MANY_ROWS else MANY_VOCAB


def works(bench: Bench, rule: str) -> Iterator[tuple[Drafted, Tensor]]:
    """Requests with drafts of every family in turn, one-hot where a rule takes no laws, and what their rows draw."""
    requests = requests_of(bench.effort, rule)
    size = min(REQUESTS, -(-requests // NUM_FAMILIES))
    has_laws = rule != "match" and "probabilities" in bench.semantics.draft_kinds
    for number, start in enumerate(range(0, requests, size)):
        count = min(size, requests - start)
        drafted, own = drafted_rows(bench, count, requests_vocab(bench), 1 + number % NUM_FAMILIES)
        yield drafted if has_laws else drafted._replace(probs=None), own


@comparison(
    "verification.stream",
    "match keeps the tokens of a request without drafts",
    lambda effort: requests_of(effort, "match"),
    "requests",
)
def stream(bench: Bench) -> Iterator[Count]:
    bench.method("verify", VOCAB)
    bench.needs("match" in bench.semantics.rules, "no rule match")
    bench.needs_row_seeds()
    for drafted, own in works(bench, "match"):
        verified = bench.verify(drafted)
        is_wrong = strays(drafted, own, verified)
        yield counted("match, row after row without drafts", is_wrong, first_request(drafted, verified, is_wrong))


@comparison(
    "verification.paths",
    "other backends, devices and routes commit the same",
    lambda effort: requests_of(effort, "block"),
    "requests",
)
def commits_on_other_paths(bench: Bench) -> Iterator[Count]:
    bench.method("verify", VOCAB)
    bench.needs(bool(bench.semantics.rules), "rules=()")
    bench.needs_row_seeds()
    vocab_size = requests_vocab(bench)
    others = paths_of(bench, vocab_size)
    others = {path: other for path, other in others.items() if hasattr(other.adapter(vocab_size), "verify")}
    if not others:
        raise NotAsked("no other path has verify")
    for rule in bench.semantics.rules:
        for drafted, _ in works(bench, rule):
            elsewhere = {path: other.verify(drafted, rule) for path, other in others.items()}
            wanted = committed(bench.verify(drafted, rule))  # last: another path may compile all stages at once
            for path, verified in elsewhere.items():
                is_wrong = (committed(verified) != wanted).any(-1)
                yield counted(f"{rule}, {path}", is_wrong, first_request(drafted, verified, is_wrong))
