"""Slots, positions, counts, drafts and results of 32 bits: the numbers of 64 bits, without kernels of their own."""

import dataclasses
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from compiled_sampler import Plan, SampleOutputs, Sampler, SamplingParams, VerifyOutputs
from compiled_sampler.batch import SampleInputs, tensors_of
from compiled_sampler.engine.step_executor import in_int64
from compiled_sampler.modes import RULES
from tests.builders.sampler import (
    REQUESTS,
    SHARED_SLOTS,
    Outputs,
    new_outputs,
    new_verified,
    normal_rows,
    nothing_compiles,
    same,
    verifying_sampler,
)
from tests.builders.sampler import V as SHARED_V
from tests.tiers import tiers

V, K, N = 140, 3, 5
COUNTS = [2, 0, 3, 1, 3]
PARAMS = [REQUESTS[name] for name in ("greedy", "top_k_top_p[64]", "no_filter", "min_p", "full")]
DTYPES = [torch.int64, torch.int32]
NARROW, WIDE = torch.int32, torch.int64
MIXTURES = [
    (WIDE, WIDE, WIDE, NARROW),
    (WIDE, NARROW, NARROW, WIDE),
    (NARROW, WIDE, NARROW, WIDE),
    (NARROW, NARROW, WIDE, WIDE),
    (NARROW, NARROW, NARROW, NARROW),
]
"""Dtypes of four tensors: any two of them have every pair of dtypes."""


