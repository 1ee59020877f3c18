"""``functional.sample``, ``probs``, ``verify``: the bits of a ``Sampler``, from numbers and tensors, on any backend."""

import inspect
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled_sampler import RowStatus, SampleOutputs, Sampler, SamplingParams, VerifyOutputs, functional
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


def test_positions_may_be_of_32_bits_or_one_number_which_may_seed_a_single_row():
    logits, seeds = rows(5), noise(PARAMS[:5])["seeds"]
    wanted = sample(logits, seeds=seeds, positions=torch.full((5,), 9), backend="eager")
    for positions in (9, torch.full((5,), 9, dtype=torch.int32)):
        assert same(sample(logits, seeds=seeds, positions=positions, backend="eager"), wanted)
    wanted = sample(logits[:1], seeds=torch.tensor([-1]), positions=3, backend="eager")
    for seed in (-1, 2**64 - 1, np.int64(-1)):
        assert same(sample(logits[:1], seeds=seed, positions=3, backend="eager"), wanted)


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
        options["positions"] = drawn_by["positions"] % 2**31
        wanted = verify(logits, drafts, **columns(PARAMS_HERE), **options)
        options |= {"positions": options["positions"].int(), "num_drafts": given.int()}
        assert same(verify(logits, drafts.int(), **columns(PARAMS_HERE), **options), wanted)


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


def check_requests(made: VerifyOutputs, wanted: VerifyOutputs, wrong: dict[int, int]) -> None:
    """Some requests emit nothing and have a status, or are padding with a status of -1; the others are as wanted."""
    for n, status in wrong.items():
        assert [made.token_ids[n].tolist(), made.status[n]] == [[-1] * (K + 1), status]
        assert made.num_emitted[n] == made.num_accepted[n] == min(0, status)
    right = [n for n in range(N) if n not in wrong]
    assert same(*(VerifyOutputs(*(each[right] for each in tensors_of(out))) for out in (made, wanted)))


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
    check_requests(made, wanted, dict.fromkeys((0, 3, 5, N - 1), RowStatus.PARAMETER_OUT_OF_RANGE))


@pytest.mark.parametrize("rule", RULES)
def test_a_request_that_the_named_mode_does_not_cover_emits_nothing(rule):
    logits, drafts, _ = batch([K] * N)
    top_p = torch.ones(N)
    options: dict[str, Any] = {"rule": rule, "mode": "no_filter", **noise(PARAMS_HERE), "backend": "eager"}
    wanted = verify(logits, drafts, top_p=top_p, **options)
    top_p[2], top_p[4] = 0.9, 1.5
    made = verify(logits, drafts, top_p=top_p, **options)
    check_requests(made, wanted, {2: RowStatus.NOT_COVERED, 4: RowStatus.PARAMETER_OUT_OF_RANGE})


def test_padding_has_no_rows_and_no_status():
    logits, drafts, _ = batch([K] * N)
    drawn_by, filters = noise(PARAMS_HERE), columns(PARAMS_HERE)
    wanted = verify(logits, drafts, **filters, **drawn_by, backend="eager")
    counts = torch.full((N,), K)
    counts[2] = -1
    rows = torch.cat([logits[: 2 * (K + 1)], logits[3 * (K + 1) :]])
    made = verify(rows, drafts, **filters, **drawn_by, num_drafts=counts, backend="eager")
    check_requests(made, wanted, {2: -1})
    assert made.num_matching[2] == -1


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


# What a caller passes wrongly raises before anything runs: the rule, the value and the way out.


