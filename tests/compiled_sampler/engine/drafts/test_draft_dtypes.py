"""Draft logits of 16 bits, as a drafter makes and caches them, in a sampler whose target is float32."""

import pytest
import torch

from compiled_sampler import Sampler, SamplingParams
from tests.builders.sampler import same

V, N, K = 129, 40, 3
NARROW = (torch.bfloat16, torch.float16)
PARAMS = [{}, {"top_k": 20, "top_p": 0.8}, {"min_p": 0.1, "temperature": 0.7}, {"temperature": 0.0}]


@pytest.fixture
def sampler() -> Sampler:
    made = Sampler(V, N, backend="eager")
    for i in range(N):
        made.add_request(SamplingParams(seed=i, **PARAMS[i % len(PARAMS)]))
    return made


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drafts_of_16_bits_are_judged_as_their_values_in_float32(sampler, rule, dtype):
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
    others = flat.float() + 0.3 * torch.randn(flat.shape)
    assert not same(sampler.verify(plan, logits, tokens, positions, rule, draft_logits=others), results[0])


@pytest.mark.parametrize("dtype", NARROW)
def test_coupled_drafts_of_16_bits_are_those_of_their_values(sampler, dtype):
    plan, positions, rows = sampler.plan(range(N)), torch.arange(N), (3.0 * torch.randn(N, V)).to(dtype)
    narrow, wide = (sampler.draft(plan, each, positions) for each in (rows, rows.float()))
    assert torch.equal(narrow.token_ids, wide.token_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_would_be_rounded_is_refused(dtype):
    sampler = Sampler(V, 1, logits_dtype=torch.bfloat16, backend="eager")
    plan = sampler.plan([sampler.add_request(SamplingParams())], num_drafts=[1])
    rows, logits = torch.zeros(1, V, dtype=dtype), torch.zeros(2, V, dtype=torch.bfloat16)
    drafts, positions = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"draft_logits must be torch\.bfloat16"):
        sampler.draft(plan, rows, positions)
    with pytest.raises(TypeError, match=r"draft_logits must be torch\.bfloat16"):
        sampler.verify(plan, logits, drafts, positions, "block", draft_logits=rows)
