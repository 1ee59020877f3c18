"""``functional.sample``, ``probs``, ``verify``: the bits of a ``Sampler``, from numbers and tensors, on any backend."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled_sampler import RowStatus, SampleOutputs, Sampler, SamplingParams, VerifyOutputs
from compiled_sampler.batch import tensors_of
from compiled_sampler.functional import probs, sample, verify, verify_from_probs
from compiled_sampler.functional.arguments import mode_of
from compiled_sampler.modes import RULES, mode_table, uncovered
from tests.builders.sampler import REQUESTS, V, same
from tests.tiers import tiers

CHOICES = itertools.product((0.0, 0.3, 1.0, 1e3), (0, 1, 5, 64, 90, V, 500), (0.05, 0.9, 1.0), (0.0, 0.04, 1.0))
PARAMS = [SamplingParams(*values, seed=2**64 - 1 - 2**57 * n) for n, values in enumerate(list(CHOICES)[::3])]
FLOATS, NAMES = ("temperature", "top_p", "min_p"), ("temperature", "top_k", "top_p", "min_p")


def columns(params: Sequence[SamplingParams], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    made = {name: torch.tensor([getattr(p, name) for p in params], dtype=dtype) for name in FLOATS}
    return {**made, "top_k": torch.tensor([p.top_k for p in params])}


def noise(params: Sequence[SamplingParams]) -> dict[str, Tensor]:
    seeds = torch.tensor([(p.seed + 2**63) % 2**64 - 2**63 for p in params])
    return {"seeds": seeds, "positions": torch.arange(len(params)) * 2**33}


def rows(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of logits with ties, a NaN, an infinity, one that is all masked, and one column more than V."""
    source = torch.Generator().manual_seed(3)
    logits = (torch.randn(max(count, 4), V + 1, generator=source) * 3).to(torch.bfloat16).to(dtype)
    logits[:, V] = 1e4
    logits[1, 4], logits[2, 5], logits[3] = math.nan, math.inf, -math.inf
    return logits[:count]


def with_sampler(
    params: Sequence[SamplingParams], logits: Tensor, positions: Tensor, base: str = "top_k"
) -> tuple[SampleOutputs, Tensor]:
    sampler = Sampler(V, len(params), logits_dtype=logits.dtype, backend="eager", top_p_base=base)
    plan = sampler.plan([sampler.add_request(each) for each in params])
    return sampler.sample(plan, logits, positions), sampler.probs(plan, logits)


@pytest.mark.parametrize(
    ("dtype", "base", "backend"),
    [
        *itertools.product([torch.float32, torch.bfloat16, torch.float16], ["top_k", "all"], ["eager"]),
        (torch.float32, "top_k", "compiled"),
    ],
)
def test_rows_of_all_kinds_are_those_of_a_sampler(dtype, base, backend):
    logits, drawn_by, filters = rows(len(PARAMS), dtype), noise(PARAMS), columns(PARAMS)
    options: dict[str, Any] = {"vocab_size": V, "top_p_base": base, "backend": backend}
    tokens, law = with_sampler(PARAMS, logits, drawn_by["positions"], base)
    assert same(sample(logits, **filters, **drawn_by, **options), tokens)
    assert torch.equal(probs(logits, **filters, **options), law)


@pytest.mark.parametrize("name", REQUESTS)
def test_numbers_choose_the_mode_of_a_sampler_and_draw_its_tokens(name):
    params = [REQUESTS[name]] * 9
    logits, drawn_by = rows(9), noise(PARAMS[:9])
    seeded = [SamplingParams(*(getattr(REQUESTS[name], field) for field in NAMES), seed=p.seed) for p in PARAMS[:9]]
    numbers = {field: getattr(params[0], field) for field in NAMES}
    tokens, law = with_sampler(seeded, logits, drawn_by["positions"])
    assert mode_of(None, tuple(numbers.values()), V, "top_k").name == name
    for mode in (None, name, "full"):
        options: dict[str, Any] = {"mode": mode, "vocab_size": V, "backend": "eager"}
        assert same(sample(logits, **numbers, **drawn_by, **options), tokens)
        assert same(sample(logits, **columns(params), **drawn_by, **options), tokens)
        assert torch.equal(probs(logits, **numbers, **options), law)


def test_numbers_of_numpy_and_float32_mean_the_value_that_they_hold():
    logits, drawn_by = rows(4), noise(PARAMS[:4])
    stored = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.03}
    held = {name: float(np.float32(value)) for name, value in stored.items()}
    seeded = [SamplingParams(**held, top_k=7, seed=p.seed) for p in PARAMS[:4]]
    wanted, _ = with_sampler(seeded, logits, drawn_by["positions"])
    as_numpy = {name: np.float32(value) for name, value in stored.items()}
    as_rows = {name: torch.full((4,), value) for name, value in stored.items()}
    options: dict[str, Any] = {"vocab_size": V, "backend": "eager"}
    assert same(sample(logits, **as_numpy, top_k=np.int32(7), **drawn_by, **options), wanted)
    narrow = {"top_k": torch.full((4,), 7, dtype=torch.int32), "seeds": drawn_by["seeds"]}
    assert same(sample(logits, **as_rows, **narrow, positions=drawn_by["positions"], **options), wanted)
    laws = [probs(torch.zeros(1, 10), top_p=p, backend="eager") for p in (0.3, np.float32(0.3), torch.tensor([0.3]))]
    assert [law.count_nonzero().item() for law in laws] == [3, 4, 4]