@pytest.fixture(params=["eager", "reference", "graph"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return verifying_sampler(request.param, V, PARAMS, K)


def logits_of(rows: int, seed: int = 0) -> Tensor:
    return normal_rows(rows, V, seed)


def drafts_of(width: int = K) -> Tensor:
    """Drafts of which some are accepted by the requests above, some are no token ids."""
    return torch.randint(-1, V + 1, (N, width), generator=torch.Generator().manual_seed(1))


def with_slots(plan: Plan, dtype: torch.dtype) -> Plan:
    return dataclasses.replace(plan, slot_ids=plan.slot_ids.to(dtype))


@pytest.mark.parametrize(("slots", "positions"), [(WIDE, NARROW), (NARROW, WIDE), (NARROW, NARROW)])
def test_samples_drafts_and_laws_are_the_same(sampler, slots, positions):
    plan, where = sampler.plan([3, 1, -1, 0, 4], "full"), torch.tensor([0, 7, 2**31 - 1, 5, 2**31 - 1])
    given = with_slots(plan, slots)
    for seed in range(2):
        logits = logits_of(N, seed)
        assert same(sampler.sample(given, logits, where.to(positions)), sampler.sample(plan, logits, where))
        for coupled in (True, False):
            given_draft = sampler.draft(given, logits, where.to(positions), coupled, 1)
            wanted_draft = sampler.draft(plan, logits, where, coupled, 1)
            assert same(given_draft.drawn, wanted_draft.drawn)
        assert torch.equal(sampler.probs(given, logits), sampler.probs(plan, logits))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", tiers([K], [K, K + 2]))
def test_verifications_are_the_same_for_each_mixture_of_dtypes(sampler, rule, width):
    plan = sampler.plan([2, 1, 0, -1, 4], "full", COUNTS)
    full = dataclasses.replace(sampler.plan([2, 1, 0, -1, 4], "full", [K] * N), draft_counts=torch.tensor(COUNTS))
    logits, tokens = logits_of(plan.num_rows), drafts_of(width)
    rows = torch.cat([logits, logits_of(full.num_rows - plan.num_rows)])
    where = torch.full((N,), 2**31 - 1)  # the rows behind the first lie beyond 32 bits
    tokens[:, 0] = sampler.verify(plan, logits, tokens, where).token_ids[:, 0]
    wanted = sampler.verify(plan, logits, tokens, where, rule)
    assert (wanted.num_accepted > 0).any()
    none, no_drafts = sampler.plan([], num_drafts=[]), torch.empty(0, 0)
    for positions, drafts, slots, counts in MIXTURES:
        empty = with_slots(none, slots), logits_of(0), no_drafts.to(drafts), where[:0].to(positions), rule
        assert sampler.verify(*empty).token_ids.shape == (0, 1)
        given = with_slots(dataclasses.replace(full, draft_counts=full.draft_counts.to(counts)), slots)
        for its, own in ((with_slots(plan, slots), logits), (given, rows)):
            assert same(sampler.verify(its, own, tokens.to(drafts), where.to(positions), rule), wanted)
        assert torch.equal(sampler.probs(given, rows)[: len(logits)], sampler.probs(plan, logits))


def test_a_known_call_is_of_one_dtype(sampler):
    """The same address, shape and strides, read as numbers of another size."""
    memory = torch.zeros(2 * N, dtype=torch.int32)
    views = memory[:N], memory.view(torch.int64)
    plan, logits = sampler.plan(range(N), "full"), logits_of(N)
    for step in range(6):
        memory.copy_(torch.arange(2 * N) * (step // 2 + 1))
        where = views[step % 2]
        assert same(sampler.sample(plan, logits, where), sampler.sample(plan, logits, where.long().clone()))
        with pytest.raises(TypeError, match=r"must be torch\.int64 or torch\.int32, got torch\.int16"):
            sampler.sample(plan, logits, memory.view(torch.int16)[:N])


def test_numbers_of_64_bits_pass_and_all_others_are_converted_with_one_launch():
    wide, table = torch.arange(N), verifying_sampler("eager", V, PARAMS, K)._requests.staged.table
    given = SampleInputs(logits_of(N), wide, wide, table)
    with mock.patch.object(torch, "empty", side_effect=AssertionError("nothing is to be converted")):
        assert in_int64(given) is given
    narrow = given._replace(slots=wide.int(), positions=wide.int())
    with mock.patch.object(torch, "_foreach_copy_", wraps=torch._foreach_copy_) as together:
        made = in_int64(narrow)
    assert together.call_count == 1
    assert (made.slots.dtype, made.positions.dtype) == (torch.int64, torch.int64)
    assert torch.equal(made.slots, wide)
    assert all(getattr(made, name) is getattr(given, name) for name in ("logits", "table", "offsets"))


def test_kernels_that_were_compiled_for_64_bits_serve_32():
    """So a warm-up prepares both, and an engine's own capture needs no more; other tests compile these stages too."""
    sampler = Sampler(SHARED_V, SHARED_SLOTS, backend="compiled")
    plan, planned = (sampler.plan([-1] * N, "no_filter", counts) for counts in (None, [K] * N))
    slots = torch.tensor([sampler.add_request(SamplingParams(seed=n)) for n in range(N)])
    logits, where, tokens = 2.0 * torch.randn((K + 1) * N, SHARED_V), torch.arange(N), drafts_of()

    def drawn(dtype: torch.dtype) -> tuple[Outputs, Outputs]:
        plans = (dataclasses.replace(each, slot_ids=slots.to(dtype)) for each in (plan, planned))
        sampled = sampler.sample(next(plans), logits[:N], where.to(dtype))
        return sampled, sampler.verify(next(plans), logits, tokens.to(dtype), where.to(dtype))

    wanted = drawn(torch.int64)
    with nothing_compiles():
        found = drawn(torch.int32)
    assert all(itertools.starmap(same, zip(found, wanted, strict=True)))


# Results.


def masked_logits(rows: int, seed: int = 0) -> Tensor:
    made = logits_of(rows, seed)
    made[1] = -torch.inf
    return made


def outputs(kind: type, *dtypes: torch.dtype) -> Any:
    """Tensors for results, which hold what no result is; those of ``VerifyOutputs`` for K drafts."""
    empty = tensors_of(new_verified(N, K) if kind is VerifyOutputs else new_outputs(N))
    return kind(*map(Tensor.to, empty, (*dtypes, torch.int32)))


def holds(out: Any, wanted: Any) -> bool:
    """Whether results have the numbers of others, in their own dtypes."""
    return same(
        type(wanted)(*(each.to(its.dtype) for each, its in zip(tensors_of(out), tensors_of(wanted), strict=True))),
        wanted,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_of_32_bits(sampler, dtype):
    plan, where = sampler.plan([3, 0, -1, 2, 4], "full"), torch.arange(N)
    for seed in range(3):
        out = outputs(SampleOutputs, dtype)
        assert sampler.sample(plan, masked_logits(N, seed), where, out) is out
        assert (out.token_ids.dtype, out.status.dtype) == (dtype, torch.int32)
        wanted = sampler.sample(plan, masked_logits(N, seed), where)
        assert holds(out, wanted)
        assert out.tolist() == wanted.tolist()
        assert wanted.token_ids.dtype == torch.int64


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [K - 1, K])
def test_tokens_and_counts_of_32_bits_in_any_mixture(sampler, rule, width):
    plan = sampler.plan([2, 1, 0, -1, 4], "full", [min(each, width) for each in COUNTS])
    logits, drafts, where = masked_logits(plan.num_rows), torch.randint(0, V, (N, width)), torch.arange(N)
    drafts[:, 0] = sampler.verify(plan, logits, drafts, where).token_ids[:, 0]
    wanted = sampler.verify(plan, logits, drafts, where, rule)
    for dtypes in MIXTURES:
        out = outputs(VerifyOutputs, *dtypes)
        out = out._replace(token_ids=out.token_ids[:, : width + 1])  # strided for fewer drafts
        assert sampler.verify(plan, logits, drafts, where, rule, out=out) is out
        assert [each.dtype for each in tensors_of(out)] == [*dtypes, torch.int32]
        assert holds(out, wanted)
        assert torch.equal(out.accepted, wanted.accepted)
        assert out.tolist() == wanted.tolist()


def test_all_results_as_columns_of_one_buffer_of_words(sampler):
    plan, where = sampler.plan(range(N), "full", COUNTS), torch.arange(N)
    logits, drafts = masked_logits(plan.num_rows), torch.randint(0, V, (N, K))
    packed = torch.full((N, K + 5), -7, dtype=torch.int32)
    out = VerifyOutputs(packed[:, 4:], *packed[:, :4].unbind(1))
    assert holds(sampler.verify(plan, logits, drafts, where, out=out), sampler.verify(plan, logits, drafts, where))
    for name, other in (("token_ids", packed[:, 3:-1]), ("num_emitted", packed[:, 3]), ("status", packed[:, 4])):
        before = packed.clone()
        with pytest.raises(ValueError, match=r"out\.\w+ must have memory of its own, got that of out\.\w+; allocate"):
            sampler.verify(plan, logits, drafts, where, out=out._replace(**{name: other}))
        assert torch.equal(packed, before)
