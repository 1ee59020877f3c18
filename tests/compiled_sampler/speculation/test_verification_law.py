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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_sampler.batch import SampleInputs, VerifyInputs
from compiled_sampler.core import score
from compiled_sampler.core.arithmetic import log2_float32
from compiled_sampler.core.order import MASKED_KEY, score_order
from compiled_sampler.core.stage import Run, call
from compiled_sampler.modes import Mode, probabilities_mode, verifying
from compiled_sampler.params import SamplingParams
from compiled_sampler.passes.law import Law
from compiled_sampler.pipeline import verify as pipeline
from compiled_sampler.pipeline.law import probability_step
from compiled_sampler.speculation import acceptance as verification
from compiled_sampler.speculation import residual, trees
from compiled_sampler.speculation.acceptance import Judged
from tests.builders.inputs import full_mode, repeated
from tests.builders.verifications import verify_inputs
from tests.oracles import oracle
from tests.oracles import oracle_verification as exact
from tests.tiers import tiers

BOUND, DETECTED = 1e-5, 1e-4
SHAPES = [(2, 1), (3, 2), (4, 2), (2, 3)]
EXACT = {"rejection": exact.rejection_law, "block": exact.block_law}
RESIDUAL_WEIGHT, JUDGE_DRAFTS = residual.residual_weight, verification.judge_drafts
WORDS = 2**32
"""Numbers that a draft may meet."""
SMALLEST, LARGEST = 2.0**-33, 1.0 - 2.0**-33
Race = tuple[torch.Tensor, torch.Tensor]
"""Ids and keys of the last tokens, ``[N, n]``."""


@contextmanager
def without_noise(races: list[Race]) -> Iterator[pytest.MonkeyPatch]:
    """Within, scores have no noise, and the races for the last tokens are kept; the patch may change more."""
    final_race = residual.final_race

    def watch(x: torch.Tensor, values: Any, ids: torch.Tensor, *others: Any, **static: Any) -> Any:
        keys, is_left = final_race(x, values, ids, *others, **static)
        counts = is_left | ~is_left.flatten(1).any(-1).view(-1, *[1] * (x.dim() - 1))
        races.append((ids.expand(x.shape).flatten(1), torch.where(counts, keys, MASKED_KEY).flatten(1)))
        return keys, is_left

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score, "gumbel", lambda keys, ids: torch.zeros((keys.first + ids).shape))
        patch.setattr(residual, "final_race", watch)
        yield patch


def weights(race: Race, vocab_size: int) -> torch.Tensor:
    """How often each token would win with noise, up to a factor for each row: a score of s draws as ``2**s`` does."""
    ids, keys = race
    found = torch.where(keys > MASKED_KEY, score_order(keys).view(torch.float32).double().exp2(), 0.0)
    places = ids.long().clamp(max=vocab_size)
    return found.new_zeros(len(ids), vocab_size + 1).scatter_add(1, places, found)[:, :vocab_size]


def accepted_words(accepts: Callable[[torch.Tensor], torch.Tensor], count: int) -> torch.Tensor:
    """How many of the numbers each of the comparisons accepts, the smallest ones: int64 ``[count]``."""
    low, high = torch.zeros(count, dtype=torch.int64), torch.full((count,), WORDS)
    for _ in range(33):
        middle = (low + high) // 2
        accepted = accepts((2 * middle + 1).double() * SMALLEST) & (low < high)
        low, high = torch.where(accepted, middle + 1, low), torch.where(accepted, high, torch.maximum(low, middle))
    return low


PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 2},
    {"top_p": 0.7},
    {"temperature": 1.3, "min_p": 0.2},
    {"top_k": 3, "top_p": 0.9, "min_p": 0.05},
]
KINDS = {
    "one_hot": "one_hot",
    **dict.fromkeys(("normalised", "unnormalised", "equal", "one_ulp"), "probabilities"),
    **dict.fromkeys(("float32", "bfloat16", "same_logits"), "logits"),
    **dict.fromkeys(("processed", "processed bfloat16", "processed same"), "processed"),
}