R, SIZE = 3, 10
LOGITS, SEEDS = torch.zeros(R, SIZE), torch.arange(R)
DRAFTS, TARGET = torch.zeros(R, 1, dtype=torch.int64), torch.zeros(2 * R, SIZE)
OF_VERIFY = {"logits": TARGET, "draft_token_ids": DRAFTS, "seeds": SEEDS, "positions": 0, "backend": "eager"}

ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"temperature": -1.0}, ValueError, r"temperature must be 0 or in .*, got -1.0; 0 is greedy"),
    ({"temperature": True}, TypeError, r"temperature must be a number, got True"),
    ({"temperature": [1.0] * R}, TypeError, r"temperature must be a number, got \[1.0"),
    ({"temperature": torch.ones(R).half()}, TypeError, r"temperature must be torch.float32 or torch.float64"),
    ({"temperature": torch.ones(R, 1)}, ValueError, r"temperature must be \[3\], one a row, got \[3, 1\]; a Python"),
    ({"temperature": torch.ones(R, device="meta")}, ValueError, r"temperature must be on cpu, got meta"),
    ({"top_k": -1}, ValueError, r"top_k must be >= 0, got -1"),
    ({"top_k": 2.0}, TypeError, r"top_k must be an int, got 2.0"),
    ({"top_k": torch.ones(R)}, TypeError, r"top_k must be torch.int64 or torch.int32, got torch.float32"),
    ({"top_p": 0.0}, ValueError, r"top_p must be in \(0, 1\], got 0.0"),
    ({"min_p": 1.5}, ValueError, r"min_p must be in \[0, 1\], got 1.5"),
    ({"mode": "fast"}, ValueError, r"mode must be one of \('greedy', "),
    ({"mode": 3}, TypeError, r"mode must be the name of a mode, got 3"),
    ({"mode": "greedy"}, ValueError, r"mode 'greedy' must cover the parameters, but temperature 1.0 draws"),
    ({"vocab_size": SIZE + 1}, ValueError, r"must be in \[1, 10\] for logits \[3, 10\], got 11; None takes all"),
    ({"vocab_size": 2.0}, TypeError, r"vocab_size must be an int, got 2.0"),
    ({"top_p_base": "row"}, ValueError, r"top_p_base must be one of \('top_k', 'all'\), got 'row'"),
    ({"backend": "graph"}, ValueError, r"backend must be one of .*, got 'graph'; to replay a graph, capture"),
    ({"logits": LOGITS.double()}, TypeError, r"logits must be torch.float32 or .*, got torch.float64"),
    ({"logits": LOGITS[0]}, ValueError, r"logits must be \[R, >= V\], got \[10\]; unsqueeze"),
    ({"logits": LOGITS.t()[:R]}, ValueError, r"logits must have column stride 1, got strides"),
    ({"logits": LOGITS.tolist()}, TypeError, r"logits must be a torch.Tensor, got list"),
]
NOISE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"seeds": 1}, ValueError, r"seeds must be a tensor \[3\], one a row, got the number 1; rows of one seed"),
    ({"seeds": SEEDS.to(torch.int32)}, TypeError, r"seeds must be torch.int64, got torch.int32"),
    ({"seeds": None}, TypeError, r"seeds must be an int, got None; pass an int64 tensor"),
    ({"logits": LOGITS[:1], "seeds": 2**64}, ValueError, r"seeds must be in \[-2\*\*63, 2\*\*64\), got 18446744073"),
    ({"positions": -1}, ValueError, r"positions must be in \[0, 2\*\*63\), got -1"),
    ({"positions": 2**63}, ValueError, r"positions must be in \[0, 2\*\*63\), got 9223372036854775808"),
    ({"positions": 1.0}, TypeError, r"positions must be an int, got 1.0"),
    ({"positions": torch.zeros(2, dtype=torch.int64)}, ValueError, r"positions must be \[3\], one a row, got \[2\]"),
]
DRAFTED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"draft_token_ids": DRAFTS[:, 0]}, ValueError, r"draft_token_ids must be \[N, K\], K at most 64, got \[3\]"),
    ({"draft_token_ids": DRAFTS.expand(3, 65)}, ValueError, r"draft_token_ids must be \[N, K\], K at most 64"),
    ({"draft_token_ids": DRAFTS.float()}, TypeError, r"draft_token_ids must be torch.int64 or torch.int32"),
    ({"logits": TARGET[:5]}, ValueError, r"must be \[6, >= V\], 2 rows a request, got \[5, 10\]; num_drafts says"),
    ({"num_drafts": [1, 1, 1]}, TypeError, r"num_drafts must be a torch.Tensor, got list"),
    ({"num_drafts": SEEDS[:2]}, ValueError, r"num_drafts must be \[3\], one a row, got \[2\]"),
    ({"num_drafts": SEEDS, "logits": TARGET[:0]}, ValueError, r"logits must have a row at least for 3 requests"),
    ({"rule": "strict"}, ValueError, r"rule must be one of .*, got 'strict'; it is called 'match' here"),
    ({"draft_probs": TARGET[:3]}, ValueError, r"rule 'match' never looks at .*, got draft_probs; leave it out"),
    ({"rule": "block", "draft_probs": TARGET[:2]}, ValueError, r"draft_probs must be \[3, >= 10\], one row a draft,"),
    ({"rule": "block", "draft_probs": torch.zeros(SIZE, 3).t()}, ValueError, r"draft_probs must have column stride 1"),
    ({"rule": "block", **dict.fromkeys(("draft_probs", "draft_logits"), TARGET[:3])}, ValueError, "must not both be"),
    ({"rule": "block", "draft_logits": TARGET[:3].double()}, TypeError, r"draft_logits must be torch.float32, got"),
]


