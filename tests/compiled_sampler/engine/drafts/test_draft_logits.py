"""Draft logits of 16 bits, and those that the drafter filtered itself: their softmax is the law of the drafts."""

import itertools

import pytest
import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams, Verification, VerifyOutputs
from compiled_sampler.batch import RowStatus
from tests.builders.sampler import held, planned, replay_recordings, same, shared_sampler
from tests.tiers import tiers

V, K = 129, 3
RULES, NARROW = ("rejection", "block"), (torch.bfloat16, torch.float16)
PARAMS = [
    {},
    {"temperature": 0.5, "top_k": 20, "top_p": 0.9},
    {"min_p": 0.1, "temperature": 0.7},
    {"temperature": 0.0},
    {"top_p": 0.8, "temperature": 2.0},
    {"top_k": 70},
]
N = 4 * len(PARAMS)
COUNTS = [K, 0, 2, 1] * len(PARAMS)
PLAIN = {"draft_logits_are": "raw"}
PROCESSED = {"draft_logits_are": "processed"}


def sampler_of(backend: str, dtype: torch.dtype = torch.float32, edits: bool = False) -> Sampler:
    """Holds a request in each slot; "recorded" replays recordings, "graph" graphs of a GPU."""
    device = "cuda" if backend == "graph" else "cpu"
    ways = [Verification(rule, K, "processed") for rule in RULES] if backend in ("recorded", "graph") else []
    made_with = "eager" if backend == "recorded" else backend
    captured = [("logit_bias",)] if edits else []
    given = {"buckets": [N], "verifications": ways, "captured_edits": captured}
    made = Sampler(V, N, device, dtype, made_with, **given)
    if backend == "recorded":
        replay_recordings(made)
    if ways:
        made.warmup(modes=["full"])
    for i in range(N):
        bias = {"logit_bias": {i: 3.0, i + 1: -torch.inf}} if edits and i % 2 else {}
        made.add_request(SamplingParams(seed=i, **PARAMS[i % len(PARAMS)], **bias))
    return made


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the target, drafts, and rows of the drafter, of which some tokens are masked."""
    source = torch.Generator().manual_seed(3)
    target = 2.0 * torch.randn(sum(COUNTS) + N, V, generator=source)
    drafted = target[: sum(COUNTS)] + torch.randn(sum(COUNTS), V, generator=source)
    drafted[torch.rand(drafted.shape, generator=source) < 0.5] = -torch.inf
    tokens = torch.multinomial(torch.softmax(drafted, -1), 1, generator=source)[:, 0]
    tokens[::7] = 5  # some of them masked
    return target.to(dtype), tokens, drafted.to(dtype)


def verified(sampler: Sampler, rule: str, given: tuple[Tensor, Tensor, Tensor], **options: object) -> VerifyOutputs:
    target, tokens, drafted = (each.to(sampler.device) for each in given)
    plan = sampler.plan(range(N), "full", COUNTS)
    positions = torch.arange(N, device=sampler.device)
    found = sampler.verify(plan, target, tokens, positions, rule, draft_logits=drafted, **options)
    return VerifyOutputs(*(None if each is None else each.cpu() for each in found))


@pytest.mark.parametrize(
    ("dtype", "edits"),
    tiers(
        [(torch.float32, True), (torch.bfloat16, False)],
        itertools.product((torch.float32, torch.bfloat16), (False, True)),
    ),
)
@pytest.mark.parametrize("backend", ["eager", "recorded", pytest.param("graph", marks=pytest.mark.gpu)])
def test_every_backend_emits_what_the_definition_emits(backend, dtype, edits):
    sampler, own, given = sampler_of(backend, dtype, edits), sampler_of("reference", dtype, edits), tensors(dtype)
    for rule in RULES:
        found, wanted = (verified(each, rule, given, **PROCESSED) for each in (sampler, own))
        assert same(found, wanted)
        assert not same(verified(own, rule, given), wanted)
        assert (wanted.status & int(RowStatus.DRAFT_IMPOSSIBLE)).any()
    if backend in ("recorded", "graph"):
        assert sampler.statistics().direct_runs == 0


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES)
def test_compiled_stages_emit_what_eager_ones_do(rule):
    target, _, drafted = tensors()
    tokens, found = drafted[:8].argmax(-1).view(4, 2), []
    tokens[1, 1] = 5
    for sampler in (shared_sampler(V), shared_sampler(V, backend="eager")):
        with held(sampler, [SamplingParams(seed=i, **PARAMS[1]) for i in range(4)]) as slots:
            plan, given = sampler.plan(slots, num_drafts=[2] * 4), (target[:12], tokens, torch.arange(4), rule)
            assert plan.mode.name == "top_k_top_p[64]"
            found.append(sampler.verify(plan, *given, draft_logits=drafted[:8], **PROCESSED))
    assert same(*found)


@pytest.mark.parametrize("rule", RULES)
def test_drafts_from_the_law_of_the_target_are_all_accepted(rule):
    """The drafter filters and scales by a power of 2, which is exact, so that both laws are the same integers."""
    params = [SamplingParams(seed=i, temperature=0.5, top_k=20, top_p=0.9) for i in range(N)]
    sampler, plan = planned(*params, num_drafts=[K] * N, slots=N)
    logits = (2.0 * torch.randn(N, 1, V, generator=torch.Generator().manual_seed(1))).expand(N, K + 1, V).flatten(0, 1)
    law = sampler.probs(plan, logits).view(N, K + 1, V)[:, :K].flatten(0, 1)
    filtered = torch.where(law > 0.0, 2.0 * logits.view(N, K + 1, V)[:, :K].flatten(0, 1), -torch.inf)
    tokens = torch.multinomial(law, 1, generator=torch.Generator().manual_seed(2)).view(N, K)
    accepted = [
        sampler.verify(plan, logits, tokens, torch.arange(N), rule, draft_logits=filtered, **each).num_accepted
        for each in (PROCESSED, PLAIN)
    ]
    assert accepted[0].tolist() == [K] * N
    assert (accepted[1] < K).any()  # filtered twice, they are of another law


@pytest.mark.parametrize("rule", RULES)
def test_a_request_without_filters_has_the_same_outcome_either_way(rule):
    sampler, given = sampler_of("eager"), tensors()
    found, wanted = (verified(sampler, rule, given, **each) for each in (PROCESSED, PLAIN))
    rows = [n for n in range(N) if not PARAMS[n % len(PARAMS)]]
    assert torch.equal(found.token_ids[rows], wanted.token_ids[rows])


def test_what_cannot_be_processed_is_refused():
    sampler, (target, tokens, drafted) = sampler_of("eager"), tensors()
    plan, positions = sampler.plan(range(N), "full", COUNTS), torch.arange(N)
    handle = sampler.draft(plan, torch.zeros(N, V), positions, coupled=False)
    rows = {"draft_logits": drafted}
    cases = [
        (tokens, "match", rows | PROCESSED, "rule 'match' never looks at draft_probs or draft_logits"),
        (tokens, "block", PROCESSED, "draft_logits_are must be 'raw' without draft_logits, got 'processed'"),
        (tokens, "match", PROCESSED, "draft_logits_are must be 'raw' without draft_logits, got 'processed'"),
        (tokens, "block", {"draft_probs": drafted, **PROCESSED}, "draft_logits_are must be 'raw' without draft_logits"),
        (tokens, "block", rows | {"draft_logits_are": "filtered"}, "must be 'raw' or 'processed', got 'filtered'"),
        (tokens, "block", rows | {"draft_logits_are": None}, "must be 'raw' or 'processed', got None"),
        ([handle], "block", PROCESSED, r"must be 'raw' with handles, got 'processed': draft\(\) filtered"),
    ]
    verified(sampler, "block", (target, tokens, drafted))
    for drafts, rule, options, words in cases:
        with pytest.raises(ValueError, match=words):
            sampler.verify(plan, target, drafts, positions, rule, **options)
    with pytest.raises(ValueError, match="rule 'match' never looks"):
        Verification("match", K, "processed")


# Of 16 bits, in a sampler whose target is float32.


@pytest.mark.parametrize(("rule", "dtype"), [*zip(RULES, NARROW, strict=True)])
def test_drafts_of_16_bits_are_judged_as_their_values_in_float32(rule, dtype):
    sampler = sampler_of("eager")
    plan, positions = sampler.plan(range(N), num_drafts=[K] * N), torch.arange(N)
    target = 3.0 * torch.randn(N, K + 1, V)
    drafted = (target[:, :K] + 0.5 * torch.randn(N, K, V)).to(dtype).transpose(0, 1)
    logits = target.flatten(0, 1)
    results = []
    for rows in (drafted, drafted.float()):
        handles = [sampler.draft(plan, rows[j], positions + j, coupled=False, offset=j) for j in range(K)]
        assert [handle.logits.dtype for handle in handles] == [rows.dtype] * K  # a cache no larger than its logits
        tokens = torch.stack([handle.token_ids for handle in handles], 1)
        flat = rows.transpose(0, 1).flatten(0, 1)
        results.append(sampler.verify(plan, logits, handles, positions, rule))
        results.append(sampler.verify(plan, logits, tokens, positions, rule, draft_logits=flat))
    assert all(same(result, results[0]) for result in results)
    narrow, wide = (sampler.draft(plan, each[0], positions).token_ids for each in (drafted, drafted.float()))
    assert torch.equal(narrow, wide)  # coupled
    others = flat.float() + 0.3 * torch.randn(flat.shape)
    assert not same(sampler.verify(plan, logits, tokens, positions, rule, draft_logits=others), results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_would_be_rounded_is_refused(dtype):
    sampler, plan = planned(SamplingParams(), num_drafts=[1], logits_dtype=torch.bfloat16)
    rows, logits = torch.zeros(1, V, dtype=dtype), torch.zeros(2, V, dtype=torch.bfloat16)
    drafts, positions = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"draft_logits must be torch\.bfloat16"):
        sampler.draft(plan, rows, positions)
    with pytest.raises(TypeError, match=r"draft_logits must be torch\.bfloat16"):
        sampler.verify(plan, logits, drafts, positions, "block", draft_logits=rows)
