"""Draws through ``verify_step`` follow the exact law, in one step and over steps that build on one another.

Drafts that race on the target's noise are accepted as often as the coupling allows. A rate over R rows is off by 5
standard deviations, at most ``2.5 / sqrt(R)``, with a chance of 6e-7; thirteen such bounds are tested: 8e-6.

Every ``accept`` raises a false alarm with probability 1e-6 (goodness_of_fit.py); there are 17 with fixed seeds, so the
file would have failed by chance, once and for all, with probability 1.7e-5. The controls draw drafts at another
temperature, or key the noise of drafts by position alone, as if all their offsets were 0: ``block`` decides by drafts
beyond those that it accepts, so that noise must not come back when their positions are drafted again.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.batch import SampleInputs, VerifyOutputs
from compiled_sampler.modes import Mode, verifying
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.pipeline.verify import verify_step
from tests.builders.inputs import full_mode, slot_table
from tests.builders.verifications import verify_inputs
from tests.oracles import oracle_verification as exact
from tests.oracles.goodness_of_fit import accept, chi_square, detects
from tools.measuring import logits_like

V, WIDTH, COUNT = 3, 3, 500
TARGET = torch.tensor([[1.0, 2.0, 4.0], [4.0, 2.0, 1.0], [1.0, 3.0, 3.0]]).log()
PROPOSAL = torch.tensor([[2.0, 2.0, 2.0], [1.0, 2.0, 3.0], [4.0, 1.0, 2.0]]).log()
"""Logits of the next token after each token; a stream begins after token 0."""

PLAIN = SamplingParams(seed=11)

EXACT = {"rejection": exact.rejection_law, "block": exact.block_law}
ONE_HOT = EXACT | {"match": exact.rejection_law}
"""For one-hot drafts ``match`` accepts as ``rejection`` does."""
KINDS = ("one_hot", "probabilities", "logits")
DRAFTED = [("match", "one_hot"), *((rule, kind) for rule in EXACT for kind in KINDS)]


def rows_after(logits: Tensor, kind: str = "logits") -> dict[exact.Tokens, list[Fraction]]:
    law = torch.softmax(logits.double(), -1)
    if kind == "one_hot":
        law = torch.nn.functional.one_hot(logits.argmax(-1), V).double()
    rows = [[Fraction(p) for p in row] for row in law.tolist()]
    return {x: rows[x[-1] if x else 0] for x in exact.prefixes(V, 2 * WIDTH)}


def drafted(kind: str, drawn_from: Tensor, sampled: SampleInputs) -> Tensor:
    if kind == "one_hot":
        return drawn_from.argmax(-1)
    if kind == "probabilities":
        return torch.multinomial(torch.softmax(drawn_from, -1), 1)[:, 0]
    return sample_step(full_mode(V), sampled._replace(logits=drawn_from)).token_ids


def speculate(
    mode: Mode,
    before: Tensor,
    positions: Tensor,
    *,
    target: Tensor,
    proposal: Tensor = PROPOSAL,
    params: SamplingParams = PLAIN,
    warmth: float = 1.0,
    keyed: bool = True,
) -> VerifyOutputs:
    """Draft ``WIDTH`` tokens after ``before`` and verify them; right for a warmth of 1 and noise keyed by offset."""
    slots, table = torch.zeros_like(before), slot_table([params], V)
    tokens, proposals = [before], []
    for offset in range(WIDTH):
        proposals.append(proposal[tokens[-1]])
        offsets = torch.full_like(slots, offset * keyed)
        sampled = SampleInputs(proposals[-1], slots, positions + offset, table, offsets)
        tokens.append(drafted(mode.drafts, proposals[-1] * warmth, sampled))
    q = torch.stack(proposals, 1)
    given = {"one_hot": None, "probabilities": torch.softmax(q, -1), "logits": q}[mode.drafts]
    logits, drafts = torch.stack([target[token] for token in tokens], 1), torch.stack(tokens[1:], 1)
    return verify_step(mode, verify_inputs(logits, drafts, given, params=[params], positions=positions))


def one_step(mode: Mode, target: Tensor, count: int = 10_000, **other: Any) -> Tensor:
    torch.manual_seed(1)
    before = torch.zeros(COUNT, dtype=torch.int64)
    starts = (64 * torch.arange(start, start + COUNT) for start in range(0, count, COUNT))
    steps = [speculate(mode, before, start, target=target, **other) for start in starts]
    return torch.cat([step.token_ids for step in steps])


def counted(tokens: Tensor, law: exact.Law) -> tuple[list[int], list[float]]:
    """How often every sequence of a law was emitted, and its probability."""
    seen, counts = np.unique(tokens.numpy(), axis=0, return_counts=True)
    found = {tuple(t for t in row if t >= 0): int(n) for row, n in zip(seen.tolist(), counts, strict=True)}
    assert set(found) <= set(law)
    return [found.get(x, 0) for x in law], [float(p) for p in law.values()]


@pytest.mark.parametrize(("rule", "kind"), DRAFTED)
def test_the_tokens_of_one_step_follow_the_exact_law(rule, kind):
    tokens = one_step(verifying(full_mode(V), rule, kind), TARGET)
    accept(chi_square(*counted(tokens, ONE_HOT[rule](rows_after(TARGET), rows_after(PROPOSAL, kind), WIDTH))))


@pytest.mark.parametrize("kind", ["probabilities", "logits"])
@pytest.mark.parametrize("rule", EXACT)
def test_drafts_of_another_temperature_are_detected(rule, kind):
    tokens = one_step(verifying(full_mode(V), rule, kind), TARGET, warmth=0.6)
    detects(chi_square(*counted(tokens, EXACT[rule](rows_after(TARGET), rows_after(PROPOSAL), WIDTH))))


Committed = Callable[[VerifyOutputs], Tensor]
"""How many of the emitted tokens are committed, int64 ``[N]``; the next step begins after them."""


def all_emitted(step: VerifyOutputs) -> Tensor:
    return step.num_emitted


def decode(rule: str, target: Tensor, length: int, start: int, keyed: bool, committed: Committed) -> Tensor:
    """The first tokens ``[COUNT, length]`` of streams decoded step by step, each step where the last one ended."""
    tokens, done = torch.zeros(COUNT, length + WIDTH + 2, dtype=torch.int64), torch.zeros(COUNT, dtype=torch.int64)
    base, steps = 64 * torch.arange(start, start + COUNT), torch.arange(WIDTH + 1)
    while int(done.min()) < length:
        before = tokens.gather(1, done[:, None])[:, 0]
        step = speculate(verifying(full_mode(V), rule, "logits"), before, base + done, target=target, keyed=keyed)
        taken = committed(step)
        columns = torch.where(steps < taken[:, None], done[:, None] + 1 + steps, tokens.shape[1] - 1)
        columns = torch.where(done[:, None] < length, columns, tokens.shape[1] - 1)
        tokens.scatter_(1, columns, step.token_ids)
        done = torch.where(done < length, done + taken, done)
    return tokens[:, 1 : length + 1]


def decoded(
    rule: str, target: Tensor, keyed: bool = True, committed: Committed = all_emitted
) -> tuple[list[int], list[float]]:
    """Counts and probabilities of the first three tokens of 10,000 streams."""
    parts = [decode(rule, target, 3, start, keyed, committed) for start in range(0, 10_000, COUNT)]
    return counted(torch.cat(parts), exact.product_law(rows_after(target), 3))


STEADY = TARGET[:1].expand(V, -1)
"""A target that forgets, against which noise that comes back shows best."""


@pytest.mark.parametrize("target", [TARGET, STEADY], ids=["chain", "steady"])
@pytest.mark.parametrize("rule", EXACT)
def test_tokens_decoded_over_several_steps_follow_the_target(rule, target):
    accept(chi_square(*decoded(rule, target)))


def test_noise_of_drafts_that_comes_back_at_its_position_is_detected():
    detects(chi_square(*decoded("block", STEADY, keyed=False)))


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("rule", EXACT)
def test_a_limit_that_was_fixed_before_the_step_may_cut_what_is_committed(rule, limit):
    accept(chi_square(*decoded(rule, STEADY, committed=lambda step: step.num_emitted.clamp(max=limit))))


@pytest.mark.parametrize("rule", EXACT)
def test_a_cut_that_looks_at_what_it_throws_away_is_detected(rule):
    """Here the last token is committed only where nothing else is."""
    detects(chi_square(*decoded(rule, STEADY, committed=lambda step: step.num_accepted.clamp(min=1))))


LONG, R = 1000, 4000
SLACK = 2.5 / R**0.5


@pytest.fixture(scope="module")
def peaked() -> torch.Tensor:
    """Rows like those of a language model, ``[R, LONG]``."""
    return logits_like("peaked", R, LONG, "cpu", torch.float32, seed=0)


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    made = Sampler(LONG, 1, backend="eager")
    made.add_request(SamplingParams(seed=5))
    return made


def accepted(sampler: Sampler, target: torch.Tensor, drafted: torch.Tensor) -> float:
    """The share of rows whose draft ``match`` accepts; every row is a request with one draft and a bonus row."""
    plan = sampler.plan([0] * R, num_drafts=[1] * R)
    logits = target.repeat_interleave(2, 0)
    out = sampler.verify(plan, logits, drafted[:, None], torch.arange(R))
    own = sampler.sample(sampler.plan([0] * R), target, torch.arange(R)).token_ids
    assert torch.equal(out.token_ids[:, 0], own)
    return float(out.num_accepted.float().mean())


@pytest.mark.parametrize(("sigma", "stated"), [(0.3, 0.88), (0.7, 0.72), (1.2, 0.55), (2.0, 0.37)])
def test_coupled_drafts_are_accepted_nearly_as_often_as_can_be(sampler, peaked, sigma, stated):
    other = peaked + sigma * torch.randn(R, LONG, generator=torch.Generator().manual_seed(1))
    overlap = torch.minimum(torch.softmax(peaked, -1), torch.softmax(other, -1)).sum(-1)
    least, most = (overlap / (2.0 - overlap)).mean(), overlap.mean()
    rate = accepted(sampler, peaked, sampler.draft(sampler.plan([0] * R), other, torch.arange(R)).token_ids)
    assert least - SLACK <= rate <= most + SLACK
    assert rate > stated - SLACK
    assert rate > accepted(sampler, peaked, other.argmax(-1)) + SLACK


def test_uncoupled_drafts_miss_the_bound(sampler, peaked):
    overlap = 1.0  # the drafter is the target itself
    drafts = sampler.draft(sampler.plan([0] * R), peaked, torch.arange(R), coupled=False).token_ids
    assert accepted(sampler, peaked, drafts) < overlap / (2.0 - overlap) - SLACK