@pytest.mark.parametrize(("changed", "error", "message"), ARGUMENTS + NOISE)
def test_a_wrong_argument_raises(changed, error, message):
    calls = [(sample, {"logits": LOGITS, "seeds": SEEDS, "positions": 0, "backend": "eager"})]
    if not {"seeds", "positions"} & {*changed}:
        calls.append((probs, {"logits": LOGITS, "backend": "eager"}))
        calls += [] if "logits" in changed else [(verify, OF_VERIFY)]
    for function, given in calls:
        rows = message.replace(r"logits \[3", rf"logits \[{len(given['logits'])}")
        with pytest.raises(error, match=rows):
            function(**{**given, **changed})


@pytest.mark.parametrize(("changed", "error", "message"), DRAFTED)
def test_wrong_drafts_raise(changed, error, message):
    with pytest.raises(error, match=message):
        verify(**{**OF_VERIFY, **changed})


def test_wrong_probabilities_raise():
    with pytest.raises(TypeError, match=r"target_probs must be torch.float32, got torch.bfloat16; convert"):
        verify_from_probs(TARGET.bfloat16(), DRAFTS, seeds=SEEDS, positions=0, backend="eager")
    with pytest.raises(ValueError, match=r"target_probs must be \[6, >= V\], 2 rows a request, got \[4, 10\]"):
        verify_from_probs(TARGET[:4], DRAFTS, seeds=SEEDS, positions=0, backend="eager")


FUNCTIONS = [getattr(functional, name) for name in functional.__all__ if name != "warmup"]  # that take rows
OF_REQUEST = "a request of a Sampler has it: add_request(SamplingParams({}=...))"
OF_CALL = "a call of a Sampler has it: sample or verify(plan, ..., {}=...)"
ELSEWHERE = {
    **dict.fromkeys(["repetition_penalty", "logit_bias", "stop_token_ids", "typical_p", "extra_args"], OF_REQUEST),
    **dict.fromkeys(["token_bitmask", "edit_inputs", "logprobs", "consume_logits", "out"], OF_CALL),
    **dict.fromkeys(["edits", "history_len", "draft_cache_len"], "a Sampler has it: Sampler({}=...)"),
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
def test_what_a_sampler_has_is_named_with_its_place(function: Callable[..., Any]) -> None:
    for name, place in ELSEWHERE.items():
        wanted = f"{function.__name__}() must get keywords of its own, got {name!r}; {place.format(name)}"
        with pytest.raises(TypeError, match=re.escape(wanted)):
            function(**{name: 1})


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
def test_any_other_keyword_is_answered_with_those_that_there_are(function: Callable[..., Any]) -> None:
    names = ", ".join(sorted(inspect.signature(function).parameters))
    with pytest.raises(TypeError, match=re.escape(f"got 'top_q'; these are: {names}")):
        function(torch.zeros(1, 5), top_q=0.5)


def test_a_seed_is_told_from_seeds() -> None:
    with pytest.raises(TypeError, match=re.escape("got 'seed'; seeds=... has one a row")):
        functional.sample(torch.zeros(1, 5), seed=1, positions=0)  # type: ignore[call-arg]
