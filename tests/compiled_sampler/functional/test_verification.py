"""``functional.verify``: the bits of a ``Sampler``'s verifications, by each rule and form of proposals."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler import RowStatus, Sampler, SamplingParams, VerifyOutputs
from compiled_sampler.batch import tensors_of
from compiled_sampler.functional import verify, verify_from_probs
from compiled_sampler.modes import RULES
from tests.builders.sampler import V, same
from tests.compiled_sampler.functional.test_sampling import PARAMS, columns, noise
from tests.tiers import tiers

PARAMS_HERE, K = PARAMS[::3], 3  # as in the self-check, whose stages are compiled anyway
N = len(PARAMS_HERE)
COUNTS = [n % (K + 1) for n in range(N)]
FORMS = ("one_hot", "draft_probs", "draft_logits")


def normal(seed: int, *shape: int) -> Tensor:
    return 2.5 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batch(counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of all rows; drafts ``[N, K]``, of which many are likely and one is none; draft logits ``[D, V]``."""
    logits = normal(0, sum(counts) + N, V)
    firsts = torch.tensor([0, *(count + 1 for count in counts[:-1])]).cumsum(0)
    likely = logits.argmax(-1)[(firsts[:, None] + torch.arange(K)).clamp(max=len(logits) - 1)]
    likely[7, 0] = V
    near = torch.cat([logits[first : first + count] for first, count in zip(firsts.tolist(), counts, strict=True)])
    return logits, likely, near + 0.2 * normal(1, len(near), V)


def proposals_of(form: str, draft_logits: Tensor) -> dict[str, Tensor]:
    if form == "one_hot":
        return {}
    return {form: draft_logits if form == "draft_logits" else torch.softmax(draft_logits, -1)}


def with_sampler(counts: list[int], rule: str, form: str, positions: Tensor, base: str = "top_k") -> VerifyOutputs:
    logits, drafts, draft_logits = batch(counts)
    sampler = Sampler(V, N, backend="eager", top_p_base=base)
    plan = sampler.plan([sampler.add_request(each) for each in PARAMS_HERE], num_drafts=counts)
    return sampler.verify(plan, logits, drafts, positions, rule, **proposals_of(form, draft_logits))


@pytest.mark.parametrize("counts", [COUNTS, [K] * N], ids=["ragged", "equal"])
@pytest.mark.parametrize(
    ("rule", "form"), [("match", "one_hot"), *((rule, form) for rule in RULES[1:] for form in FORMS)]
)
def test_every_rule_gives_the_outputs_of_a_sampler(rule, form, counts):
    logits, drafts, draft_logits = batch(counts)
    drawn_by, given = noise(PARAMS_HERE), torch.tensor(counts)
    wanted = with_sampler(counts, rule, form, drawn_by["positions"])
    options: dict[str, Any] = {"rule": rule, **proposals_of(form, draft_logits), **drawn_by, "backend": "eager"}
    assert same(verify(logits, drafts, **columns(PARAMS_HERE), num_drafts=given, **options), wanted)
    assert wanted.num_accepted.sum() > N // 4
    if counts != COUNTS:
        assert same(verify(logits, drafts, **columns(PARAMS_HERE), **options), wanted)
        narrow = {name: drawn_by[name].to(torch.int32) for name in ("positions",)} | {"seeds": drawn_by["seeds"]}
        narrow["positions"] = drawn_by["positions"] % 2**31
        wanted = verify(logits, drafts, **columns(PARAMS_HERE), **{**options, **narrow})
        narrow["positions"] = narrow["positions"].to(torch.int32)
        made = verify(
            logits, drafts.to(torch.int32), num_drafts=given.int(), **columns(PARAMS_HERE), **options | narrow
        )
        assert same(made, wanted)


@pytest.mark.parametrize("rule", tiers(["match"], ["match", "block"]))
def test_compiled_outputs_are_those_of_eager_torch(rule):
    """Without filters, as other stages are those of a compiled ``sample``."""
    logits, drafts, draft_logits = batch(COUNTS)
    proposals = proposals_of("one_hot" if rule == "match" else "draft_logits", draft_logits)
    options: dict[str, Any] = {"rule": rule, **proposals, **noise(PARAMS_HERE), "num_drafts": torch.tensor(COUNTS)}
    options["temperature"] = columns(PARAMS_HERE)["temperature"]
    assert same(verify(logits, drafts, **options), verify(logits, drafts, **options, backend="eager"))


@pytest.mark.parametrize("rule", RULES)
def test_the_base_of_top_p_and_numbers_reach_the_target(rule):
    logits, drafts, _ = batch([K] * N)
    drawn_by, filters = noise(PARAMS_HERE), {"temperature": 1.5, "top_k": 40, "top_p": 0.6, "min_p": 0.01}
    sampler = Sampler(V, N, backend="eager", top_p_base="all")
    seeds = drawn_by["seeds"].tolist()
    plan = sampler.plan([sampler.add_request(SamplingParams(**filters, seed=s)) for s in seeds], num_drafts=[K] * N)
    wanted = sampler.verify(plan, logits, drafts, drawn_by["positions"], rule)
    options: dict[str, Any] = {**drawn_by, **filters, "rule": rule, "backend": "eager"}
    assert same(verify(logits, drafts, top_p_base="all", **options), wanted)
    assert not same(verify(logits, drafts, **options), wanted)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("has_probs", [False, True])
