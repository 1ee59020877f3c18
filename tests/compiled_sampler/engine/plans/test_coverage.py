"""Each parameter in each captured plan: a step draws what a normal plan does, or says NOT_COVERED; never another law.

The plans are of padding, as for a step that an engine captures, and the slots come with the call.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from compiled_sampler import (
    Logprobs,
    Plan,
    RowStatus,
    SampleOutputs,
    Sampler,
    SamplingParams,
    Verification,
    VerifyOutputs,
)
from compiled_sampler.batch import tensors_of
from compiled_sampler.modes import RULES, mode_table, uncovered
from tests.builders import custom_edits
from tests.builders.custom_edits import custom_sampler
from tests.builders.edits import FILTERS, OF_EDIT, V
from tests.builders.sampler import holding, sampler_with
from tests.tiers import tiers

K = 2
DRAWN: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "few of top_k": {"top_k": 5},
    "many of top_k": {"top_k": 100},
    "top_p": {"top_p": 0.6},
    "both": {"top_k": 50, "top_p": 0.9},
    "min_p": {"min_p": 0.2},
}
"""What the mode has to cover."""
EDITED: dict[str, dict[str, Any]] = {
    **{name: OF_EDIT[name] for name in ("allowed_token_ids", "logit_bias", "min_tokens", "dry", "bad_words", *FILTERS)},
    "repetition_penalty": {"repetition_penalty": 7.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "presence_penalty": {"presence_penalty": 2.0},
    "stop_token_ids": {"stop_token_ids": tuple(range(0, 64, 2))},
    "eos_token_id": {"eos_token_id": 4},
    "watermark_tokens": {"watermark_tokens": 2},
    "an edit of the user": {"extra_args": {"NoDigits": custom_edits.OF_EDIT["NoDigits"]}},
    "one that reads tokens": {"extra_args": {"GreenList": custom_edits.OF_EDIT["GreenList"]}},
}
"""What the edits have to."""
PARAMS = [SamplingParams(**given, seed=n) for n, given in enumerate((*DRAWN.values(), *EDITED.values()))]
N = len(PARAMS)
PROMPT, OUTPUT = [3, 10, 4, 4], [3, 10, 4]
MODES = [mode.name for mode in mode_table(V, "top_k")]
NAMED = sorted({name for each in PARAMS for name in each.edits})
SOME = ["logit_bias", "penalties", "stops", "xtc", "GreenList", "token_bitmask"]
ASKED = Logprobs(of="filtered", top=2, rank=True, entropy=True, num_kept=True, token_ids=(1, 2))
IDLE = int(RowStatus.NOT_COVERED)


def given() -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``[N * (K + 1), V]``, of which ``sample`` and ``draft`` read the first N rows, drafts, and positions."""
    generator = torch.Generator().manual_seed(5)
    logits = 1.5 * torch.randn(N * (K + 1), V, generator=generator)
    drafts = logits.view(N, K + 1, V)[:, :K].argmax(-1)
    return logits, drafts, torch.full((N,), len(PROMPT) + len(OUTPUT))


LOGITS, DRAFTS, POSITIONS = given()


@functools.cache
def sampler_of(backend: str) -> Sampler:
    sampler = custom_sampler(backend, N, buckets=[N])
    assert [sampler.add_request(each, PROMPT, OUTPUT) for each in PARAMS] == [*range(N)]
    return sampler


def captured(sampler: Sampler, slots: Sequence[int], mode: str, edits: Sequence[str] | None, **drafts: Any) -> Plan:
    """A plan of padding that reads the slots from a buffer."""
    plan = sampler.plan([-1] * len(slots), mode, edits=edits, **drafts)
    return dataclasses.replace(plan, slot_ids=torch.tensor(slots, device=sampler.device))


def covered_by(mode: str | None, edits: Sequence[str] | None) -> Tensor:
    """Which requests a step serves, bool ``[N]``; a step on probabilities in whatever mode."""
    served = {*(edits or ())}
    way = next((each for each in mode_table(V, "top_k") if each.name == mode), None)
    return torch.tensor([(way is None or uncovered(way, each) is None) and {*each.edits} <= served for each in PARAMS])


