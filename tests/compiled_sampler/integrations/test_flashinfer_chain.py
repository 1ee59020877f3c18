"""``chain_speculative_sampling``: its counts beside ours, its law, and the renormalisations that stand beside it."""

import functools

import pytest
import torch
from torch import Tensor

from compiled_sampler.core.stage import call
from compiled_sampler.functional import verify_from_probs
from compiled_sampler.integrations import flashinfer
from compiled_sampler.integrations.flashinfer_noise import noise_of
from tests.oracles.goodness_of_fit import accept, chi_square, detects

V, N, K = 9, 30_000, 2


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions run eager torch."""
    monkeypatch.setattr(flashinfer, "_run", lambda: call)
    monkeypatch.setattr(flashinfer, "verify_from_probs", functools.partial(verify_from_probs, backend="eager"))


def one_hot(token: int, vocab_size: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(token), vocab_size).float()


def rows(*tokens: int) -> Tensor:
    """Rows that hold one token each, ``[1, n, 1000]``."""
    return torch.stack([one_hot(token, 1000) for token in tokens])[None]


def test_two_drafts_and_a_bonus_token_are_two_emitted_there_and_three_here():
    drafts, target = torch.tensor([[100, 200]], dtype=torch.int32), rows(100, 200, 777)
    tokens, accepted, emitted = flashinfer.chain_speculative_sampling(rows(100, 200), drafts, target, seed=1, offset=0)
    assert (tokens.tolist(), accepted.tolist(), emitted.tolist()) == ([[100, 200, 777]], [2], [2])
    assert (tokens.dtype, accepted.dtype, emitted.dtype) == (torch.int32,) * 3
    ours = verify_from_probs(target[0], drafts, seeds=1, positions=0, rule="rejection", backend="eager")
    assert (ours.tolist(), ours.num_emitted.tolist()) == ([[100, 200, 777]], [3])
    assert (ours.num_accepted.tolist(), ours.num_matching.tolist()) == ([2], [2])


def test_accepted_counts_behind_a_rejection_and_emitted_does_not():
    drafts, target = torch.tensor([[100, 200]]), rows(5, 200, 777)
    tokens, accepted, emitted = flashinfer.chain_speculative_sampling(rows(100, 200), drafts, target, seed=1, offset=0)
    assert (tokens.tolist(), accepted.tolist(), emitted.tolist()) == ([[5, -1, -1]], [1], [0])
    assert tokens.dtype == torch.int64


def test_counts_are_added_to_the_tensors_given():
    totals = torch.tensor([10], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    drafts, target = torch.tensor([[100, 200]]), rows(100, 3, 777)
    given = rows(100, 200), drafts, target, *totals
    _, accepted, emitted = flashinfer.chain_speculative_sampling(*given, seed=1, offset=0)
    assert (accepted is totals[0], emitted is totals[1]) == (True, True)
    assert (accepted.tolist(), emitted.tolist()) == ([11], [21])


def test_the_first_token_has_the_law_of_the_target(generator):
    target, draft = (torch.softmax(torch.randn(K + 1, V, generator=generator), -1) for _ in range(2))
    drafts = torch.multinomial(draft[:K], N, replacement=True, generator=generator).T.contiguous()
    given = draft[:K].expand(N, K, V).contiguous(), drafts, target.expand(N, K + 1, V).contiguous()
    tokens, _, emitted = flashinfer.chain_speculative_sampling(*given, seed=3, offset=8)
    counts = torch.bincount(tokens[:, 0], minlength=V)
    accept(chi_square(counts, target[0]))
    detects(chi_square(counts, draft[0]))
    last = tokens[emitted == K][:, K]
    accept(chi_square(torch.bincount(last, minlength=V), target[K]))
    seeds, positions = noise_of(3, 8, None, N, target.device, call)
    flat = {"draft_probs": given[0].flatten(0, 1), "rule": "rejection", "backend": "eager"}
    ours = verify_from_probs(given[2].flatten(0, 1), drafts, seeds=seeds, positions=positions, **flat)
    assert torch.equal(ours.token_ids, tokens)


def test_rows_that_are_not_by_request_raise():
    flat = torch.full((2, V), 1.0 / V)
    with pytest.raises(ValueError, match=r"draft_probs must have a row \[V\] for each request and place, got \[2, 9\]"):
        flashinfer.chain_speculative_sampling(flat, torch.zeros(1, 2, dtype=torch.int64), flat[None], seed=1, offset=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_top_k_keeps_exactly_so_many_and_of_equals_the_lowest_ids(dtype):
    values = torch.tensor([[0.1, 0.3, 0.3, 0.2, 0.1], [0.2, 0.2, 0.2, 0.2, 0.2], [0.0, 0.0, 1.0, 0.0, 0.0]]).to(dtype)
    kept = [[1, 2, 3], [0, 1, 2], [2]]
    made = flashinfer.top_k_renorm_probs(values, 3)
    assert made.dtype == dtype
    assert [row.nonzero().flatten().tolist() for row in made] == kept
    held = torch.stack([torch.isin(torch.arange(5), torch.tensor(ids)) for ids in kept])
    wanted = torch.where(held, values.float(), 0.0)
    assert torch.allclose(made.float(), wanted / wanted.sum(-1, keepdim=True), atol=torch.finfo(dtype).eps)
    masked = flashinfer.top_k_mask_logits(values, torch.tensor([3, 0, 1]))
    assert masked.dtype == dtype
    assert [(row > -torch.inf).nonzero().flatten().tolist() for row in masked] == [[1, 2, 3], [0, 1, 2, 3, 4], [2]]
    assert torch.equal(masked[masked > -torch.inf], values[masked > -torch.inf])


def test_top_p_keeps_the_shortest_prefix_that_holds_the_share():
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0]])
    made = flashinfer.top_p_renorm_probs(probs, torch.tensor([0.69, 0.51, 0.1]))
    wanted = torch.tensor([[0.0, 4 / 7, 3 / 7, 0.0], [1 / 3, 1 / 3, 1 / 3, 0.0], [0.0, 1.0, 0.0, 0.0]])
    assert torch.allclose(made, wanted, atol=1e-7)
    assert torch.allclose(flashinfer.top_p_renorm_probs(probs, 1.0, is_deterministic=True), probs, atol=1e-7)


def test_rows_out_of_range_keep_nothing():
    probs = torch.full((3, 4), 0.25)
    assert flashinfer.top_k_renorm_probs(probs, torch.tensor([-1, 2, 4])).count_nonzero(-1).tolist() == [0, 2, 4]
    assert flashinfer.top_p_renorm_probs(probs, torch.tensor([0.0, 1.5, torch.nan])).count_nonzero().item() == 0
    for wrong in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got"):
            flashinfer.top_p_renorm_probs(probs, wrong)
    with pytest.raises(ValueError, match=r"top_k must be in \[0, 2\*\*63\), got -1"):
        flashinfer.top_k_renorm_probs(probs, -1)