def test_probabilities_give_the_outputs_of_a_sampler(rule, has_probs):
    logits, drafts, draft_logits = batch(COUNTS)
    target, drawn_by = torch.softmax(logits, -1), noise(PARAMS_HERE)
    proposals = {"draft_probs": torch.softmax(draft_logits, -1)} if has_probs and rule != "match" else {}
    sampler = Sampler(V, N, backend="eager")
    plan = sampler.plan([sampler.add_request(each) for each in PARAMS_HERE], num_drafts=COUNTS)
    wanted = sampler.verify_from_probs(plan, target, drafts, drawn_by["positions"], rule=rule, **proposals)
    options: dict[str, Any] = {"rule": rule, **proposals, **drawn_by, "backend": "eager"}
    assert same(verify_from_probs(target, drafts, num_drafts=torch.tensor(COUNTS), **options), wanted)


@pytest.mark.parametrize("rule", RULES)
def test_a_request_out_of_range_emits_nothing_and_the_others_their_tokens(rule):
    logits, drafts, _ = batch([K] * N)
    drawn_by, filters = noise(PARAMS_HERE), columns(PARAMS_HERE)
    options: dict[str, Any] = {"rule": rule, "backend": "eager"}
    wanted = verify(logits, drafts, **filters, **drawn_by, **options)
    filters["temperature"][0], filters["top_p"][3], drawn_by["positions"][5] = math.nan, 2.0, -4
    counts = torch.full((N,), K)
    counts[-1] = K + 1
    made = verify(logits, drafts, **filters, **drawn_by, num_drafts=counts, **options)
    wrong, right = [0, 3, 5, N - 1], [n for n in range(N - 1) if n not in (0, 3, 5)]
    assert (made.token_ids[wrong] == -1).all()
    assert {name: set(getattr(made, name)[wrong].tolist()) for name in ("num_emitted", "num_accepted", "status")} == {
        "num_emitted": {0},
        "num_accepted": {0},
        "status": {RowStatus.PARAMETER_OUT_OF_RANGE},
    }
    assert same(*(VerifyOutputs(*(each[right] for each in tensors_of(out))) for out in (made, wanted)))


@pytest.mark.parametrize("rule", RULES)
def test_a_request_that_the_named_mode_does_not_cover_emits_nothing(rule):
    logits, drafts, _ = batch([K] * N)
    top_p = torch.ones(N)
    options: dict[str, Any] = {"rule": rule, "mode": "no_filter", **noise(PARAMS_HERE), "backend": "eager"}
    wanted = verify(logits, drafts, top_p=top_p, **options)
    top_p[2], top_p[4] = 0.9, 1.5
    made = verify(logits, drafts, top_p=top_p, **options)
    wrong, right = [2, 4], [n for n in range(N) if n not in (2, 4)]
    assert (made.token_ids[wrong] == -1).all()
    assert made.num_emitted[wrong].tolist() == made.num_accepted[wrong].tolist() == [0, 0]
    assert made.status[wrong].tolist() == [RowStatus.NOT_COVERED, RowStatus.PARAMETER_OUT_OF_RANGE]
    assert same(*(VerifyOutputs(*(each[right] for each in tensors_of(out))) for out in (made, wanted)))


def test_padding_has_no_rows_and_no_status():
    logits, drafts, _ = batch([K] * N)
    drawn_by, filters = noise(PARAMS_HERE), columns(PARAMS_HERE)
    wanted = verify(logits, drafts, **filters, **drawn_by, backend="eager")
    counts = torch.full((N,), K)
    counts[2] = -1
    rows = torch.cat([logits[: 2 * (K + 1)], logits[3 * (K + 1) :]])
    made = verify(rows, drafts, **filters, **drawn_by, num_drafts=counts, backend="eager")
    assert all((each[2] == -1).all() for each in tensors_of(made))
    right = [n for n in range(N) if n != 2]
    assert same(*(VerifyOutputs(*(each[right] for each in tensors_of(out))) for out in (made, wanted)))


def test_trees_are_those_of_a_sampler():
    generator, count, nodes = torch.Generator().manual_seed(3), 4, 6
    logits = 2.0 * torch.randn(count * (nodes + 1), 50, generator=generator)
    seeds, positions = torch.arange(count), 10 * torch.arange(count)
    parents = torch.tensor([[node // 2 - 1 for node in range(nodes)]] * count)
    drafts = torch.randint(50, (count, nodes), generator=generator)
    given = {"temperature": 0.5, "seeds": seeds, "positions": positions, "backend": "eager"}
    for place, node in enumerate((0, 2)):  # the second follows the first; both draft what the target draws
        drafts[:, node] = verify(logits, drafts, parents=parents, **given).token_ids[:, place]
    sampler = Sampler(50, count, backend="eager")
    slots = [sampler.add_request(SamplingParams(temperature=0.5, seed=seed)) for seed in range(count)]
    plan = sampler.plan(slots, num_drafts=[nodes] * count)
    made = verify(logits, drafts, parents=parents.to(torch.int32), **given)
    assert same(made, sampler.verify(plan, logits, drafts, positions, parents=parents))
    assert made.num_accepted.sum() > 0
    draft_logits = 2.0 * torch.randn(count, nodes, 50, generator=generator)
    for first in (0, 2, 4):  # siblings
        draft_logits[:, first + 1] = draft_logits[:, first]
    of_rejection = {"rule": "rejection", "draft_logits": draft_logits.flatten(0, 1), "parents": parents}
    made = verify(logits, drafts, **of_rejection, **given)
    assert same(made, sampler.verify(plan, logits, drafts, positions, **of_rejection))
    with pytest.raises(ValueError, match="rule must be 'match' or 'rejection' for trees"):
        verify(logits, drafts, parents=parents, rule="block", **given)
    with pytest.raises(ValueError, match="accepts such drafts as often"):
        verify(logits, drafts, parents=parents, rule="rejection", **given)
    with pytest.raises(ValueError, match=r"parents must be \[4, 6\] like draft_token_ids, got \[4, 5\]"):
        verify(logits, drafts, parents=parents[:, 1:], **given)
