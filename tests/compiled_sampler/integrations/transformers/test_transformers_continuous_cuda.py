"""Continuous batching on CUDA, where forward pass and draw are captured in one graph: the tokens of the CPU."""

import functools
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from compiled_sampler.functional import warmup
from compiled_sampler.lowering.compiled_stages import CompiledStages
from tests.engines.tiny_models import LAWS, PROMPTS, batched, generated, tiny_model

ALL = range(len(PROMPTS))

pytestmark = [pytest.mark.gpu, pytest.mark.full]


@pytest.fixture(scope="module")
def model():
    return tiny_model().to("cuda")


@pytest.fixture
def captures(monkeypatch):
    """Every capture of a step that transformers makes."""
    from transformers.generation.continuous_batching.model_runner import ModelRunner

    made, original = list[object](), ModelRunner._capture_graph

    @functools.wraps(original)  # its signature is checked
    def counted(self: Any, *arguments: Any) -> None:
        made.append(self)
        original(self, *arguments)

    monkeypatch.setattr(ModelRunner, "_capture_graph", counted)
    return made


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("law", ["k_p", "p", "temperature", "greedy"])
def test_tokens_are_those_of_the_cpu(model, captures, law, is_graph, is_async, monkeypatch):
    monkeypatch.setattr(CompiledStages, "compiles_at_calls", False)  # as users have it
    cache = {"use_cuda_graph": is_graph, "use_async_batching": is_async}
    wanted = generated(tiny_model(), ALL, LAWS[law])
    assert batched(model, ALL, LAWS[law], backend="auto", **cache) == wanted  # steps in eager torch are not captured
    warmup()
    drawn = batched(model, ALL, LAWS[law], backend="auto", **cache)
    assert bool(captures) == is_graph
    assert drawn == wanted


def test_a_captured_step_draws_the_same_beside_others(model):
    together = batched(model, ALL, LAWS["k_p"], backend="auto", use_cuda_graph=True)
    turned = [3, 1, 0, 2]
    assert batched(model, turned, LAWS["k_p"], backend="auto", use_cuda_graph=True) == [together[n] for n in turned]
    alone = [batched(model, [n], LAWS["k_p"], backend="auto", use_cuda_graph=True)[0] for n in ALL]
    assert alone == together == generated(model, ALL, LAWS["k_p"])


def test_logprobs_are_captured_too(model):
    from compiled_sampler.integrations.transformers.continuous_batching import generate_batch
    from tests.engines.tiny_models import SEEDS, cache_of, config_of, eagerly_paged

    def logprobs(is_graph: bool) -> torch.Tensor:
        cache = cache_of(use_cuda_graph=is_graph, return_logprobs=True)
        with eagerly_paged(model):
            outputs = generate_batch(model, PROMPTS, SEEDS, config_of(**LAWS["k_p"]), cache)
        return torch.tensor([value for output in outputs for value in output.logprobs])

    torch.testing.assert_close(logprobs(True), logprobs(False), rtol=0, atol=1e-5)