def sample(sampler: Sampler, plan: Plan) -> SampleOutputs:
    return sampler.sample(plan, LOGITS[:N], POSITIONS, logprobs=ASKED)


def verify(sampler: Sampler, plan: Plan, rule: str) -> VerifyOutputs:
    return sampler.verify(plan, LOGITS, DRAFTS, POSITIONS, rule=rule, logprobs=ASKED)


def verify_from_probs(sampler: Sampler, plan: Plan, rule: str) -> VerifyOutputs:
    return sampler.verify_from_probs(plan, torch.softmax(LOGITS, -1), DRAFTS, POSITIONS, rule=rule)


def slots_for(rule: str) -> list[int]:
    """All slots but those that other rules than "match" refuse in every plan, as they keep no watermark."""
    return [-1 if rule != "match" and each.watermark_tokens else n for n, each in enumerate(PARAMS)]


def edits_for(rule: str, edits: list[str] | None) -> list[str] | None:
    return edits if rule == "match" or edits is None else [name for name in edits if name != "watermark"]


@functools.cache
def wanted(call: str, rule: str = "match") -> Any:
    sampler = sampler_of("eager")
    slots = slots_for("none" if call == "from probabilities" else rule)
    if call == "sample":
        return sample(sampler, sampler.plan(slots))
    plan = sampler.plan(slots, num_drafts=[K] * N)
    return verify(sampler, plan, rule) if call == "verify" else verify_from_probs(sampler, plan, rule)


def check_rows(made: Any, normal: Any, is_covered: Tensor) -> None:
    """Covered requests have their results, the others nothing at all."""
    for name, value in normal._asdict().items():
        found = getattr(made, name)
        if name == "logprobs":
            pairs = [] if value is None else zip(tensors_of(found), tensors_of(value), strict=True)
            for left, right in pairs:
                nothing = -torch.inf if left.is_floating_point() else -1
                assert torch.equal(left[is_covered], right[is_covered])
                assert (left[~is_covered] == nothing).all()
        elif name not in ("finished", "node_ids") or found is not None:
            nothing = {"token_ids": -1, "status": IDLE, "finished": False}.get(name, 0)
            assert torch.equal(found[is_covered], value[is_covered]), name
            assert (found[~is_covered] == nothing).all(), name


EACH = [None, SOME, NAMED]


def in_turn(*firsts: str) -> list[tuple[str, str, list[str] | None]]:
    """Each of these with each mode, and each of both with every set of edits."""
    pairs = itertools.product(enumerate(firsts), enumerate(MODES))
    return [(first, mode, EACH[(n + m) % len(EACH)]) for (n, first), (m, mode) in pairs]


@pytest.mark.parametrize(("backend", "mode", "edits"), in_turn("eager", "reference"))
def test_a_row_draws_what_a_normal_plan_does_or_nothing(backend, mode, edits):
    sampler, is_covered = sampler_of(backend), covered_by(mode, edits)
    plan = captured(sampler, range(N), mode, edits)
    made = sample(sampler, plan)
    check_rows(made, wanted("sample"), is_covered)
    assert (made.finished is None) == (edits is None)
    law = sampler.probs(plan, LOGITS[:N], positions=POSITIONS)
    assert torch.equal(law.sum(-1) > 0, is_covered)
    normal = sampler_of("eager")
    drafted = normal.draft(normal.plan(range(N)), LOGITS[:N], POSITIONS, coupled=False)
    found = sampler.draft(plan, LOGITS[:N], POSITIONS, coupled=False)
    assert torch.equal(found.token_ids, torch.where(is_covered, drafted.token_ids, -1))
    assert torch.equal(found.drawn.status, torch.where(is_covered, drafted.drawn.status, IDLE))


def test_the_test_above_sees_every_mode_and_edit_at_work():
    tables = {(mode, str(edits)): covered_by(mode, edits) for mode in MODES for edits in EACH}
    assert all(
        each.any() and not each.all() for (mode, edits), each in tables.items() if (mode, edits) != ("full", str(NAMED))
    )
    assert tables["full", str(NAMED)].all()
    assert all(len({bool(each[n]) for each in tables.values()}) == 2 for n in range(N) if n)


