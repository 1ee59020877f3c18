"""Every mistake about drafts is named with its value and the way out, and leaves the sampler as it was."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled_sampler import Plan, Sampler, VerifyOutputs
from compiled_sampler.batch import tensors_of
from tests.builders.sampler import REQUESTS, new_outputs, new_verified, same, sampler_with

V, WIDTHS = 40, (2, 0, 3)
N, D, R, K = 3, 5, 8, 3


def values(seed: int, *shape: int) -> Tensor:
    return 3.0 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LAWS = torch.softmax(values(2, D, V), -1)
INPUTS = {
    "logits": values(0, R, V),
    "draft_token_ids": torch.tensor([[3, 5, -1], [-1, -1, -1], [7, 0, 39]]),
    "positions": torch.tensor([0, 9, 2**40]),
}
ROWS = {"logits": values(1, N, V), "positions": INPUTS["positions"]}


@pytest.fixture(scope="module")
def engine() -> SimpleNamespace:
    """A sampler with a plan of three requests, with and without drafts, and handles of their drafts."""
    sampler, slots = sampler_with([REQUESTS[name] for name in ("full", "min_p", "top_k_top_p[64]")], V, 4), [0, 1, 2]
    plan, plain = sampler.plan(slots, num_drafts=WIDTHS), sampler.plan(slots)
    handles = [sampler.draft(plan, values(j, N, V), INPUTS["positions"] + j, False, j) for j in range(K)]
    coupled = [sampler.draft(plan, values(j, N, V), INPUTS["positions"] + j, True, j) for j in range(K)]
    return SimpleNamespace(sampler=sampler, slots=slots, plan=plan, plain=plain, handles=handles, coupled=coupled)


def everything(engine: SimpleNamespace) -> list[Tensor]:
    sampler, plan, plain = engine.sampler, engine.plan, engine.plain
    inputs = tuple(INPUTS.values())
    results = (
        sampler.verify(plan, *inputs, "rejection", draft_probs=LAWS),
        sampler.verify(plan, inputs[0], engine.handles, inputs[2], "block"),
        sampler.verify_from_probs(plan, *inputs),
        sampler.draft(plan, *ROWS.values(), coupled=False).drawn,
        sampler.sample(plain, **ROWS),
    )
    laws = sampler.probs(plain, ROWS["logits"]), sampler.probs(plan, inputs[0])
    return [*(each for result in results for each in tensors_of(result)), *laws]


@pytest.fixture
def refused(engine: SimpleNamespace) -> Iterator[Callable[..., str]]:
    """Calls something with something wrong; returns the message. Afterwards everything gives what it gave before."""
    before = everything(engine)

    def call(error: type[Exception], function: Callable[..., Any], *given: Any, **named: Any) -> str:
        with pytest.raises(error) as caught:
            function(*given, **named)
        return str(caught.value)

    yield call
    assert all(torch.equal(a, b) for a, b in zip(before, everything(engine), strict=True))


def verify(engine: SimpleNamespace, plan: Plan | None = None, **changed: Any) -> VerifyOutputs:
    return engine.sampler.verify(plan or engine.plan, **INPUTS | changed)


@pytest.mark.parametrize(
    ("num_drafts", "error", "words"),
    [
        ((1, 2, 3, 4), ValueError, "num_drafts must have one count a slot, 3, got 4; 0 for no drafts"),
        ((1, 2, True), TypeError, "num_drafts of request 2 must be an int, got True; pass Python ints"),
        (torch.tensor([1, 2, 3]), TypeError, "num_drafts must be a sequence of ints, got tensor([1, 2, 3])"),
        ((1, -1, 3), ValueError, "num_drafts of request 1 must be in [0, 64], got -1; draft fewer"),
    ],
)
def test_wrong_numbers_of_drafts_are_refused(engine, refused, num_drafts, error, words):
    assert words in refused(error, engine.sampler.plan, engine.slots, num_drafts=num_drafts)


def test_plans_with_and_without_drafts_are_not_confused(engine, refused):
    sampler = engine.sampler
    words = "plan must say how many drafts each request has, got none; plan(slots, num_drafts=[...])"
    assert words in refused(ValueError, verify, engine, plan=engine.plain)
    probabilities = (values(0, R, V), INPUTS["draft_token_ids"], INPUTS["positions"])
    assert words in refused(ValueError, sampler.verify_from_probs, engine.plain, *probabilities)
    words = "plan must be without drafts, got num_drafts=(2, 0, 3); verify() takes this one"
    assert words in refused(ValueError, sampler.sample, engine.plan, **ROWS)


RULE = "rule must be one of ('match', 'rejection', 'block'), got "
LAW, OUT = {"rule": "rejection"}, new_verified(N, K)
WRONG = [
    ({"rule": "probabilistic"}, ValueError, RULE + "'probabilistic'; it is called 'rejection' here"),
    ({"draft_probs": LAWS, "draft_logits": LAWS, **LAW}, ValueError, "draft_probs and draft_logits must not both be"),
    ({"draft_probs": LAWS}, ValueError, "rule 'match' never looks at draft_probs or draft_logits"),
    ({"draft_probs": LAWS.tolist(), **LAW}, TypeError, "draft_probs must be a torch.Tensor, got list"),
    ({"draft_probs": LAWS.double(), **LAW}, TypeError, "draft_probs must be torch.float32, got torch.float64"),
    ({"draft_probs": LAWS[:4], **LAW}, ValueError, "draft_probs must be [5, >= 40], got [4, 40]"),
    ({"draft_logits": LAWS.double(), "rule": "block"}, TypeError, "draft_logits must be torch.float32, got torch."),
    ({"draft_logits": values(0, V, D).T, **LAW}, ValueError, "draft_logits must have column stride 1, got strides"),
    ({"draft_token_ids": torch.zeros(N, K)}, TypeError, "draft_token_ids must be torch.int64 or torch.int32, got"),
    ({"draft_token_ids": torch.zeros(N, 2, dtype=torch.int64)}, ValueError, "must be [3, >= 3] as planned, got [3, 2]"),
    ({"draft_token_ids": torch.zeros(D + 1).long()}, ValueError, "must be [5], the sum of num_drafts, got [6]"),
    ({"positions": torch.arange(R)}, ValueError, "positions must be [3], one a slot of the plan, got [8]"),
    ({"logits": values(0, N, V)}, ValueError, "logits must be [8, >= 40], got [3, 40]"),
    ({"out": new_outputs(N)}, TypeError, "must be VerifyOutputs, got SampleOutputs; VerifyOutputs(token_ids"),
    ({"out": new_verified(N, 2)}, ValueError, "out.token_ids must be [3, 4], as the plan has it, got [3, 3]"),
    ({"out": OUT._replace(num_matching=torch.zeros(4).long())}, ValueError, "out.num_matching must be [3]"),
    ({"out": OUT._replace(status=torch.zeros(N).long())}, TypeError, "out.status must be torch.int32, got"),
]


@pytest.mark.parametrize(("changed", "error", "words"), WRONG)
def test_wrong_arguments_of_verify_are_refused_and_out_is_left_alone(engine, refused, changed, error, words):
    out = changed.get("out", new_verified(N, K))
    before = [each.clone() for each in tensors_of(out)]
    assert words in refused(error, verify, engine, **{"out": out, **changed})
    assert all(a.is_meta or torch.equal(a, b) for a, b in zip(before, tensors_of(out), strict=True))


@pytest.mark.parametrize(("changed", "error", "words"), [each for each in WRONG if "draft_logits" not in each[0]])
def test_verify_from_probs_refuses_the_same(engine, refused, changed, error, words):
    given = {("target_probs" if name == "logits" else name): each for name, each in (INPUTS | changed).items()}
    words = words.replace("logits must", "target_probs must")
    assert words in refused(error, engine.sampler.verify_from_probs, engine.plan, **given)


@pytest.mark.parametrize("drafts", [None, [[3, 5], [], [7, 0, 39]], [torch.zeros(3).long()], "a handle"])
@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_drafts_that_are_neither_a_tensor_nor_handles_are_refused(engine, refused, drafts, rule):
    given = engine.handles[0] if drafts == "a handle" else drafts
    assert "draft" in refused(TypeError, verify, engine, draft_token_ids=given, rule=rule)


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_handles_of_other_slots_in_another_order_or_too_few_are_refused(engine, refused, rule):
    first, second, third = engine.handles
    other = engine.sampler.draft(engine.sampler.plan(engine.slots[::-1]), values(0, N, V), INPUTS["positions"], False)
    for handles, words in (
        ([other, second, third], "drafts must be of the plan's slots (0, 1, 2), got (2, 1, 0); draft() with its plan"),
        ([second, first, third], "drafts must be in the order of their offsets, got 1 at 0; sort them"),
        ([first, first, third], "drafts must be in the order of their offsets, got 0 at 1; sort them"),
        ([first, second], "must be"),
        ([], "must be"),
    ):
        assert words in refused(ValueError, verify, engine, draft_token_ids=handles, rule=rule)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_coupled_drafts_are_refused_where_the_test_must_be_independent(engine, refused, rule):
    for handles in (engine.coupled, [*engine.handles[:2], engine.coupled[2]]):
        message = refused(ValueError, verify, engine, draft_token_ids=handles, rule=rule)
        assert f"rule {rule!r} needs drafts with noise of their own" in message


def test_handles_bring_their_own_law(engine, refused):
    for name in ("draft_probs", "draft_logits"):
        changed = {"draft_token_ids": engine.handles, "rule": "rejection", name: LAWS}
        assert "must not" in refused(ValueError, verify, engine, **changed)


def test_handles_from_logits_of_different_widths_are_verified(engine):
    padded = torch.nn.functional.pad(values(1, N, V), (0, 3))
    second = engine.sampler.draft(engine.plan, padded, INPUTS["positions"] + 1, False, 1)
    handles = [engine.handles[0], second, engine.handles[2]]
    assert same(*(verify(engine, draft_token_ids=each, rule="rejection") for each in (handles, engine.handles)))


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"offset": -1}, ValueError, "offset must be in [0, 64), got -1; it counts drafts of the same block"),
        ({"offset": 64}, ValueError, "offset must be in [0, 64), got 64; it counts drafts of the same block"),
        ({"offset": np.True_}, TypeError, "offset must be an int"),
        ({"coupled": "no"}, TypeError, "coupled must be a bool, got 'no'; True for the rule 'match'"),
        ({"draft_logits": values(0, R, V)}, ValueError, "logits must be [3, >= 40], got [8, 40]"),
        ({"positions": torch.arange(R)}, ValueError, "positions must be [3], one a slot of the plan, got [8]"),
    ],
)
@pytest.mark.parametrize("coupled", [True, False])
def test_wrong_arguments_of_draft_are_refused(engine, refused, changed, error, words, coupled):
    given = {"draft_logits": ROWS["logits"], "positions": ROWS["positions"], "coupled": coupled} | changed
    assert words in refused(error, engine.sampler.draft, engine.plan, **given)


def test_a_wrong_out_of_probs_is_refused(engine, refused):
    for out, error, words in (
        (torch.zeros(N, V + 1), ValueError, "must be [3, 40], as the plan has it, got [3, 41]"),
        (torch.zeros(N, V).half(), TypeError, "must be torch.float32, got torch.float16"),
    ):
        assert words in refused(error, engine.sampler.probs, engine.plain, ROWS["logits"], out)


def calls_of(sampler: Sampler, plan: Plan, plain: Plan) -> list[tuple[Any, ...]]:
    inputs, rows = tuple(INPUTS.values()), tuple(ROWS.values())
    verified = [(function, plan, *inputs) for function in (sampler.verify, sampler.verify_from_probs)]
    return [*verified, (sampler.draft, plan, *rows), (sampler.sample, plain, *rows), (sampler.probs, plain, rows[0])]


def test_plans_of_another_sampler_are_refused(engine, refused):
    other = sampler_with([REQUESTS["full"]] * N, V)
    for call in calls_of(engine.sampler, other.plan(range(N), num_drafts=WIDTHS), other.plan(range(N))):
        assert "plan must come from this sampler's plan(), got one of another" in refused(ValueError, *call)


def test_plans_of_removed_requests_are_refused(engine, refused):
    slot = engine.sampler.add_request(REQUESTS["full"])
    slots = [*engine.slots[:2], slot]
    calls = calls_of(engine.sampler, engine.sampler.plan(slots, num_drafts=WIDTHS), engine.sampler.plan(slots))
    engine.sampler.remove_request(slot)
    for call in calls:
        assert "the request of row 2 (slot 3) was removed; make a new plan" in refused(ValueError, *call)


@pytest.mark.parametrize("bonus", [torch.zeros(1, 1, dtype=torch.int32), [1], False])
def test_bonus_tokens_from_outside_are_refused(engine, refused, bonus):
    for call in (engine.sampler.verify, engine.sampler.verify_from_probs):
        message = refused(ValueError, call, engine.plan, *INPUTS.values(), bonus_token_ids=bonus)
        assert f"bonus_token_ids must be None, got {type(bonus).__name__}; pass k_n + 1 rows of each" in message
