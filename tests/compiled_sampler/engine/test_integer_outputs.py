"""Results in 32 bits: the numbers of 64, in memory of the caller alone, wherever and however they are computed."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler import SampleOutputs, Sampler, SamplingParams, VerifyOutputs
from compiled_sampler.batch import tensors_of
from compiled_sampler.modes import RULES
from tests.builders.sampler import same, verifying_sampler

V, K, N = 140, 3, 5
COUNTS = [2, 0, 3, 1, 3]
BITS = [torch.int64, torch.int32]


PARAMS = [SamplingParams(seed=n, temperature=float(n > 1), top_k=30) for n in range(N)]


@pytest.fixture(params=["eager", "reference", "graph"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return verifying_sampler(request.param, V, PARAMS, K)


def logits_of(rows: int, seed: int = 0) -> Tensor:
    made = 2.0 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))
    made[1] = -torch.inf
    return made


def outputs(kind: type, rows: int, *dtypes: torch.dtype) -> Any:
    """Tensors for results, which hold what no result is; those of ``VerifyOutputs`` for K drafts."""
    shapes = [(rows, K + 1), *[(rows,)] * 4] if kind is VerifyOutputs else [(rows,)] * 2
    return kind(*map(lambda shape, dtype: torch.full(shape, -7, dtype=dtype), shapes, (*dtypes, torch.int32)))


def holds(out: Any, wanted: Any) -> bool:
    """Whether results have the numbers of others, in their own dtypes."""
    return same(
        type(wanted)(*(each.to(its.dtype) for each, its in zip(tensors_of(out), tensors_of(wanted), strict=True))),
        wanted,
    )


@pytest.mark.parametrize("dtype", BITS)
def test_tokens_of_32_bits(sampler, dtype):
    plan, where = sampler.plan([3, 0, -1, 2, 4], "full"), torch.arange(N)
    for seed in range(3):
        out = outputs(SampleOutputs, N, dtype)
        assert sampler.sample(plan, logits_of(N, seed), where, out) is out
        assert (out.token_ids.dtype, out.status.dtype) == (dtype, torch.int32)
        wanted = sampler.sample(plan, logits_of(N, seed), where)
        assert holds(out, wanted)
        assert out.tolist() == wanted.tolist()
        assert wanted.token_ids.dtype == torch.int64


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [K - 1, K])
def test_tokens_and_counts_of_32_bits_in_any_mixture(sampler, rule, width):
    plan = sampler.plan([2, 1, 0, -1, 4], "full", [min(each, width) for each in COUNTS])
    logits, drafts, where = logits_of(plan.num_rows), torch.randint(0, V, (N, width)), torch.arange(N)
    drafts[:, 0] = sampler.verify(plan, logits, drafts, where).token_ids[:, 0]
    wanted = sampler.verify(plan, logits, drafts, where, rule)
    for dtypes in itertools.product(BITS, repeat=4):
        out = outputs(VerifyOutputs, N, *dtypes)
        out = out._replace(token_ids=out.token_ids[:, : width + 1])  # strided for fewer drafts
        assert sampler.verify(plan, logits, drafts, where, rule, out=out) is out
        assert [each.dtype for each in tensors_of(out)] == [*dtypes, torch.int32]
        assert holds(out, wanted)
        assert torch.equal(out.accepted, wanted.accepted)
        assert out.tolist() == wanted.tolist()


def test_all_results_as_columns_of_one_buffer_of_words(sampler):
    plan, where = sampler.plan(range(N), "full", COUNTS), torch.arange(N)
    logits, drafts = logits_of(plan.num_rows), torch.randint(0, V, (N, K))
    packed = torch.full((N, K + 5), -7, dtype=torch.int32)
    out = VerifyOutputs(packed[:, 4:], *packed[:, :4].unbind(1))
    assert holds(sampler.verify(plan, logits, drafts, where, out=out), sampler.verify(plan, logits, drafts, where))
    for name, other in (("token_ids", packed[:, 3:-1]), ("num_emitted", packed[:, 3]), ("status", packed[:, 4])):
        before = packed.clone()
        with pytest.raises(ValueError, match=r"out\.\w+ must have memory of its own, got that of out\.\w+; allocate"):
            sampler.verify(plan, logits, drafts, where, out=out._replace(**{name: other}))
        assert torch.equal(packed, before)


def test_results_of_32_bits_do_not_overwrite_inputs_of_32_bits(sampler):
    plan, memory = sampler.plan(range(N), "full"), torch.arange(3 * N, dtype=torch.int32)
    where, logits, before = memory[:N], logits_of(N), memory.clone()
    for start, fits in ((0, False), (N - 1, False), (N, True), (0, False)):
        out = outputs(SampleOutputs, N, torch.int32)._replace(token_ids=memory[start : start + N])
        if fits:
            assert holds(sampler.sample(plan, logits, where, out), sampler.sample(plan, logits, torch.arange(N)))
            memory.copy_(before)
            continue
        with pytest.raises(ValueError, match=r"out\.token_ids must have memory of its own, got that of an input"):
            sampler.sample(plan, logits, where, out)
        assert torch.equal(memory, before)


def test_batches_without_rows(sampler):
    where = torch.empty(0, dtype=torch.int64)
    out = outputs(SampleOutputs, 0, torch.int32)
    assert sampler.sample(sampler.plan([]), torch.empty(0, V), where, out) is out
    verified = outputs(VerifyOutputs, 0, *[torch.int32] * 4)
    drafts, plan = torch.empty(0, K, dtype=torch.int32), sampler.plan([], num_drafts=[])
    assert sampler.verify(plan, torch.empty(0, V), drafts, where, out=verified) is verified


def test_other_dtypes_are_refused_after_right_ones(sampler):
    plan, logits, where = sampler.plan(range(N)), logits_of(N), torch.arange(N)
    memory = torch.full((2 * N,), -7, dtype=torch.int32)
    views = {dtype: memory.view(dtype)[:N] for dtype in (*BITS, torch.int16, torch.uint8, torch.float32)}
    for dtype in (*BITS, *views, *BITS):
        out = outputs(SampleOutputs, N, dtype)._replace(token_ids=views[dtype])
        if dtype in BITS:
            assert holds(sampler.sample(plan, logits, where, out), sampler.sample(plan, logits, where))
            continue
        with pytest.raises(TypeError, match=f"out.token_ids must be torch.int64 or torch.int32, got {dtype}; convert"):
            sampler.sample(plan, logits, where, out)
    wide = outputs(SampleOutputs, N, torch.int32)._replace(status=torch.zeros(N, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"out\.status must be torch\.int32, got torch\.int64; convert"):
        sampler.sample(plan, logits, where, wide)
