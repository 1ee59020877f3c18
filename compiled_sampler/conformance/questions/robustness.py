"""What happens to rows that no model should give, and to shapes at the edge?"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from compiled_sampler.conformance.adapter import Drafted, Params
from compiled_sampler.conformance.bench import AdapterError, Bench, NotAsked, check_range
from compiled_sampler.conformance.evidence import bias, one_in
from compiled_sampler.conformance.question import Count, Finding, comparison, counted, question
from compiled_sampler.conformance.questions.law import follows_law, of_draws
from compiled_sampler.conformance.rows import VOCAB, Batch, clear_row, first_row

POOL = (Params(), Params(temperature=0.0), Params(top_k=4), Params(top_p=0.8), Params(min_p=0.1))
IN_POOL = f"a fault in any of {len(POOL)}"
PADDED_ROWS, BAD_ROWS = 256, 256


def bad_row(bench: Bench, row: Tensor, choice: str, lawful: str) -> Finding:
    """Whether a row of bad logits is treated as declared under every kind of parameters, by its law if so declared."""
    pool = bench.supported(POOL)
    if choice == "raises":
        return raises(bench, row, pool)
    if choice == lawful:
        return follows_law(bench, [(row, params) for params in pool], bench.effort.draws // 16)
    for params in pool:
        bench.counts(row, params, BAD_ROWS)
    return Finding(True, "every token is an id of the vocabulary", one_in(BAD_ROWS, "rows"))


def raises(bench: Bench, row: Tensor, pool: list[Params]) -> Finding:
    """Whether every draw raises; a greedy row, which needs no law, may also give any token."""
    silent = []
    bench.sample(torch.zeros(len(pool), VOCAB), pool, [1] * len(pool), [0] * len(pool))  # plain rows must not raise
    for params in pool:
        try:
            token = bench.sample(row[None], [params], [1], [0])
        except AdapterError:
            raise
        except Exception:
            continue
        if params.temperature > 0.0 or not 0 <= int(token) < len(row):
            silent.append(f"{params} gave token {int(token)}")
    return Finding(not silent, f"declared to raise; {silent[0] if silent else 'raised'}", IN_POOL)


@question("robustness.nan", "NaN logits are treated as declared", of_draws(16, VOCAB))
def nan(bench: Bench) -> Finding:
    row = clear_row(bench, Params())
    row[::4] = torch.nan
    return bad_row(bench, row, bench.semantics.nan, "masked")


@question("robustness.infinity", "+inf logits are treated as declared", of_draws(16, 2))
def infinity(bench: Bench) -> Finding:
    row = clear_row(bench, Params())
    row[[6, 21]] = torch.inf
    if bench.semantics.infinity != "drawn":
        return bad_row(bench, row, bench.semantics.infinity, "drawn")
    greedy = [Params(temperature=0.0)] if bench.semantics.greedy_ties == "lowest_id" else []
    params = bench.supported([Params(), *greedy, Params(top_k=4)])
    return follows_law(bench, [(row, p) for p in params], bench.effort.draws // 16)


@question("robustness.all_masked", "a row without a token is treated as declared", IN_POOL)
def all_masked(bench: Bench) -> Finding:
    row = torch.full((VOCAB,), -torch.inf)
    if bench.semantics.all_masked != "minus_one":
        return bad_row(bench, row, bench.semantics.all_masked, "")
    pool = bench.supported(POOL)
    tokens = bench.sample(row.repeat(len(pool), 1), pool, [1] * len(pool), [0] * len(pool)).tolist()
    return Finding(tokens == [-1] * len(pool), f"tokens {tokens}, declared is -1")


@question("robustness.largest_floats", "the largest finite logits are drawn by their law", bias(BAD_ROWS, 2))
def largest_floats(bench: Bench) -> Finding:
    row = torch.linspace(-1.0, 1.0, VOCAB) * bench.semantics.largest_logit  # the last token leads, and is drawn
    return follows_law(bench, [(row, params) for params in bench.supported(POOL)], BAD_ROWS)


@question("robustness.single_token", "a vocabulary of one token", IN_POOL)
def single_token(bench: Bench) -> Finding:
    pool = bench.supported(POOL)
    tokens = bench.sample(torch.zeros(len(pool), 1), pool, [3] * len(pool), list(range(len(pool)))).tolist()
    return Finding(tokens == [0] * len(pool), f"V = 1 gives tokens {tokens}")


@question("robustness.empty_batch", "a batch of no rows", "a fault in any of 1")
def empty_batch(bench: Bench) -> Finding:
    tokens = bench.sample(torch.zeros(0, VOCAB), [], [], [])
    return Finding(len(tokens) == 0, "R = 0 gives no token")


@comparison(
    "robustness.padded_vocab", "columns beyond the vocabulary are never drawn", lambda effort: PADDED_ROWS, "rows"
)
def padded_vocab(bench: Bench) -> Iterator[Count]:
    bench.needs(bench.semantics.padded_vocab, "padded_vocab=False")
    rows, pool = PADDED_ROWS, bench.supported(POOL)
    params, seeds = [pool[n % len(pool)] for n in range(rows)], bench.new_seeds(rows)
    logits = torch.stack([clear_row(bench, Params()) for _ in range(8)]).repeat(rows // 8, 1)
    batch = Batch(logits, params, seeds, list(range(rows)))
    wanted = bench.sample(*batch)
    for poison in (1e4, torch.nan, torch.inf):
        wide = torch.cat([logits, torch.full((rows, 9), poison)], 1)
        tokens = bench.sample(*batch._replace(logits=wide), vocab_size=VOCAB)
        is_wrong = (tokens >= VOCAB) | ((tokens != wanted) & (bench.semantics.seeds == "row"))
        yield counted(f"columns of {poison} beyond V", is_wrong, first_row(batch, tokens, wanted, is_wrong))


@question("robustness.large_offsets", "more than 2**31 logits", "a fault in any of 8")
def large_offsets(bench: Bench) -> Finding:
    limit = bench.effort.offsets  # 2**31, or less where a test asks
    if limit == 0 or (limit >= 2**31 and bench.device.type != "cuda"):
        raise NotAsked("8.7 GB of logits: only with --full on CUDA")
    columns = 151_936 if limit >= 2**31 else VOCAB + 1
    rows = -(-limit // columns) // 8 * 8 + 64
    few = torch.randn(8, columns, generator=torch.Generator().manual_seed(bench.seed)).to(bench.device) * 4
    seeds, places = bench.new_seeds(rows), torch.zeros(rows, dtype=torch.int64)
    # A copy would take as much memory again.
    tokens = bench.sample(few.repeat(rows // 8, 1), [Params()] * rows, seeds, places, copies=False)
    check_range(tokens, columns, Params(), seeds, places)
    bench.needs_row_seeds()
    alone = bench.sample(few, [Params()] * 8, seeds[-8:], places[-8:])
    detail = f"the last rows draw {tokens[-8:].tolist()}, alone {alone.tolist()}"
    return Finding(bool((tokens[-8:] == alone).all()), detail)


def calls_of(bench: Bench) -> dict[str, tuple[Callable[..., object], dict[str, Any]]]:
    """The methods that the adapter has, by name, each with arguments for it by theirs."""
    pool, adapter = bench.supported(POOL), cast("Any", bench.adapter(VOCAB))
    logits = torch.stack([clear_row(bench, params) for params in pool]).to(bench.device)
    seeds, places, likeliest = bench.new_seeds(len(pool)), torch.arange(len(pool)), logits.argmax(-1)
    law = {"logits": logits, "params": pool}
    rows = law | {"seeds": seeds, "positions": places}
    arguments = dict.fromkeys(("sample", "status", "sample_with_status", "capture"), rows)
    arguments |= {"probs": law, "logprobs": law | {"token_ids": likeliest}}
    calls = {name: (getattr(adapter, name, None), given) for name, given in arguments.items()}
    if capture := calls["capture"][0]:
        calls["capture"] = (lambda *given: capture(*given)(*given)), rows  # and a replay
    drafted = Drafted(logits.repeat_interleave(2, 0), pool, seeds, places, likeliest[:, None], [1] * len(pool), None)
    if hasattr(adapter, "verify_trees"):
        tree = {"parents": torch.full((len(pool), 1), -1), **drafted._asdict()}
        calls["verify_trees"] = (lambda parents, *fields: adapter.verify_trees(Drafted(*fields), parents)), tree
    for rule in bench.semantics.rules if hasattr(adapter, "verify") else ():
        has_laws = rule != "match" and "probabilities" in bench.semantics.draft_kinds
        proposed = drafted._replace(probs=torch.softmax(logits, -1) if has_laws else None)
        verify = functools.partial(lambda rule, *fields: adapter.verify(Drafted(*fields), rule), rule)
        calls[f"verify by {rule}"] = verify, proposed._asdict()
        calls[f"draft for {rule}"] = getattr(adapter, "draft", None), rows | {"offset": 0, "rule": rule}
    return {name: (call, given) for name, (call, given) in calls.items() if call is not None}


@question("robustness.inputs", "a call leaves its arguments as they were", IN_POOL)
def inputs(bench: Bench) -> Finding:
    changed = []
    for name, (call, arguments) in calls_of(bench).items():
        copies = copy.deepcopy(arguments)
        call(*copies.values())
        for argument, before in arguments.items():
            after = copies[argument]
            is_equal = torch.equal(before, after) if isinstance(before, Tensor) else before == after
            if not is_equal and not (argument == "logits" and bench.semantics.consumes_logits):
                changed.append(f"{argument} of {name}")
    return Finding(not changed, f"calls change {', '.join(changed) or 'nothing'}")


@question("robustness.status", "bad rows are reported", "a fault in any of 4")
def status(bench: Bench) -> Finding:
    method = bench.method("status", VOCAB)
    rows = torch.zeros(4, VOCAB)
    rows[1, 3], rows[2, 5], rows[3] = torch.nan, torch.inf, -torch.inf
    reported = method(rows.to(bench.device), [Params()] * 4, [1, 2, 3, 4], torch.zeros(4, dtype=torch.int64))
    is_right = [set(names) for names in reported] == [set(), {"nan"}, {"infinity"}, {"all_masked"}]
    return Finding(is_right, f"status of a plain, NaN, +inf and masked row: {reported}")