@pytest.mark.parametrize(("rule", "mode", "edits"), in_turn(*RULES))
def test_a_request_emits_what_a_normal_plan_does_or_nothing(rule, mode, edits):
    sampler, served = sampler_of("reference" if mode == "no_filter" else "eager"), edits_for(rule, edits)
    is_covered = covered_by(mode, served)
    made = verify(sampler, captured(sampler, range(N), mode, served, num_drafts=[K] * N), rule)
    check_rows(made, wanted("verify", rule), is_covered)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_a_step_on_probabilities_serves_every_mode_and_its_edits(backend, rule):
    sampler, served = sampler_of(backend), edits_for(rule, ["stops", "logit_bias"])
    made = verify_from_probs(sampler, captured(sampler, range(N), "greedy", served, num_drafts=[K] * N), rule)
    check_rows(made, wanted("from probabilities", rule), covered_by(None, served))


@pytest.mark.parametrize("call", ["sample", "match", "rejection"])
def test_what_is_not_covered_leaves_no_trace_in_the_history(call):
    sampler = custom_sampler("eager", 2)
    slots = [sampler.add_request(SamplingParams(presence_penalty=2.0, top_k=k, seed=1), PROMPT) for k in (5, 0)]
    sampler.flush()
    history = sampler._edits.history.table.entries
    before, positions = history.clone(), torch.full((2,), len(PROMPT))
    drafts = {} if call == "sample" else {"num_drafts": [K, K]}
    plan = captured(sampler, slots, "no_filter", ["penalties"], **drafts)
    logits = LOGITS[: plan.num_rows]
    if call == "sample":
        sampler.sample(plan, logits, positions)
    else:
        sampler.verify(plan, logits, DRAFTS[:2], positions, call)
    assert torch.equal(history[0], before[0])
    assert not torch.equal(history[1], before[1])


def on_cpu(made: Any) -> Any:
    return tree_map(lambda each: each.cpu() if isinstance(each, Tensor) else each, made)


@pytest.mark.parametrize("call", tiers(["sample"], ["sample", "match"]))
def test_compiled_steps_say_so_too(call):
    """Greedy without edits; and by races, with drafts, of which the history takes none of such a request."""
    logits, drafts, positions = given()
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 5}, {"frequency_penalty": 2.0}, {}]
    made = []
    for backend in ("eager", "compiled"):
        sampler = Sampler(V, 4, backend=backend, history_len=16)
        slots = [sampler.add_request(SamplingParams(**kind, seed=1), PROMPT, OUTPUT) for kind in kinds]
        if call == "sample":
            plan = captured(sampler, slots, "greedy", None)
            drawn: Any = sampler.sample(plan, logits[:4], positions[:4])
        else:
            plan = captured(sampler, slots, "no_filter", ["penalties"], num_drafts=[K] * 4)
            drawn = sampler.verify(plan, logits[: plan.num_rows], drafts[:4], positions[:4])
        made.append((*tensors_of(drawn), sampler._edits.history.table.entries[:4]))
        assert (drawn.status == IDLE).tolist() == ([False, True, True, True] if call == "sample" else [0, 1, 0, 0])
    assert all(map(torch.equal, *made))


