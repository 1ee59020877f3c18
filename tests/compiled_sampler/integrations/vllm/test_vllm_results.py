"""What a sampler returns, in vLLM's forms."""

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch

from compiled_sampler import Logprobs, Sampler, SamplingParams
from compiled_sampler.integrations.vllm.results import GaplessLogprobs, logprob_columns, with_endings, without_gaps

pytestmark = pytest.mark.full


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_request_that_would_get_no_token_gets_the_one_that_ends_it(dtype: torch.dtype) -> None:
    drawn = torch.tensor([3, -1, 5], dtype=dtype)
    made = with_endings(drawn, torch.tensor([7, 8, 9]))
    assert made.dtype == dtype
    assert made.tolist() == [3, 8, 5]
    assert with_endings(drawn, 2).tolist() == [3, 2, 5]
    assert with_endings(torch.tensor([-1, 0], dtype=dtype), 0).tolist() == [0, 0]
    assert drawn.tolist() == [3, -1, 5]


def test_gaps_after_the_kept_tokens_are_filled_with_other_tokens_on_the_host() -> None:
    given = np.array([[2, 2, 0, -1, -1], [4, 4, 3, 2, 1], [1, 1, -1, -1, -1]])
    assert without_gaps(given).tolist() == [[2, 2, 0, 1, 3], [4, 4, 3, 2, 1], [1, 1, 0, 2, 3]]
    of_all = without_gaps(np.array([[5, 5, 2, 0, -1, -1, -1]]))
    assert sorted(of_all[0, 1:].tolist()) == list(range(6))
    made = GaplessLogprobs(torch.tensor([[2, 2, -1]]), torch.zeros(1, 3), torch.tensor([1]))
    for each in (made, made.to_cpu_nonblocking(), made.filter(torch.tensor([True]))):
        assert each.tolists().logprob_token_ids.tolist() == [[2, 2, 0]]


def test_columns_begin_with_the_drawn_token_with_drafts_and_without() -> None:
    sampler = Sampler(50, 2, backend="eager")
    slots = [sampler.add_request(SamplingParams(seed=seed)) for seed in (1, 2)]
    logits, wanted, positions = torch.randn(2, 50), Logprobs(top=3, rank=True), torch.tensor([4, 9])
    drawn = sampler.sample(sampler.plan(slots), logits, positions, logprobs=wanted)
    plain = logprob_columns(drawn.token_ids[:, None].int(), drawn.logprobs, 3)
    plan = sampler.plan(slots, num_drafts=[0, 1])
    rows, drafts = torch.cat([logits, torch.randn(1, 50)]), drawn.token_ids[1:]
    verified = sampler.verify(plan, rows, drafts, positions, logprobs=wanted)
    ragged = logprob_columns(verified.token_ids.int(), verified.logprobs, 3)
    assert [tuple(each.shape) for each in plain] == [(2, 4), (2, 4), (2,)]
    assert [tuple(each.shape) for each in ragged] == [(4, 4), (4, 4), (4,)]
    for one, two in zip(plain, ragged, strict=True):
        assert torch.equal(one, two[[0, 2]])
    ids, logprobs, ranks = plain
    assert ids[:, 0].tolist() == drawn.tolist()
    law = logits.log_softmax(-1)
    torch.testing.assert_close(logprobs, law.gather(1, ids.long()))
    assert ranks.tolist() == [(law[row] > law[row, token]).sum() + 1 for row, token in enumerate(drawn.tolist())]