def test_positions_may_be_of_32_bits_or_one_number():
    logits, seeds = rows(5), noise(PARAMS[:5])["seeds"]
    options: dict[str, Any] = {"seeds": seeds, "backend": "eager"}
    wanted = sample(logits, positions=torch.full((5,), 9), **options)
    assert same(sample(logits, positions=9, **options), wanted)
    assert same(sample(logits, positions=torch.full((5,), 9, dtype=torch.int32), **options), wanted)


@pytest.mark.parametrize("seed", [-1, 2**64 - 1, np.int64(-1)])
def test_a_number_seeds_a_single_row(seed):
    logits = rows(1)
    wanted = sample(logits, seeds=torch.tensor([-1]), positions=3, backend="eager")
    assert same(sample(logits, seeds=seed, positions=3, backend="eager"), wanted)


def test_a_row_out_of_range_draws_nothing_and_the_others_their_tokens():
    logits, drawn_by, filters = rows(9), noise(PARAMS[:9]), columns(PARAMS[:9])
    options: dict[str, Any] = {"vocab_size": V, "backend": "eager"}
    wanted, law = sample(logits, **filters, **drawn_by, **options), probs(logits, **filters, **options)
    filters["temperature"][0], filters["top_p"][4], filters["min_p"][5] = math.nan, 0.0, 1.5
    filters["top_k"][6], drawn_by["positions"][8] = -1, -1
    made, wrong = sample(logits, **filters, **drawn_by, **options), [0, 4, 5, 6, 8]
    assert made.token_ids[wrong].tolist() == [-1] * 5
    assert made.status[wrong].tolist() == [RowStatus.PARAMETER_OUT_OF_RANGE] * 5
    right = [1, 2, 3, 7]
    assert same(*(SampleOutputs(*(each[right] for each in tensors_of(out))) for out in (made, wanted)))
    made_law = probs(logits, **filters, **options)
    assert not made_law[wrong[:4]].any()
    assert torch.equal(made_law[[*right, 8]], law[[*right, 8]])


def test_a_row_that_the_named_mode_does_not_cover_draws_nothing():
    filters = {"top_p": torch.tensor([1.0, 0.9]), "temperature": 1.0}
    options: dict[str, Any] = {**noise(PARAMS[:2]), "backend": "eager"}
    made = sample(rows(2), **filters, mode="no_filter", **options)
    assert made.token_ids[0] >= 0
    assert (made.token_ids[1], made.status[1]) == (-1, RowStatus.NOT_COVERED)
    filters["top_p"][1] = 0.0
    assert sample(rows(2), **filters, mode="no_filter", **options).status[1] == RowStatus.PARAMETER_OUT_OF_RANGE


def test_no_rows_give_no_tokens():
    none = torch.empty(0, dtype=torch.int64)
    out = sample(torch.empty(0, V), seeds=none, positions=none)
    assert (out.token_ids.shape, out.token_ids.dtype, out.status.dtype) == ((0,), torch.int64, torch.int32)
    assert probs(torch.empty(0, V)).shape == (0, V)


def test_results_have_no_history_of_gradients():
    logits = rows(3).requires_grad_()
    assert not probs(logits, temperature=torch.ones(3, requires_grad=True), backend="eager").requires_grad


VALUES: tuple[tuple[float, ...], ...] = ((0.0, 0.8), (0, 1, 2, 64, 65, 127, 128, 200), (0.5, 1.0), (0.0, 0.1))
NUMBERS = [*itertools.product(*((None, *values) for values in VALUES))]


@pytest.mark.parametrize("vocab_size", [1, 2, 40, 64, 128])
def test_the_cheapest_mode_that_covers_every_row_that_there_can_be(vocab_size):
    table = mode_table(vocab_size, "top_k")
    for filters in NUMBERS:
        held = [values if given is None else (given,) for given, values in zip(filters, VALUES, strict=True)]
        requests = [SamplingParams(heat, int(k), p, least, seed=0) for heat, k, p, least in itertools.product(*held)]
        wanted = next(mode for mode in table if not any(uncovered(mode, params) for params in requests))
        assert mode_of(None, filters, vocab_size, "top_k") == wanted


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


def verified_by_sampler(
    counts: list[int], rule: str, form: str, positions: Tensor, base: str = "top_k"
) -> VerifyOutputs:
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
    wanted = verified_by_sampler(counts, rule, form, drawn_by["positions"])
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