class Case(NamedTuple):
    """A target and a drafter: rows ``[V]`` by prefix, as the sampler gets them, and their exact laws."""

    params: dict[str, Any]
    targets: dict[exact.Tokens, torch.Tensor]
    proposals: dict[exact.Tokens, torch.Tensor]
    ps: exact.Rows
    qs: exact.Rows


Laws = list[tuple[Case, exact.Rows, exact.Law]]
"""Cases, each with the law of a drafter and that of the emitted tokens."""


def logits_row(index: int, vocab_size: int) -> torch.Tensor:
    """A normal, a peaked, a flat or a partly masked row."""
    row = 1.5 * torch.randn(vocab_size)
    row[index % vocab_size] += (0.0, 6.0, 0.0, -torch.inf)[index % 4]
    return torch.zeros(vocab_size) if index % 4 == 2 else row


def proposal_row(name: str, target: torch.Tensor, params: dict[str, Any], index: int) -> torch.Tensor:
    """A row that drafts are drawn from, of the named kind."""
    match name:
        case "equal" | "one_ulp":
            step = repeated(target[None], SamplingParams(seed=0, **params), 1)
            row = probability_step(full_mode(len(target)), step).probabilities[0]
            up = torch.nextafter(row, torch.tensor(2.0))
            return torch.where((row > 0.0) & (torch.rand(len(row)) < 0.5), up, row) if name == "one_ulp" else row
        case "same_logits" | "processed same":
            return target
        case "normalised" | "unnormalised" | "one_hot":
            row = torch.softmax(logits_row(index, len(target)), -1)
            return row.bfloat16().float() if name == "unnormalised" else row
    return logits_row(index, len(target)).to(target.dtype)


def law_of(row: torch.Tensor, params: dict[str, Any], kind: str = "logits") -> list[Fraction]:
    """The exact law of a row of logits under a request's parameters, or of a row of probabilities."""
    x = row.tolist()
    if kind in ("one_hot", "probabilities"):
        return oracle.exact_law(x, range(len(x)))
    if kind == "processed":
        params = {}
    return oracle.exact_law(oracle.masses(x, params.get("temperature", 1.0)), oracle.reference_keep(x, **params))


def case(name: str, vocab_size: int, width: int, params: dict[str, Any], start: int) -> Case:
    """A target and a drafter with rows of every shape."""
    dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
    xs = exact.prefixes(vocab_size, width)
    targets = {x: logits_row(start + i, vocab_size).to(dtype) for i, x in enumerate(xs)}
    proposals = {x: proposal_row(name, targets[x], params, start + 3 * i) for i, x in enumerate(xs)}
    qs = {x: law_of(row, params, KINDS[name]) for x, row in proposals.items()}
    return Case(params, targets, proposals, {x: law_of(row, params) for x, row in targets.items()}, qs)


@functools.cache
def cases(name: str, vocab_size: int, width: int) -> list[Case]:
    """One case for each of the parameters, always the same ones."""
    torch.manual_seed(vocab_size * 10 + width)
    return [case(name, vocab_size, width, params, i) for i, params in enumerate(PARAMS)]


