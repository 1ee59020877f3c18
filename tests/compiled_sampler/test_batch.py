"""What is read off the outputs of a step: lists of tokens for a host, and which drafts were accepted."""

import pytest
import torch
from torch import Tensor

from compiled_sampler import RowStatus, Sampler, SamplingParams, VerifyOutputs

V, N, K = 11, 60, 4
RULES = ("match", "rejection", "block")
BACKENDS = ("reference", "eager")


def values(seed: int, *shape: int) -> Tensor:
    return 1.5 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def verified(backend: str, rule: str, logits: Tensor | None = None) -> tuple[VerifyOutputs, Tensor, list[int]]:
    """Outputs, drafts and their numbers: ragged requests, the last one padding, whose drafts are often accepted."""
    sampler = Sampler(V, N, backend=backend)
    slots = [sampler.add_request(SamplingParams(seed=seed)) for seed in range(N - 1)]
    counts = [n % (K + 1) for n in range(N)]
    plan = sampler.plan([*slots, -1], num_drafts=counts)
    logits = values(0, plan.num_rows, V) if logits is None else logits
    drafts = torch.full((N, K), -1)
    own = sampler.probs(plan, logits).argmax(-1)
    for n, (start, count) in enumerate(zip(plan.first_rows, counts, strict=True)):
        drafts[n, :count] = own[start : start + count]
    probs = None if rule == "match" else torch.softmax(values(1, sum(counts), V), -1)
    return sampler.verify(plan, logits, drafts, torch.arange(N) * 9, rule, draft_probs=probs), drafts, counts


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_accepted_drafts_are_the_first_of_each_request_and_are_emitted(rule, backend):
    out, drafts, counts = verified(backend, rule)
    accepted = out.accepted
    assert (accepted.dtype, accepted.shape) == (torch.bool, (N, K))
    assert accepted.sum(-1).tolist() == out.num_accepted.clamp(min=0).tolist()
    assert torch.equal(accepted, accepted.cumprod(-1).bool())
    assert torch.equal(out.token_ids[:, :K][accepted], drafts[accepted])
    assert not (accepted & (torch.arange(K) >= torch.tensor(counts)[:, None])).any()
    assert not accepted[-1].any()  # padding
    assert 0 < int(accepted.sum()) < sum(counts)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_an_impossible_draft_is_not_accepted_even_if_its_id_is_emitted(rule):
    logits, q = torch.full((2, V), -torch.inf), torch.zeros(1, V)
    logits[:, 7], q[0, 3] = 0.0, 1.0
    sampler = Sampler(V, 2, backend="eager")
    plan = sampler.plan([sampler.add_request(SamplingParams(seed=1))], num_drafts=[1])
    out = sampler.verify(plan, logits, torch.tensor([[7]]), torch.tensor([0]), rule, draft_probs=q)
    assert out.tolist() == [[7]]
    assert out.status.tolist() == [RowStatus.DRAFT_IMPOSSIBLE]
    assert out.accepted.tolist() == [[False]]


@pytest.mark.parametrize("rule", RULES)
def test_the_list_of_a_request_is_what_it_commits(rule):
    logits = values(0, sum(n % (K + 1) for n in range(N)) + N, V)
    logits[::7] = -torch.inf
    out, _, _ = verified("eager", rule, logits=logits)
    counts = out.num_emitted.tolist()
    assert out.tolist() == [row[: max(count, 0)] for row, count in zip(out.token_ids.tolist(), counts, strict=True)]
    assert (out.tolist()[-1], counts[-1]) == ([], -1)
    assert 0 in counts


def test_verifications_without_drafts_have_lists_of_one_token():
    out = VerifyOutputs(torch.tensor([[5], [-1]]), *torch.tensor([[1, 0, 0], [-1, -1, -1]]).T, torch.tensor([0, -1]))
    assert out.tolist() == [[5], []]
    assert out.accepted.shape == (2, 0)
