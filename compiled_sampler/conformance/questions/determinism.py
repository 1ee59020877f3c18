"""Is a token the same bits in every call and in every batch?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from compiled_sampler.conformance.adapter import Params
from compiled_sampler.conformance.bench import Bench, NotAsked, copied
from compiled_sampler.conformance.fresh_process import call
from compiled_sampler.conformance.question import Count, comparison, counted
from compiled_sampler.conformance.rows import Batch, first_row, hard_batch

ROWS = 48  # of a batch that is compared

Others = Callable[[Bench, Batch], Iterator[tuple[str, Tensor]]]
"""Other ways to get the tokens of a batch, with their names; each gives its tokens in the order of the batch."""


def same_tokens(
    name: str, text: str, *, whole_calls: bool = False, batches: int | None = None
) -> Callable[[Others], Others]:
    """Registers other ways as a question: does each give the tokens of the plain call?"""

    def register(others: Others) -> Others:
        def compared(bench: Bench) -> Iterator[Count]:
            if whole_calls:  # repeated as they are, which samplers of one seed a call promise too
                bench.needs(bench.semantics.seeds != "none", "seeds='none'")
            else:
                bench.needs_row_seeds()
            for _ in bench.portions(batches or bench.effort.batches, 1, 4.0 * bench.effort.question_s):
                batch = hard_batch(bench, ROWS)
                wanted = drawn(bench, batch)
                for way, tokens in others(bench, batch):
                    is_wrong = tokens != wanted
                    yield counted(way, is_wrong, first_row(batch, tokens, wanted, is_wrong))

        comparison(f"determinism.{name}", text, lambda effort: ROWS * (batches or effort.batches), "rows")(compared)
        return others

    return register


def drawn(bench: Bench, batch: Batch) -> Tensor:
    """The tokens of a batch."""
    return bench.sample(*batch)


@same_tokens("twice", "the same call gives the same tokens", whole_calls=True)
def twice(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    yield "the second call", drawn(bench, batch)


@same_tokens("alone", "a row alone draws what it draws in a batch")
def alone(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    yield "alone", torch.cat([drawn(bench, batch.take([row])) for row in range(ROWS)])


@same_tokens("order", "the order of rows changes nothing")
def reordered(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    for name, order in (("in reverse", list(range(ROWS))[::-1]), ("permuted", bench.rng.permutation(ROWS).tolist())):
        tokens = torch.empty(ROWS, dtype=torch.int64)
        tokens[order] = drawn(bench, batch.take(order))
        yield name, tokens


@same_tokens("batch_size", "the size of the batch changes nothing")
def of_other_sizes(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    for size in (2, 3, 7, 17, 33):
        parts = [range(start, min(start + size, ROWS)) for start in range(0, ROWS, size)]
        yield f"in batches of {size}", torch.cat([drawn(bench, batch.take(part)) for part in parts])
    for extra in (1, 16, 80):
        more = hard_batch(bench, extra)
        yield f"before {extra} other rows", drawn(bench, batch.plus(more))[:ROWS]
        yield f"behind {extra} other rows", drawn(bench, more.plus(batch))[extra:]


@same_tokens("batchmates", "greedy, filtered, NaN or masked batchmates change nothing")
def beside_others(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
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


@same_tokens("equal_rows", "equal rows of one seed draw one token")
def doubled(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    tokens = drawn(bench, batch.plus(batch))
    yield "the first of two equal rows", tokens[:ROWS]
    yield "the second of two equal rows", tokens[ROWS:]


@same_tokens("strides", "row strides change nothing", whole_calls=True)
def strided(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    rows, columns = batch.logits.shape
    wide = torch.full((rows, columns + 40), 1e4, device=bench.device)  # what must not be read
    wide[:, :columns] = batch.logits
    yield "in a wider tensor", drawn(bench, batch._replace(logits=wide[:, :columns]))
    apart = torch.full((rows, 2, columns), torch.nan, device=bench.device)
    apart[:, 1] = batch.logits
    yield "in every second row", drawn(bench, batch._replace(logits=apart[:, 1]))


@same_tokens("other_work", "earlier calls change nothing", whole_calls=True)
def after_other_work(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    for size in bench.rng.permutation(40)[:20] + 1:  # of other parameters and seeds, which take and leave slots
        drawn(bench, hard_batch(bench, int(size)))
    torch.rand(7, device=bench.device)
    yield "after other work", drawn(bench, batch)


@same_tokens("preemption", "a request that is resumed draws what it would have drawn")
def resumed(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    for shift in (-3, 5, -1):
        drawn(bench, batch._replace(positions=[max(0, place + shift) for place in batch.positions]))
    parts = range(20), range(20, ROWS)
    yield "after a preemption", torch.cat([drawn(bench, batch.take(part)) for part in parts])


@same_tokens("new_process", "a new process draws the same", whole_calls=True, batches=1)
def in_a_new_process(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    if bench.name is None:
        raise NotAsked("the target has no importable name")
    # Without a group of its own it ends with the process of this question.
    tokens = call(functools.partial(drawn, bench, batch), bench.effort.limit_s, leads_group=False)
    yield "in a new process", tokens


@same_tokens("replay", "a captured call replays with other parameters")
def replayed(bench: Bench, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    capture = bench.method("capture", batch.logits.shape[1])

    def own(batch: Batch) -> tuple[Tensor, list[Params], list[int], Tensor]:  # in memory of its own
        return copied(batch.logits, bench.device), [*batch.params], [*batch.seeds], torch.tensor(batch.positions)

    replay = capture(*own(hard_batch(bench, ROWS)))
    yield "replayed", replay(*own(batch)).cpu()