def inputs_of(name: str, chosen: list[Case]) -> VerifyInputs:
    """One request for every case and every sequence of drafts."""
    vocab_size, width = len(chosen[0].targets[()]), max(map(len, chosen[0].targets))
    drafts = list(itertools.product(range(vocab_size), repeat=width))
    rows = [torch.stack([c.targets[x[:j]] for j in range(width + 1)]) for c in chosen for x in drafts]
    proposals = [torch.stack([c.proposals[x[:j]] for j in range(width)]) for c in chosen for x in drafts]
    return verify_inputs(
        torch.stack(rows),
        drafts * len(chosen),
        None if KINDS[name] == "one_hot" else torch.stack(proposals),
        params=[SamplingParams(seed=i, **c.params) for i, c in enumerate(chosen)],
        slots=torch.arange(len(chosen)).repeat_interleave(len(drafts)),
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
    return laws_of(mode, name, chosen, inputs_of(name, chosen))


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
    inputs = inputs_of(name, chosen)
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
    inputs, modes = inputs_of("normalised", [one]), [verifying(full_mode(2), r, "probabilities") for r in EXACT]
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
    mode, inputs = verifying(full_mode(4), rule, "logits"), inputs_of("float32", [one])
    assert exact.loss(laws_of(mode, "float32", [warmer], inputs)[0][2], one.ps, 3) > DETECTED


@pytest.mark.parametrize("rule", EXACT)
def test_processed_logits_that_are_filtered_again_are_detected(rule):
    chosen = cases("processed", 4, 2)[1:2]  # of temperature 0.7 and top_k 2
    inputs = inputs_of("processed", chosen)
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


# Trees under the rule ``rejection`` are lossless too: every order of siblings is weighed by the drafter's law, and how
# many numbers accept each of them is found as above. Levels of a tree share no number and no draft, so that one level
# says it; a second one is there to be walked to.


TREE_LAWS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "probabilities"),
    "logits": ({"temperature": 0.7}, "logits"),
    "filtered": ({"top_k": 3, "min_p": 0.02}, "logits"),
    "processed": ({"top_p": 0.8}, "processed"),
}