def test_a_plan_whose_slots_an_engine_replaces_serves_what_it_says_in_every_call():
    """Logprobs, a mask, a bucket or a wider captured step made the same row one of another law."""
    sampler = Sampler(V, 2, backend="eager", buckets=[1], captured_edits=[["logit_bias", "stops"]])
    holding(sampler, "graph", [SamplingParams(seed=1, logit_bias={3: 100.0})] * 2)
    masks = torch.full((2, -(-V // 32)), -1, dtype=torch.int32)
    for edits in (None, ["stops"], ["logit_bias"], ["allowed_token_ids"]):
        is_covered = edits == ["logit_bias"]
        for count, mode in itertools.product((1, 2), ("full", "no_filter")):
            plan = captured(sampler, range(count), mode, edits)
            logits, positions = LOGITS[:count], POSITIONS[:count]
            for options in ({}, {"logprobs": Logprobs()}, {"token_bitmask": masks[:count]}):
                drawn = sampler.sample(plan, logits, positions, **options)
                assert drawn.token_ids.tolist() == [3 if is_covered else -1] * count
                assert drawn.status.tolist() == [0 if is_covered else IDLE] * count
            assert (sampler.probs(plan, logits, positions=positions)[:, 3] > 0.5).tolist() == [is_covered] * count
            edited = sampler.edited_logits(plan, logits, positions)
            assert (edited > -torch.inf).all(-1).tolist() == [is_covered] * count
            for coupled in (True, False):
                drafted = sampler.draft(plan, logits, positions, coupled=coupled)
                assert drafted.token_ids.tolist() == [3 if is_covered else -1] * count


def test_slots_of_a_buffer_stand_once_where_edits_read_the_history():
    sampler = Sampler(V, 2, backend="eager", history_len=8)
    slot = sampler.add_request(SamplingParams(seed=1, repetition_penalty=1.1), PROMPT[:4])
    plan = dataclasses.replace(sampler.plan([-1, -1], edits=["penalties"]), slot_ids=torch.tensor([slot, slot]))
    with pytest.raises(ValueError, match="slots must differ with penalties"):
        sampler.sample(plan, LOGITS[:2], POSITIONS[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("is_outer", [True, False], ids=["outer graph", "graph"])
def test_captured_steps_on_a_gpu_say_so_too(is_outer):
    """Plans and what they do not serve are on the device before a capture, of whose graph one plan runs first."""
    modes, ways = ["greedy", "no_filter", "top_k_top_p[64]"], [Verification("match", K), Verification("rejection", K)]
    options: dict[str, Any] = {"device": "cuda", "buckets": [N], "verifications": ways}
    options["captured_edits"] = [NAMED, edits_for("rejection", NAMED)]
    sampler = custom_sampler("compiled" if is_outer else "graph", N, **options)
    sampler.warmup(modes=modes)
    assert [sampler.add_request(each, PROMPT, OUTPUT) for each in PARAMS] == [*range(N)]
    sampler.flush()
    logits, drafts, positions = (each.cuda() for each in given())
    for mode in modes:
        for edits in (None, NAMED):
            for rule in (None, "match", "rejection"):
                served = edits if rule is None else edits_for(rule, edits)
                plan = captured(sampler, range(N), mode, served, **({"num_drafts": [K] * N} if rule else {}))

                def step(plan: Plan = plan, rule: str | None = rule) -> Any:
                    if rule is None:
                        return sampler.sample(plan, logits[:N], positions)
                    return sampler.verify(plan, logits, drafts, positions, rule)

                if is_outer:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        made = step()
                    graph.replay()
                else:
                    made = step()
                normal = wanted("sample") if rule is None else wanted("verify", rule)
                check_rows(on_cpu(made), normal._replace(logprobs=None), covered_by(mode, served))


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        (["logit_bais"], "edits must be one of .* got 'logit_bais'"),
        (["stops"], "edits must have those of the requests, .* without 'logit_bias'"),
        (["logit_bias", "penalties"], "edits must not be penalties without a history"),
    ],
)
def test_edits_that_a_plan_cannot_serve_are_refused(edits, message):
    sampler = sampler_with([SamplingParams(seed=1, logit_bias={3: 1.0})])
    with pytest.raises(ValueError, match=message):
        sampler.plan([0, -1], edits=edits)
    with pytest.raises(TypeError, match="edits must be a list of names"):
        sampler.plan([0, -1], edits="logit_bias")


def test_a_plan_has_the_edits_that_it_serves_and_asks_what_they_ask():
    sampler = custom_sampler("eager", 2)
    slot = sampler.add_request(SamplingParams(seed=1, logit_bias={3: 1.0}))
    plan = sampler.plan([slot, -1], edits=["token_bitmask", "GreenList", "stops", "logit_bias"])
    assert plan.edits == ("logit_bias", "history", "stops", "GreenList")
    assert sampler.plan(plan.slots, edits={"GreenList", "stops", "logit_bias"}) is plan
    assert sampler.plan(plan.slots).edits == ("logit_bias",)
    with pytest.raises(ValueError, match="slots must differ with penalties"):
        sampler.plan([slot, slot], edits=["logit_bias", "penalties"])
    with pytest.raises(ValueError, match="positions must be given"):
        sampler.probs(sampler.plan([-1], edits=["penalties"]), LOGITS[:1])
