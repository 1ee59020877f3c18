"""Verification is lossless: the exact law of what it emits, summed over all drafts, numbers and races.

Nothing is drawn here, so nothing can fail by chance. For every sequence of drafts, weighted by the oracle's law of the
drafter, ``verify_step`` itself decides. How many of the 2**32 numbers accept a draft is found by bisecting the
production comparison; each pattern of accepted drafts is then run with numbers at either end. The last token's law is
read from the production keys with the noise set to 0: a race on scores s draws in proportion to ``2**s``.

The bound: for widths L <= 3 the result differs from the target's law by the 2L + 1 rows whose integer masses are off
by at most 1e-6 in total variation (mass.py; ``|t| < 20`` here), by 2e-6 for the float32 residual and scores of the last
token (residual.py; ``|score| < 32``), and by ``L * 2**-32`` for the numbers: below 9.1e-6 <= BOUND.
"""

import functools
import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch

from compiled_sampler.batch import SampleInputs, VerifyInputs
from compiled_sampler.core.stage import Run, call
from compiled_sampler.engine.requests.slots import unfiltered_table
from compiled_sampler.modes import Mode, probabilities_mode, verifying
from compiled_sampler.params import SamplingParams
from compiled_sampler.pipeline import verify as pipeline
from compiled_sampler.pipeline.law import probability_step
from compiled_sampler.speculation import acceptance as verification
from compiled_sampler.speculation import residual
from compiled_sampler.speculation.acceptance import Judged
from tests.builders.draft_cases import KINDS, Case, Laws, cases, law_of
from tests.builders.exact_races import LARGEST, SMALLEST, WORDS, Race, accepted_words, weights, without_noise
from tests.builders.inputs import full_mode, slot_table
from tests.oracles import oracle
from tests.oracles import oracle_verification as exact
from tests.tiers import tiers

BOUND, DETECTED = 1e-5, 1e-4
SHAPES = [(2, 1), (3, 2), (4, 2), (2, 3)]
EXACT = {"rejection": exact.rejection_law, "block": exact.block_law}
RESIDUAL_WEIGHT, JUDGE_DRAFTS = residual.residual_weight, verification.judge_drafts


def verify_inputs(name: str, chosen: list[Case]) -> VerifyInputs:
    """One request for every case and every sequence of drafts."""
    vocab_size, width = len(chosen[0].targets[()]), max(map(len, chosen[0].targets))
    drafts = list(itertools.product(range(vocab_size), repeat=width))
    rows = [c.targets[x[:j]] for c in chosen for x in drafts for j in range(width + 1)]
    proposals = [c.proposals[x[:j]] for c in chosen for x in drafts for j in range(width)]
    table = slot_table([SamplingParams(seed=i, **c.params) for i, c in enumerate(chosen)], vocab_size)
    return VerifyInputs(
        logits=torch.stack(rows),
        slots=torch.arange(len(chosen)).repeat_interleave(len(drafts)),
        positions=torch.arange(0, 10 * len(chosen) * len(drafts), 10),
        num_drafts=torch.full((len(chosen) * len(drafts),), width),
        draft_token_ids=torch.tensor(drafts * len(chosen)),
        proposals=None if KINDS[name] == "one_hot" else torch.stack(proposals),
        table=table,
        draft_table=unfiltered_table(table, vocab_size),
    )


def run_with(mode: Mode, inputs: VerifyInputs, numbers: torch.Tensor | float) -> tuple[Any, dict[str, Any], Any]:
    """Verify without noise and with given accepting numbers: outputs, the stages as called, ids and last keys."""
    stages, races = dict[str, Any](), list[Race]()

    def watch(stage: Any, /, *tensors: Any, **static: Any) -> Any:
        stages[stage.__name__] = functools.partial(stage, *tensors, **static)
        return call(stage, *tensors, **static)

    def number(_: Any, slots: torch.Tensor, *__: Any) -> torch.Tensor | float:  # under ``block``, for prefixes alone
        return 0.5 if isinstance(numbers, float) or len(numbers) != len(slots) else numbers

    with without_noise(races) as patch:
        patch.setattr(verification, "accept_number", number)
        outputs = pipeline.verify_step(mode, inputs, Run(watch))
    return outputs, stages, races[0]


