"""The token after the last draft is drawn here: one from outside is refused with the reason, and nothing has run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiled_sampler import Sampler, SamplingParams, VerifyOutputs
from tests.builders.sampler import same

V = 20


@pytest.fixture(params=["verify", "verify_from_probs"])
def verify(request: pytest.FixtureRequest) -> Callable[..., VerifyOutputs]:
    """Both ways to verify two drafts of one request."""
    sampler = Sampler(V, 1, backend="eager")
    plan = sampler.plan([sampler.add_request(SamplingParams(seed=1))], num_drafts=[2])
    method, rows = getattr(sampler, request.param), torch.full((3, V), 1.0 / V)

    def call(**changed: Any) -> VerifyOutputs:
        out: VerifyOutputs = method(plan, rows, torch.tensor([[3, 4]]), torch.tensor([7]), **changed)
        return out

    return call


@pytest.mark.parametrize("bonus", [torch.zeros(1, 1, dtype=torch.int32), [1], False])
def test_bonus_tokens_from_outside_are_refused_with_the_reason(verify, bonus):
    wanted = verify()
    with pytest.raises(ValueError, match="bonus_token_ids must be None, got") as caught:
        verify(bonus_token_ids=bonus)
    message = str(caught.value)
    assert f"got {type(bonus).__name__}; pass k_n + 1 rows of each request instead" in message
    assert "drawn from its own row with the noise of its position" in message
    assert "break the stream of 'match' and the law of 'rejection' and 'block'" in message
    assert same(verify(bonus_token_ids=None), wanted)