def verified_tree(inputs: VerifyInputs, drafts: str, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each sibling is accepted, bool ``[N, K]``, and the law of the last token ``[N, V]``, without noise."""
    races = list[Race]()
    with without_noise(races) as patch:
        patch.setattr(trees, "accept_number", lambda *_: numbers)
        out = pipeline.verify_step(verifying(full_mode(inputs.logits.shape[1]), "rejection", drafts), inputs)
    assert out.node_ids is not None
    place, last = torch.arange(numbers.shape[1]), weights(races[0], inputs.logits.shape[1])
    return out.node_ids[:, :1] == place, last / last.sum(-1, keepdim=True)


def law_of_a_token(name: str, size: int, width: int, claimed: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The law of the first token that is emitted and the target's, float64 ``[V]``, for random logits of both."""
    source = torch.Generator().manual_seed(size * 10 + width)
    params, drafts = TREE_LAWS[name]
    target, draft = (2.0 * torch.randn(size, generator=source) for _ in range(2))
    orders = list(itertools.permutations(range(size), width))
    count, nodes = len(orders), width + 1
    proposal = draft.softmax(-1) if drafts == "probabilities" else draft
    inputs = verify_inputs(
        target.repeat(count, nodes + 1, 1),
        [[*order, order[0]] for order in orders],
        proposal.repeat(count, nodes, 1),
        params=[SamplingParams(seed=1, **params)],
    )._replace(parents=torch.tensor([[-1] * width + [0]]).expand(count, nodes))
    of_draft = {} if drafts in ("probabilities", "processed") else params
    laws = law_of(target, params), law_of(draft * claimed, of_draft)
    p, q = (torch.tensor([float(each) for each in law], dtype=torch.float64) for law in laws)
    numbers = torch.full((count, nodes), LARGEST, dtype=torch.float64)
    _, last = verified_tree(inputs, drafts, numbers)
    weight = torch.tensor([weight_of(q, order) for order in orders], dtype=torch.float64)
    emitted = torch.zeros(size, dtype=torch.float64)
    for place in range(width):

        def accepts(number: torch.Tensor, place: int = place) -> torch.Tensor:
            numbers[:, place] = number
            return verified_tree(inputs, drafts, numbers)[0][:, place]

        words = accepted_words(accepts, count)
        numbers[:, place] = torch.where(words == WORDS, numbers.new_tensor(SMALLEST), LARGEST)
        share = words.double() / WORDS
        emitted.index_add_(0, inputs.draft_token_ids[:, place], weight * share)
        weight = weight * (1 - share)
    return emitted + weight @ last, p


def weight_of(q: torch.Tensor, order: tuple[int, ...]) -> float:
    """The probability of drawing tokens in this order without replacement; the last stand for any where q has fewer."""
    weight, rest, size = 1.0, 1.0, len(q)
    for number, token in enumerate(order):
        if rest < 1e-12:
            return weight / len(list(itertools.permutations(range(size - number), len(order) - number)))
        weight, rest = weight * float(q[token]) / rest, rest - float(q[token])
    return weight


@pytest.mark.parametrize(("size", "width"), tiers([(4, 3)], [(3, 2), (4, 2), (5, 3), (4, 4), (5, 5)]))
@pytest.mark.parametrize("name", TREE_LAWS)
def test_a_token_has_the_law_of_the_target(name, size, width):
    emitted, p = law_of_a_token(name, size, width)
    assert 0.5 * float((emitted - p).abs().sum()) <= BOUND


def test_siblings_of_another_law_are_detected():
    emitted, p = law_of_a_token("logits", 4, 3, claimed=0.7)
    assert 0.5 * float((emitted - p).abs().sum()) > 10 * DETECTED


@pytest.mark.parametrize("name", ["spent", "debt"])
def test_a_walk_that_forgets_what_rejected_siblings_took_is_detected(monkeypatch, name):
    walk_on = trees.walk_on

    def forgetful(walk: trees.Walk, *others: Any) -> trees.Walk:
        after = walk_on(walk, *others)
        return after._replace(**{name: torch.full_like(getattr(after, name), name == "debt")})

    monkeypatch.setattr(pipeline, "walk_on", forgetful)
    emitted, p = law_of_a_token("plain", 4, 3)
    assert 0.5 * float((emitted - p).abs().sum()) > 10 * DETECTED


# The arithmetic of the last token: logarithms of weights, and what the target has left of the draft's law.


MAX_ERROR = 2e-7 + 2.0**-24
"""Of the polynomial, and of the two roundings to float32 of its last steps, ``2**-25`` each."""


def law_by(weights: list[int]) -> Law:
    total = sum(weights)
    inverse = torch.tensor([1.0 / total if total else 0.0], dtype=torch.float64)
    return Law(None, torch.tensor([total]), inverse, torch.tensor([0], dtype=torch.int32))


def test_the_logarithm_is_exact_at_powers_of_two():
    exponents = torch.arange(-126, 128)
    assert log2_float32(torch.ldexp(torch.ones(len(exponents)), exponents)).tolist() == exponents.tolist()


def test_the_logarithm_is_within_its_error_on_one_octave():
    x = 1.0 + torch.arange(2**23) / 2**23
    assert (log2_float32(x).double() - torch.log2(x.double())).abs().max() <= MAX_ERROR


@pytest.mark.parametrize("exponent", [-120, -60, -50, -20, -3, -1, 1, 7])
def test_the_logarithm_is_within_its_error_and_one_rounding_elsewhere(exponent):
    x = torch.ldexp(1.0 + torch.rand(2**14), torch.tensor(exponent))
    true = torch.log2(x.double())
    rounding = 2.0**-24 * 2.0 ** torch.ceil(torch.log2(true.abs().clamp(min=1.0)))
    assert ((log2_float32(x).double() - true).abs() - rounding).max() <= MAX_ERROR


WEIGHTS = st.lists(st.integers(0, 2**40), min_size=4, max_size=4).filter(any)


@given(WEIGHTS, WEIGHTS, st.floats(2.0**-30, 1.0))
def test_what_is_left_is_the_difference_of_the_laws(target, draft, carry):
    w, m = torch.tensor([target]), torch.tensor([draft])
    share = torch.tensor([carry], dtype=torch.float64)
    for dtype, bits in ((torch.float64, 50), (torch.float32, 21)):  # an int64 is rounded to float32 here, a weight not
        left = residual.residual_weight(w, law_by(target), share, m, law_by(draft), dtype)
        for i in range(4):
            wanted = Fraction(carry) * Fraction(target[i], sum(target)) - Fraction(draft[i], sum(draft))
            assert abs(Fraction(float(left[0, i])) - wanted) <= 2.0**-bits


@given(WEIGHTS)
def test_nothing_is_left_where_the_laws_are_the_same(weights):
    w = torch.tensor([weights])
    assert not residual.residual_weight(w, law_by(weights), None, w, law_by(weights)).any()
