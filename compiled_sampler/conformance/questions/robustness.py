"""What happens to rows that no model should give, and to shapes at the edge?"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sized
from typing import Any

import torch
from torch import Tensor

from compiled_sampler.conformance.adapter import Drafted, Params
from compiled_sampler.conformance.bench import AdapterError, Bench, NotAsked, check_range
from compiled_sampler.conformance.evidence import rare_power
from compiled_sampler.conformance.question import Finding, Question
from compiled_sampler.conformance.questions.law import follows_law
from compiled_sampler.conformance.rows import VOCAB, clear_row

POOL = (Params(), Params(temperature=0.0), Params(top_k=4), Params(top_p=0.8), Params(min_p=0.1))


def bad_row(bench: Bench, row: Tensor, choice: str, answered: str) -> Finding:
    """A row of bad logits under every kind of parameters, treated as declared."""
    pool = bench.supported(POOL)
    if choice == "raises":
        return _raises(bench, row, pool)
    if choice == answered:
        return follows_law(bench, [(row, params) for params in pool], bench.effort.draws // 16)
    for params in pool:
        bench.counts(row, params, 256)
    return Finding(True, "every token is an id of the vocabulary", f"one row in {1 / rare_power(256):.0f}")


def _raises(bench: Bench, row: Tensor, pool: list[Params]) -> Finding:
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
    return Finding(not silent, f"declared to raise; {silent[0] if silent else 'raised'}", every(pool))


def every(asked: Sized) -> str:
    """The power where each of a few calls or rows must be right, in words."""
    return f"a fault in any of {len(asked)}"


def nan(bench: Bench) -> Finding:
    """NaN logits among others."""
    row = clear_row(bench, Params())
    row[::4] = torch.nan
    return bad_row(bench, row, bench.semantics.nan, "masked")


def infinity(bench: Bench) -> Finding:
    """Two +inf logits among others."""
    row = clear_row(bench, Params())
    row[[6, 21]] = torch.inf
    choice = bench.semantics.infinity
    if choice != "drawn":
        return bad_row(bench, row, choice, "drawn")
    params = bench.supported([Params(), Params(temperature=0.0), Params(top_k=4)])
    return follows_law(bench, [(row, p) for p in params], bench.effort.draws // 16)


def all_masked(bench: Bench) -> Finding:
    """A row of -inf alone."""
    row = torch.full((VOCAB,), -torch.inf)
    choice = bench.semantics.all_masked
    if choice != "minus_one":
        return bad_row(bench, row, choice, "")
    pool = bench.supported(POOL)
    tokens = bench.sample(row.expand(len(pool), -1).contiguous(), pool, [1] * len(pool), [0] * len(pool)).tolist()
    return Finding(tokens == [-1] * len(pool), f"tokens {tokens}, declared is -1", every(pool))


def largest_floats(bench: Bench) -> Finding:
    """The largest finite logits that are declared: a leader that nobody can beat is drawn."""
    row = torch.linspace(-1.0, 1.0, VOCAB) * bench.semantics.largest_logit
    return follows_law(bench, [(row, params) for params in bench.supported(POOL)], 256)


def single_token(bench: Bench) -> Finding:
    """A vocabulary of one token."""
    pool = bench.supported(POOL)
    tokens = bench.sample(torch.zeros(len(pool), 1), pool, [3] * len(pool), list(range(len(pool)))).tolist()
    return Finding(tokens == [0] * len(pool), f"V = 1 gives tokens {tokens}", every(pool))


def empty_batch(bench: Bench) -> Finding:
    """No row at all."""
    tokens = bench.sample(torch.zeros(0, VOCAB), [], [], [])
    return Finding(len(tokens) == 0, "R = 0 gives no token", every([0]))


def padded_vocab(bench: Bench) -> Finding:
    """Columns beyond the vocabulary are never drawn, and change no token where seeds are those of rows."""
    bench.needs(bench.semantics.padded_vocab, "padded_vocab=False")
    rows, pool = 256, bench.supported(POOL)
    params, seeds, places = [pool[n % len(pool)] for n in range(rows)], bench.new_seeds(rows), torch.arange(rows)
    logits = torch.stack([clear_row(bench, Params()) for _ in range(8)]).repeat(rows // 8, 1)
    wanted = bench.sample(logits, params, seeds, places)
    for poison in (1e4, torch.nan, torch.inf):
        wide = torch.cat([logits, torch.full((rows, 9), poison)], 1)
        tokens = bench.sample(wide, params, seeds, places, vocab_size=VOCAB)
        different = (tokens >= VOCAB) | ((tokens != wanted) & (bench.semantics.seeds == "row"))
        if different.any():
            n = int(different.nonzero()[0, 0])
            where = f"row {n}: {params[n]}, seed {seeds[n]}, position {n}"
            return Finding(
                False, f"columns of {poison} beyond V: token {int(tokens[n])}, not {int(wanted[n])}; {where}", ""
            )
    return Finding(True, f"{3 * rows} rows", f"one row in {1 / rare_power(3 * rows):.0f}")


def large_offsets(bench: Bench) -> Finding:
    """Rows whose offsets pass 2**31, or what the effort names instead: the last rows draw what they draw alone."""
    limit = bench.effort.offsets
    if limit == 0 or (limit >= 2**31 and bench.device.type != "cuda"):
        raise NotAsked("8.7 GB of logits: only with --full on CUDA")
    columns = 151_936 if limit >= 2**31 else VOCAB + 1
    rows = -(-limit // columns) // 8 * 8 + 64
    few = torch.randn(8, columns, generator=torch.Generator().manual_seed(bench.seed)).to(bench.device) * 4
    logits = few.repeat(rows // 8, 1)
    seeds, places = bench.new_seeds(rows), torch.zeros(rows, dtype=torch.int64)
    tokens = bench.sample_over(logits, [Params()] * rows, seeds, places)  # a copy would take as much memory again
    check_range(tokens, columns, Params(), seeds, places)
    bench.needs_row_seeds()
    last = bench.sample(few, [Params()] * 8, seeds[-8:], places[-8:])
    return Finding(
        bool((tokens[-8:] == last).all()),
        f"the last rows draw {tokens[-8:].tolist()}, alone {last.tolist()}",
        every(last),
    )


def inputs(bench: Bench) -> Finding:
    """A call leaves its arguments as they were, but for logits that are declared to be consumed."""
    pool = bench.supported(POOL)
    logits = torch.stack([clear_row(bench, params) for params in pool]).to(bench.device)
    seeds, places = bench.new_seeds(len(pool)), torch.arange(len(pool))
    rows = {"logits": logits, "params": pool, "seeds": seeds, "positions": places}
    adapter: Any = bench.adapter(VOCAB)
    changed = _changed(bench, "sample", lambda *rows: adapter.sample(*rows), rows)
    if hasattr(adapter, "status"):
        changed += _changed(bench, "status", lambda *rows: adapter.status(*rows), rows)
    if hasattr(adapter, "probs"):
        changed += _changed(bench, "probs", lambda *rows: adapter.probs(*rows[:2]), rows)
    for rule in bench.semantics.rules if hasattr(adapter, "verify") else ():
        has_laws = rule != "match" and "probabilities" in bench.semantics.draft_kinds
        laws = torch.softmax(logits, -1) if has_laws else None
        drafts, counts = logits.argmax(-1)[:, None], [1] * len(pool)
        drafted = Drafted(logits.repeat_interleave(2, 0), pool, seeds, places, drafts, counts, laws)
        verify = functools.partial(lambda *fields, rule: adapter.verify(Drafted(*fields), rule), rule=rule)
        changed += _changed(bench, f"verify by {rule}", verify, drafted._asdict())
    return Finding(not changed, f"calls change {', '.join(changed) or 'nothing'}", every(pool))


def _changed(bench: Bench, name: str, call: Callable[..., object], arguments: dict[str, Any]) -> list[str]:
    """The arguments that a call changes, in words."""
    given = copy.deepcopy(arguments)
    call(*given.values())
    changed = []
    for argument, before in arguments.items():
        after = given[argument]
        is_equal = torch.equal(before, after) if isinstance(before, Tensor) else before == after
        if not is_equal and not (argument == "logits" and bench.semantics.consumes_logits):
            changed.append(f"{argument} of {name}")
    return changed


def status(bench: Bench) -> Finding:
    """The status says which rows were bad."""
    method = bench.method("status", VOCAB)
    rows = torch.zeros(4, VOCAB)
    rows[1, 3], rows[2, 5], rows[3] = torch.nan, torch.inf, -torch.inf
    reported = method(rows.to(bench.device), [Params()] * 4, [1, 2, 3, 4], torch.zeros(4, dtype=torch.int64))
    wanted = [set(), {"nan"}, {"infinity"}, {"all_masked"}]
    return Finding(
        [set(names) for names in reported] == wanted,
        f"status of a plain, NaN, +inf and masked row: {reported}",
        every(wanted),
    )


QUESTIONS = (
    Question("robustness.nan", "NaN logits are treated as declared", nan),
    Question("robustness.infinity", "+inf logits are treated as declared", infinity),
    Question("robustness.all_masked", "a row without a token is treated as declared", all_masked),
    Question("robustness.largest_floats", "the largest finite logits are drawn by their law", largest_floats),
    Question("robustness.single_token", "a vocabulary of one token", single_token),
    Question("robustness.empty_batch", "a batch of no rows", empty_batch),
    Question("robustness.padded_vocab", "columns beyond the vocabulary are never drawn", padded_vocab),
    Question("robustness.large_offsets", "more than 2**31 logits", large_offsets),
    Question("robustness.inputs", "a call leaves its arguments as they were", inputs),
    Question("robustness.status", "bad rows are reported", status),
)
