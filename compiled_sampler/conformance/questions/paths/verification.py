"""Do verifications leave the stream alone under match, and commit the same on every path under every rule?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from compiled_sampler.conformance.adapter import Drafted, Params
from compiled_sampler.conformance.bench import Bench, Effort, NotAsked
from compiled_sampler.conformance.question import Count, Finding, Question
from compiled_sampler.conformance.questions.paths.sampling import (
    MANY_ROWS,
    SHARES,
    Part,
    counted,
    counted_rows,
    groups_of,
    judged,
    paths_of,
)
from compiled_sampler.conformance.questions.rows.batches import VOCAB
from compiled_sampler.conformance.questions.rows.drafted_rows import (
    REQUESTS,
    WIDTH,
    Work,
    committed,
    drafted_rows,
    strays,
)
from compiled_sampler.conformance.questions.rows.hard_rows import NUM_FAMILIES

MANY_VOCAB = 127
"""Of many requests: more than the candidates that a sampler may keep aside."""

SHARE_OF_MATCH = 10
"""Requests under match for each one under another rule."""

MOST_REQUESTS, ROWS_OF_A_REQUEST = 20_000, 5
"""As many requests as rows are asked for, up to so many; above, as many as have the rows, with 4 drafts on average."""


def requests_of(effort: Effort, rule: str) -> int:
    """Requests that are compared under a rule."""
    requests = max(min(effort.rows, MOST_REQUESTS), effort.rows // ROWS_OF_A_REQUEST)
    return requests if rule == "match" else max(1, requests // SHARE_OF_MATCH)


def parts(bench: Bench, rule: str, groups: list[tuple[str, ...]]) -> list[Part]:
    """Parts for one rule: one for each group of paths, or for each share of many requests."""
    requests = requests_of(bench.effort, rule)
    if bench.effort.rows < MANY_ROWS:
        return [Part(VOCAB, torch.float32, names, requests, rule=rule) for names in groups]
    return [
        Part(MANY_VOCAB, torch.float32, names, requests, SHARES, share, rule)
        for names in groups
        for share in reversed(range(SHARES))
    ]


def batches(bench: Bench, part: Part) -> Iterator[Work]:
    """Requests of every family in turn."""
    size = min(REQUESTS, -(-part.rows // NUM_FAMILIES))
    prepare = preparing(bench, part)
    for number, start in enumerate(range(0, part.rows, size)):
        if number % part.shares != part.share:
            continue
        yield drafted_rows(bench, min(size, part.rows - start), part.vocab_size, 1 + number % NUM_FAMILIES, prepare)


def preparing(bench: Bench, part: Part) -> Callable[[Sequence[Params]], object] | None:
    """What lets the adapter compile for requests of some parameters, where processes compile side by side."""
    prepare = getattr(bench.adapter(part.vocab_size), "prepare", None)
    if prepare is None or part.shares == 1:
        return None
    return functools.partial(prepare, rule=part.rule, width=WIDTH, has_laws=has_laws(bench, part.rule))


def has_laws(bench: Bench, rule: str) -> bool:
    """Whether drafts are judged with the laws that they were drawn from; else as one-hot."""
    return rule != "match" and "probabilities" in bench.semantics.draft_kinds


def given(bench: Bench, drafted: Drafted, rule: str) -> Drafted:
    """The drafts in a form that the rule takes: with their laws, or one-hot."""
    return drafted if has_laws(bench, rule) else drafted._replace(probs=None)


def described(work: Work, n: int) -> str:
    """What repeats one request, besides its logits."""
    asked = work.drafted
    where = f"request {n}: {asked.params[n]}, seed {asked.seeds[n]}, position {int(asked.positions[n])}"
    return f"{where}, drafts {asked.drafts[n, : asked.num_drafts[n]].tolist()}"


def against_samples(bench: Bench, part: Part) -> Iterator[Count]:
    """Counts of requests whose tokens under match are not those of ``sample``."""
    for work in batches(bench, part):
        wrong = strays(work, bench.verify(given(bench, work.drafted, part.rule), part.rule))
        yield counted_rows(part.paths[0], wrong, functools.partial(described, work))


def against_paths(bench: Bench, part: Part) -> Iterator[Count]:
    """Counts of requests that commit something else on another path."""
    targets = paths_of(bench, part.vocab_size)
    paths = {name: Bench(targets[name], None, bench.device, bench.effort, bench.seed) for name in part.paths}
    others = {name: each for name, each in paths.items() if hasattr(each.adapter(part.vocab_size), "verify")}
    for work in batches(bench, part):
        asked = given(bench, work.drafted, part.rule)
        made = {name: committed(other.verify(asked, part.rule)) for name, other in others.items()}
        wanted = committed(bench.verify(asked, part.rule))  # behind a path that is warmed up
        for name, found in made.items():
            differs = (found != wanted).any(-1)
            yield counted_rows(f"{part.rule}, {name}", differs, functools.partial(described, work))


def stream(bench: Bench) -> Finding:
    """Under match, the tokens are those that sample draws, whatever the drafts and however many."""
    bench.method("verify", VOCAB)
    bench.needs("match" in bench.semantics.rules, "no rule match")
    bench.needs_row_seeds()
    name = "match, row after row without drafts"
    return judged(counted(bench, against_samples, parts(bench, "match", [(name,)])), "requests")


def on_other_paths(bench: Bench) -> Finding:
    """Under every rule, the paths of the sampler commit the same."""
    bench.method("verify", VOCAB)
    bench.needs(bool(bench.semantics.rules), "rules=()")
    bench.needs_row_seeds()
    groups = groups_of(paths_of(bench, VOCAB))
    rules = [*reversed(bench.semantics.rules)]  # match, the first one of ours, is compiled for the stream too
    asked = [part for names in groups for rule in rules for part in parts(bench, rule, [names])]
    counts = counted(bench, against_paths, asked)
    if not counts:
        raise NotAsked("no other path has verify")
    return judged(counts, "requests")


STREAM = Question("verification.stream", "match keeps the tokens of a request without drafts", stream, deals=True)
PATHS = Question("verification.paths", "other backends, devices and routes commit the same", on_other_paths, deals=True)