def accepted_by(judge: Any, number: torch.Tensor) -> torch.Tensor:
    """What a stage that judges drafts or prefixes accepts by these numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "accept_number", lambda *_: number)
        verdict = judge()
    return verdict.accepted if isinstance(verdict, Judged) else verdict


def outcomes(mode: Mode, inputs: VerifyInputs) -> list[list[exact.Outcome]]:
    """For every request, what each pattern of accepting numbers leads to."""
    count, width = inputs.draft_token_ids.shape
    block = mode.rule == "block"  # there a row tests the draft before it
    stages = run_with(mode, inputs, 0.5)[1]
    judge, tests = ("judge_prefixes", width + 1) if block else ("judge_drafts", width)
    words = accepted_words(functools.partial(accepted_by, stages[judge]), count * tests).view(count, tests)[
        :, tests - width :
    ]
    result: Any = [[] for _ in range(count)]
    for pattern in itertools.product((True, False), repeat=width):
        numbers = [SMALLEST if accept else LARGEST for accept in pattern]
        given = torch.tensor([0.5, *numbers] if block else numbers, dtype=torch.float64).repeat(count)
        outputs, _, race = run_with(mode, inputs, given)
        for n, row in enumerate(weights(race, mode.vocab_size).tolist()):
            last = oracle.exact_law(row, range(mode.vocab_size))
            length = int(outputs.num_accepted[n])
            assert last[outputs.token_ids[n, length]] == max(last)
            shares = zip(words[n].tolist(), pattern, strict=True)
            probability = math.prod(Fraction(w if accept else WORDS - w, WORDS) for w, accept in shares)
            result[n].append(exact.Outcome(length, probability, last))
    return result


def laws_of(mode: Mode, name: str, chosen: list[Case], inputs: VerifyInputs) -> Laws:
    """The law of the emitted tokens for every case; for one-hot drafts also for every fixed sequence of drafts."""
    width, found = inputs.draft_token_ids.shape[1], outcomes(mode, inputs)
    sequences = list(itertools.product(range(mode.vocab_size), repeat=width))
    results = []
    for i, one in enumerate(chosen):
        part = found[i * len(sequences) : (i + 1) * len(sequences)]
        fixed = [exact.fixed_drafter(x, mode.vocab_size) for x in sequences if name == "one_hot"]
        results += [(one, qs, exact.emitted_law(part, qs, width)) for qs in fixed or [one.qs]]
    return results


def emitted_laws(name: str, vocab_size: int, width: int, rule: str) -> Laws:
    chosen, mode = cases(name, vocab_size, width), verifying(full_mode(vocab_size), rule, KINDS[name])
    return laws_of(mode, name, chosen, verify_inputs(name, chosen))


@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize(("vocab_size", "width"), tiers([(3, 2)], SHAPES))
@pytest.mark.parametrize("name", KINDS)
def test_emitted_tokens_follow_the_target_and_the_rule(name, vocab_size, width, rule):
    for one, qs, law in emitted_laws(name, vocab_size, width, rule):
        assert exact.loss(law, one.ps, width + 1) <= BOUND
        assert exact.impossible(law, one.ps) == 0
        assert exact.total_variation(law, EXACT[rule](one.ps, qs, width)) <= BOUND


@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize("name", ["one_hot", "normalised", "unnormalised"])
def test_probabilities_of_the_target_lead_to_the_law_of_its_logits(name, rule):
    chosen = cases(name, 4, 2)
    inputs = verify_inputs(name, chosen)
    slots = inputs.slots.repeat_interleave(3)
    sampled = SampleInputs(inputs.logits, slots, torch.zeros_like(slots), inputs.table)
    inputs = inputs._replace(logits=probability_step(full_mode(4), sampled).probabilities)
    found = laws_of(verifying(probabilities_mode(4), rule, KINDS[name]), name, chosen, inputs)
    for (one, _, law), (*_, from_logits) in zip(found, emitted_laws(name, 4, 2, rule), strict=True):
        assert exact.total_variation(from_logits, law) <= 1e-6  # probabilities are rounded by 2**-24
        assert exact.impossible(law, one.ps) == 0


@pytest.mark.parametrize("share", [0.1, 0.25, 1 / 3, 0.45])
def test_block_accepts_more_drafts_where_the_coins_of_target_and_drafter_are_opposite(share):
    target, proposal = torch.tensor([share, 1 - share]), torch.tensor([1 - share, share])
    xs = exact.prefixes(2, 2)
    rows = [dict.fromkeys(xs, row) for row in (target.log(), proposal)]
    one = Case({}, *rows, *(dict.fromkeys(xs, law_of(row.log(), {})) for row in (target, proposal)))
    inputs, modes = verify_inputs("normalised", [one]), [verifying(full_mode(2), r, "probabilities") for r in EXACT]
    lengths = [float(exact.expected_accepted(laws_of(mode, "normalised", [one], inputs)[0][2])) for mode in modes]
    both = 2 * share + (2 * share) ** 2  # 10/9 for a coin of 1/3, to which the paper compares 11/9
    assert lengths == pytest.approx([both, both + share * (1 - 2 * share)], abs=BOUND)


WRONG = {
    "the_target": lambda w, law, carry, m, *others: RESIDUAL_WEIGHT(w, law, carry, torch.zeros_like(m), *others),
    "without_carry": lambda w, law, carry, *others: RESIDUAL_WEIGHT(w, law, None, *others),
}


@pytest.mark.parametrize(
    ("rule", "name"), [("rejection", "the_target"), ("block", "the_target"), ("block", "without_carry")]
)
def test_a_wrong_residual_is_detected(monkeypatch, rule, name):
    monkeypatch.setattr(residual, "residual_weight", WRONG[name])
    one, _, law = emitted_laws("float32", 4, 2, rule)[0]
    assert exact.loss(law, one.ps, 3) > DETECTED


@pytest.mark.parametrize("rule", EXACT)
def test_drafts_of_another_temperature_are_detected(rule):
    one = cases("float32", 4, 2)[0]
    warmer = one._replace(qs={x: law_of(row, {"temperature": 1.1}) for x, row in one.proposals.items()})
    mode, inputs = verifying(full_mode(4), rule, "logits"), verify_inputs("float32", [one])
    assert exact.loss(laws_of(mode, "float32", [warmer], inputs)[0][2], one.ps, 3) > DETECTED


@pytest.mark.parametrize("rule", EXACT)
def test_processed_logits_that_are_filtered_again_are_detected(rule):
    chosen = cases("processed", 4, 2)[1:2]  # of temperature 0.7 and top_k 2
    inputs = verify_inputs("processed", chosen)
    found = [laws_of(verifying(full_mode(4), rule, kind), "", chosen, inputs)[0] for kind in ("processed", "logits")]
    losses = [exact.loss(law, one.ps, 3) for one, _, law in found]
    assert losses[0] <= BOUND
    assert losses[1] > DETECTED


def test_a_comparison_that_is_not_strict_at_zero_is_detected(monkeypatch):
    @functools.wraps(JUDGE_DRAFTS)
    def judge(*tensors: Any, **static: Any) -> verification.Judged:
        judged, trials = JUDGE_DRAFTS(*tensors, **static), tensors[3].trials
        at_zero = torch.as_tensor(verification.accept_number(tensors[4], *[trials.slots] * 3) == SMALLEST)
        return judged._replace(accepted=judged.accepted | (at_zero & (trials.drafts >= 0)))

    monkeypatch.setattr(pipeline, "judge_drafts", judge)
    assert any(exact.impossible(law, one.ps) > 0 for one, _, law in emitted_laws("normalised", 4, 2, "rejection"))
