"""Is a token the same bits on every path and in every batch?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from compiled_sampler.conformance.adapter import Params
from compiled_sampler.conformance.bench import Bench, NotAsked, copied
from compiled_sampler.conformance.evidence import rare_power
from compiled_sampler.conformance.fresh_process import call
from compiled_sampler.conformance.question import Finding, Question
from compiled_sampler.conformance.questions.paths import SAMPLING_PATHS
from compiled_sampler.conformance.rows import Batch, hard_batch

ROWS = 48
"""Of a batch that is compared."""

Other = Callable[[Bench, Batch], Iterator[tuple[str, Tensor]]]
"""Other ways to get the tokens of a batch, with their names; each gives its tokens in the order of the batch."""


def drawn(bench: Bench, batch: Batch) -> Tensor:
    """The tokens of a batch."""
    return bench.sample(*batch)


def compared(bench: Bench, others: Other, *, whole_calls: bool = False, batches: int | None = None) -> Finding:
    """Whether every other way gives the tokens of the plain call."""
    if whole_calls:
        bench.needs(bench.semantics.seeds != "none", "seeds='none'")
    else:
        bench.needs_row_seeds()
    total = 0
    for _ in bench.portions(batches or bench.effort.batches, 1, 4.0 * bench.effort.question_s):
        batch = hard_batch(bench, ROWS)
        wanted = drawn(bench, batch)
        for name, tokens in others(bench, batch):
            total += len(wanted)
            different = (tokens != wanted).nonzero()[:, 0].tolist()
            if different:
                n = different[0]
                detail = f"{name}: {len(different)} of {ROWS} rows differ; token {int(tokens[n])}, not {int(wanted[n])}"
                return Finding(False, f"{detail}; {batch.describe(n)}", "")
    return Finding(True, f"{total} rows are the same bits", f"one row in {1 / rare_power(total):.0f}")


def twice(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """The same call again."""
    yield "the second call", drawn(bench, batch)


def alone(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """Every row alone."""
    yield "alone", torch.cat([drawn(bench, batch.take([row])) for row in range(ROWS)])


def reordered(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """The rows in other orders."""
    for name, order in (("in reverse", list(range(ROWS))[::-1]), ("permuted", bench.rng.permutation(ROWS).tolist())):
        tokens = torch.empty(ROWS, dtype=torch.int64)
        tokens[order] = drawn(bench, batch.take(order))
        yield name, tokens


def of_other_sizes(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """The rows in batches of other sizes, at their ends and at their beginnings."""
    for size in (2, 3, 7, 17, 33):
        parts = [list(range(start, min(start + size, ROWS))) for start in range(0, ROWS, size)]
        yield f"in batches of {size}", torch.cat([drawn(bench, batch.take(part)) for part in parts])
    for extra in (1, 16, 80):
        more = hard_batch(bench, extra)
        yield f"before {extra} other rows", drawn(bench, batch.plus(more))[:ROWS]
        yield f"behind {extra} other rows", drawn(bench, more.plus(batch))[extra:]


def beside_others(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """The rows one by one, and together, next to rows that change the route of a batch."""
    for name, mate in batchmates(bench, batch):
        yield f"next to {name}", torch.cat([drawn(bench, mate.plus(batch.take([row])))[-1:] for row in range(ROWS)])
        yield f"together, next to {name}", drawn(bench, batch.plus(mate))[:ROWS]


def batchmates(bench: Bench, batch: Batch) -> Iterator[tuple[str, Batch]]:
    """Single rows of every kind that another route may be taken for."""
    one = batch.take([0])
    kinds = {
        "a greedy row": Params(temperature=0.0),
        "a row without filters": Params(),
        "a row of top_k": Params(top_k=7),
        "a row of a wide top_k": Params(top_k=300),
        "a row of top_p": Params(top_p=0.97),
        "a row of min_p": Params(min_p=0.01),
    }
    for name, params in kinds.items():
        if bench.supported([params]):
            yield name, one._replace(params=[params])
    plain = one._replace(params=[Params()])
    if bench.semantics.nan != "raises":
        yield "a row of NaN", plain._replace(logits=torch.full_like(one.logits, torch.nan))
    if bench.semantics.all_masked != "raises":
        yield "a masked row", plain._replace(logits=torch.full_like(one.logits, -torch.inf))


def strided(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """Logits that are views of a larger tensor, whose other columns hold what must not be read."""
    rows, columns = batch.logits.shape
    wide = torch.full((rows, columns + 40), 1e4, device=bench.device)
    wide[:, :columns] = batch.logits
    yield "in a wider tensor", drawn(bench, batch._replace(logits=wide[:, :columns]))
    apart = torch.full((rows, 2, columns), torch.nan, device=bench.device)
    apart[:, 1] = batch.logits
    yield "in every second row", drawn(bench, batch._replace(logits=apart[:, 1]))


def after_other_work(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """The same call after calls of other sizes, parameters and seeds, which took and left slots and buffers."""
    for size in bench.rng.permutation(40)[:20] + 1:
        drawn(bench, hard_batch(bench, int(size)))
    torch.rand(7, device=bench.device)
    yield "after other work", drawn(bench, batch)


def resumed(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """Each request draws positions before and behind its own in between, as one that was preempted does."""
    for shift in (-3, 5, -1):
        drawn(bench, batch._replace(positions=[max(0, place + shift) for place in batch.positions]))
    yield (
        "after a preemption",
        torch.cat([drawn(bench, batch.take(rows)) for rows in (list(range(20)), list(range(20, ROWS)))]),
    )


def in_a_new_process(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """The same call in a new process."""
    if bench.name is None:
        raise NotAsked("the target has no importable name")
    tokens = call(functools.partial(drawn, bench, batch), bench.effort.limit_s, leads_group=False)
    yield "in a new process", tokens


def replayed(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """A captured call, replayed with other logits, parameters, seeds and positions."""
    capture = bench.method("capture", batch.logits.shape[1])
    first = hard_batch(bench, ROWS)
    replay = capture(*_given(bench, first))
    yield "replayed", replay(*_given(bench, batch)).cpu()


def _given(bench: Bench, batch: Batch) -> tuple[Tensor, list[Params], list[int], Tensor]:
    """The arguments of a capture or replay, in memory of their own."""
    return copied(batch.logits, bench.device), [*batch.params], [*batch.seeds], torch.tensor(batch.positions)


def one_seed(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """A row that stands in a batch twice draws one token."""
    tokens = drawn(bench, batch.plus(batch))
    yield "the first of two equal rows", tokens[:ROWS]
    yield "the second of two equal rows", tokens[ROWS:]


def _question(
    name: str,
    text: str,
    others: Other,
    *,
    whole_calls: bool = False,
    batches: int | None = None,
    is_long: bool = False,
) -> Question:
    ask = functools.partial(compared, others=others, whole_calls=whole_calls, batches=batches)
    return Question(f"determinism.{name}", text, ask, is_long=is_long)


QUESTIONS = (
    _question("twice", "the same call gives the same tokens", twice, whole_calls=True),
    _question("alone", "a row alone draws what it draws in a batch", alone),
    _question("order", "the order of rows changes nothing", reordered),
    _question("batch_size", "the size of the batch changes nothing", of_other_sizes),
    _question("batchmates", "greedy, filtered, NaN or masked batchmates change nothing", beside_others),
    _question("equal_rows", "equal rows of one seed draw one token", one_seed),
    _question("strides", "row strides change nothing", strided, whole_calls=True),
    _question("other_work", "earlier calls change nothing", after_other_work, whole_calls=True),
    _question("preemption", "a request that is resumed draws what it would have drawn", resumed),
    _question(
        "new_process", "a new process draws the same", in_a_new_process, whole_calls=True, batches=1, is_long=True
    ),
    SAMPLING_PATHS,
    _question("replay", "a captured call replays with other parameters", replayed),
)
