"""Results of a caller that torch would refuse to write are refused before anything runs, and stay as they were."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiled_sampler import SampleOutputs, Sampler, SamplingParams, VerifyOutputs
from compiled_sampler.batch import tensors_of
from tests.builders.sampler import same

V, N = 20, 3


@pytest.fixture
def calls() -> dict[type, Callable[..., Any]]:
    """A call of each kind, by what it returns; each takes ``out``."""
    sampler = Sampler(V, N, backend="eager")
    slots = [sampler.add_request(SamplingParams(seed=seed)) for seed in range(N)]
    plain, plan = sampler.plan(slots), sampler.plan(slots, num_drafts=[1] * N)
    logits, positions = torch.zeros(2 * N, V), torch.arange(N)
    drafts = torch.zeros(N, 1, dtype=torch.int64)
    return {
        SampleOutputs: lambda out=None: sampler.sample(plain, logits[:N], positions, out),
        VerifyOutputs: lambda out=None: sampler.verify(plan, logits, drafts, positions, out=out),
        torch.Tensor: lambda out=None: sampler.probs(plan, logits, out),
    }


def copied(results: Any) -> Any:
    """The same results in new tensors."""
    return type(results)(*map(torch.clone, tensors_of(results))) if isinstance(results, tuple) else results.clone()


@pytest.mark.parametrize("kind", [SampleOutputs, VerifyOutputs, torch.Tensor])
def test_an_inference_mode_tensor_is_written_in_inference_mode_alone(calls, kind):
    wanted = calls[kind]()
    with torch.inference_mode():
        out = copied(wanted)
        calls[kind](out)
    before = copied(out)
    with pytest.raises(ValueError, match=r"out\.\w+ must be a normal tensor outside of inference mode, got one made"):
        calls[kind](out)
    with torch.inference_mode():
        assert calls[kind](out) is out
    for found in (out, before):
        assert torch.equal(found, wanted) if kind is torch.Tensor else same(found, wanted)


def test_a_tensor_that_requires_grad_is_written_where_no_gradient_is_recorded(calls):
    out = torch.full((2 * N, V), -7.0, requires_grad=True)
    words = "out.probabilities must not require grad while torch records gradients, got requires_grad=True; pass its"
    for refused in (out, out * 1.0):
        with pytest.raises(ValueError, match=r"must not require grad") as caught:
            calls[torch.Tensor](refused)
        assert words in str(caught.value)
        assert (refused == -7.0).all()
    assert torch.equal(calls[torch.Tensor](out.detach()), calls[torch.Tensor]())
    with torch.no_grad():
        assert calls[torch.Tensor](out) is out


def test_results_without_finished_are_refused_in_a_batch_with_edits():
    sampler = Sampler(V, N, backend="eager")
    plan = sampler.plan([sampler.add_request(SamplingParams(seed=1, stop_token_ids=[2]))])
    logits, positions = torch.zeros(1, V), torch.zeros(1, dtype=torch.int64)
    out = SampleOutputs(torch.empty(1, dtype=torch.int64), torch.empty(1, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"^out\.finished must be a torch\.Tensor in a batch with edits, got None; "):
        sampler.sample(plan, logits, positions, out)
    full = out._replace(finished=torch.empty(1, dtype=torch.bool))
    assert same(sampler.sample(plan, logits, positions, full), sampler.sample(plan, logits, positions))
