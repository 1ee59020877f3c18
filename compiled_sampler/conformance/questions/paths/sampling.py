"""Do all paths that a sampler names give the same bits, for as many hard rows as a run asks for?

From ``MANY_ROWS`` on the work is dealt to processes: a first run spends most of its time on compilation.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_sampler.conformance.adapter import Adapter, Target
from compiled_sampler.conformance.bench import MOST_LOGITS, Bench, NotAsked, checked_tokens
from compiled_sampler.conformance.evidence.statistics import rare_power
from compiled_sampler.conformance.processes.crew import has_many_processors, in_processes
from compiled_sampler.conformance.question import Count, Finding, Question
from compiled_sampler.conformance.questions.rows.batches import WIDE_VOCAB, Batch
from compiled_sampler.conformance.questions.rows.hard_rows import NUM_FAMILIES, mixed_batch
from compiled_sampler.conformance.targets import Setting, bench_of, setting_of

MANY_ROWS = 10_000
"""From so many rows on, several kinds of rows are compared, and in processes."""

VERY_MANY_ROWS = 100_000
"""From so many rows on, also what shorter runs would compile for little: a third kind of rows, and some paths."""

MOST_ROWS = 4096
"""Of one batch."""

SHARES = NUM_FAMILIES
"""Parts that many rows of one kind on one group of paths are dealt to, batch by batch: each has the batches of as many
families of requests, and compiles the stages of one mode, which the others do not need."""

KINDS: tuple[tuple[int, torch.dtype, float], ...] = (
    (127, torch.float32, 0.6),
    (257, torch.bfloat16, 0.385),
    (4099, torch.float16, 0.015),
)
"""Vocabularies and dtypes of many rows, with their shares; a third one is left to ``VERY_MANY_ROWS``."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a comparison, which depends on nothing but itself.

    Args:
        vocab_size: V.
        dtype: of the logits.
        paths: names of the paths to compare.
        rows: of all shares.
        shares: that the batches are dealt to.
        share: which of them.
        rule: of a verification; "" samples.
    """

    vocab_size: int
    dtype: torch.dtype
    paths: tuple[str, ...]
    rows: int
    shares: int = 1
    share: int = 0
    rule: str = ""


Compare = Callable[[Bench, Part], Iterator[Count]]
"""The counts of a part, one a batch and path."""


def paths_of(bench: Bench, vocab_size: int) -> dict[str, Target]:
    """The other samplers that promise the same tokens, by name.

    One whose target has an attribute ``short_on``, a type of device, takes long to prepare on others, where it is left
    to runs of ``VERY_MANY_ROWS``.
    """
    paths: dict[str, Target] = bench.method("paths", vocab_size)()
    if bench.effort.rows < VERY_MANY_ROWS:
        here = bench.device.type
        paths = {name: each for name, each in paths.items() if getattr(each, "short_on", here) == here}
    if not paths:
        raise NotAsked("the adapter names no other path")
    return paths


def groups_of(paths: dict[str, Target]) -> list[tuple[str, ...]]:
    """Names of paths that are compared in one process: those whose targets have the same attribute ``group``.

    They are in the order in which they begin. What two groups compile should be in the first, and on disk for the next.
    """
    groups: dict[object, list[str]] = {}
    for name, target in paths.items():
        groups.setdefault(getattr(target, "group", name), []).append(name)
    return [tuple(names) for names in groups.values()]


def counted(bench: Bench, compare: Compare, parts: Sequence[Part]) -> tuple[Count, ...]:
    """The counts of all parts, added up by path; in processes where they pay and the target has a name.

    The rows of a part depend on the part and on the seed of the run alone.
    """
    pays = bench.crew is not None or bench.effort.rows >= MANY_ROWS or has_many_processors()
    made: Iterable[Iterable[Count]]
    if bench.name is not None and pays:
        dealt = [functools.partial(_of_a_process, compare, setting_of(bench), part) for part in parts]
        made = in_processes(dealt, bench.crew, bench.device, bench.effort.limit_s)
    else:
        made = (_begun(compare, bench, part) for part in parts)
    totals: dict[str, Count] = {}
    for each in itertools.chain.from_iterable(made):
        old = totals.get(each.path, Count(each.path, 0, 0))
        compared, mismatches = old.compared + each.compared, old.mismatches + each.mismatches
        totals[each.path] = Count(each.path, compared, mismatches, old.first or each.first)
    return tuple(totals.values())


def _of_a_process(compare: Compare, setting: Setting, part: Part) -> list[Count]:
    return list(_begun(compare, bench_of(setting), part))


def _begun(compare: Compare, bench: Bench, part: Part) -> Iterator[Count]:
    bench.begin(f"{part}")
    yield from compare(bench, part)


def judged(counts: Sequence[Count], what: str) -> Finding:
    """What counts say: every mismatch is a failure."""
    wrong = [each for each in counts if each.mismatches]
    if wrong:
        worst = wrong[0]
        detail = f"{worst.path}: {worst.mismatches} of {worst.compared} {what} differ; {worst.first}"
        return Finding(False, detail, "", counts=tuple(counts))
    fewest = min((each.compared for each in counts), default=0)
    detail = f"{fewest} {what} or more are the same bits on {', '.join(each.path for each in counts)}"
    return Finding(True, detail, f"one in {1 / rare_power(fewest):.0f} {what}", counts=tuple(counts))


def sizes(rows: int, vocab_size: int) -> list[int]:
    """Rows of each batch; there is one for each family of requests at least, if there are as many rows."""
    size = min(MOST_ROWS, max(1, MOST_LOGITS // vocab_size), -(-rows // NUM_FAMILIES))
    return [min(size, rows - start) for start in range(0, rows, size)]


def sampled(bench: Bench, part: Part) -> Iterator[Count]:
    """Counts of rows whose token or status differs; the other paths get the rows in another order."""
    targets, device = paths_of(bench, part.vocab_size), bench.device
    others = {name: targets[name](part.vocab_size, device) for name in part.paths}
    for number, rows in enumerate(sizes(part.rows, part.vocab_size)):
        if number % part.shares != part.share:
            continue
        batch = mixed_batch(bench, rows, part.vocab_size, 1 + number % NUM_FAMILIES)
        batch = batch._replace(logits=batch.logits.to(part.dtype))
        order = torch.from_numpy(bench.rng.permutation(rows))
        moved = batch.take(order.tolist())
        made = {name: drawn(other, moved, device) for name, other in others.items()}
        wanted, flags = drawn(bench.adapter(part.vocab_size), batch, device)  # behind a path that is warmed up
        for name, (found, own) in made.items():
            differs = found != wanted[order]
            if own is not None and flags is not None:
                differs |= torch.tensor([a != flags[n] for a, n in zip(own, order.tolist(), strict=True)])
            yield counted_rows(name, differs, functools.partial(_described, moved, found))


def drawn(adapter: Adapter, batch: Batch, device: torch.device) -> tuple[Tensor, list[set[str]] | None]:
    """Tokens of a batch, and what is reported of each row; None where nothing is. Both of one draw, if they can be.

    Args:
        adapter: with ``sample_with_status`` or not, with ``status`` or not.
        batch: R rows.
        device: of the logits.
    """
    rows = (batch.logits.to(device), batch.params, batch.seeds, torch.tensor(batch.positions))
    at_once, apart = (getattr(adapter, name, None) for name in ("sample_with_status", "status"))
    tokens, status = at_once(*rows) if at_once is not None else (adapter.sample(*rows), apart and apart(*rows))
    return checked_tokens(tokens, (len(batch.logits),)), None if status is None else [set(each) for each in status]


def _described(batch: Batch, found: Tensor, row: int) -> str:
    return f"token {int(found[row])}, V = {batch.logits.shape[1]}, {batch.logits.dtype}, {batch.describe(row)}"


def counted_rows(name: str, differs: Tensor, describe: Callable[[int], str]) -> Count:
    """The count of a comparison, with the first row that differs in words."""
    wrong = differs.nonzero()[:, 0].tolist()
    return Count(name, len(differs), len(wrong), describe(wrong[0]) if wrong else "")


def on_other_paths(bench: Bench) -> Finding:
    """The samplers that promise the same tokens: other backends, other devices, other routes."""
    bench.needs_row_seeds()
    rows = bench.effort.rows
    groups = groups_of(paths_of(bench, WIDE_VOCAB))
    if rows < MANY_ROWS:
        parts = [Part(WIDE_VOCAB, torch.float32, names, rows) for names in groups]
    else:
        parts = [
            Part(vocab_size, dtype, names, math.ceil(rows * of_kind), SHARES, share)
            for names in groups
            for vocab_size, dtype, of_kind in kinds_of(bench)
            for share in reversed(range(SHARES))
        ]
    return judged(counted(bench, sampled, parts), "rows")


def kinds_of(bench: Bench) -> list[tuple[int, torch.dtype, float]]:
    """The kinds of rows of the formats that are declared, with shares that add up to 1."""
    taken = [each for each in KINDS if each[1] == torch.float32 or each[1] in bench.semantics.dtypes]
    taken = taken if bench.effort.rows >= VERY_MANY_ROWS else taken[:2]
    total = sum(share for *_, share in taken)
    return [(vocab_size, dtype, share / total) for vocab_size, dtype, share in taken]


PATHS = Question("determinism.paths", "other backends, devices and routes draw the same", on_other_paths, deals=True)
