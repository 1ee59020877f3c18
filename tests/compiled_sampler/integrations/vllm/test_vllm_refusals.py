"""A request that cannot be drawn ends alone: at admission, or in a step where something else admitted it."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.engines.published_engine import isolated, put_module
from tests.engines.vllm_stand_in import Given, runner

V, EOS = 40, 7


class SamplerOutput(NamedTuple):
    """vLLM's, as far as it is made."""

    sampled_token_ids: torch.Tensor
    logprobs_tensors: Any


class LogprobsTensors(NamedTuple):
    """vLLM's."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor


class ValidationError(ValueError):
    """vLLM's, for which a server answers 400."""


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    """The modules of vLLM that the adapter imports."""
    with isolated(("vllm",), "compiled_sampler.integrations.vllm"):
        put_module("vllm.v1.outputs", {"SamplerOutput": SamplerOutput, "LogprobsTensors": LogprobsTensors})
        put_module("vllm.exceptions", {"VLLMValidationError": ValidationError})
        yield


def state_of(requests: dict[str, Given], num_drafts: int = 0, prompt: tuple[int, ...] | None = (1, 2)) -> Any:
    """A RunnerState with a batch of requests with prompts of two tokens; None makes the last one of embeddings."""
    from compiled_sampler.integrations.vllm.settings import Settings
    from compiled_sampler.integrations.vllm.v1_sampler import RunnerState

    drafts = {"rejection_sample_method": "standard", "num_speculative_tokens": num_drafts}
    made = runner(speculative_config=SimpleNamespace(**drafts) if num_drafts else None)
    made.vllm_config.model_config.seed, made.vllm_config.model_config.max_model_len = 3, 16
    made.max_num_reqs = 4
    made.requests = {
        name: SimpleNamespace(
            req_id=name, sampling_params=params, prompt_token_ids=[1, 2], num_prompt_tokens=2, output_token_ids=[]
        )
        for name, params in requests.items()
    }
    made.requests[[*requests][-1]].prompt_token_ids = None if prompt is None else [*prompt]
    counts = {name: np.full(len(requests), 2) for name in ("num_tokens_no_spec", "num_prompt_tokens")}
    fields = {"req_ids": [*requests], "num_reqs": len(requests), **counts}
    metadata = SimpleNamespace(max_num_logprobs=2)
    vars(made.input_batch).update(vocab_size=V, generators={}, sampling_metadata=metadata, **fields)
    return RunnerState(made, Settings(backend="eager"))


GREEDY = {"temperature": 0.0, "seed": 1, "_eos_token_id": EOS}


@pytest.mark.parametrize("refused", [{"brand_new": 1}, {"repetition_penalty": 2.0}], ids=["unknown", "embeddings"])
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_request_that_no_admission_refused_ends_with_its_eos_and_the_others_go_on(
    refused: dict[str, Any], num_drafts: int, caplog: pytest.LogCaptureFixture
) -> None:
    requests = {"a": Given(**GREEDY), "b": Given(**GREEDY, **refused)}
    prompt = None if "repetition_penalty" in refused else (1, 2)
    state = state_of(requests, num_drafts, prompt)
    counts = [num_drafts, num_drafts]
    drafts = SimpleNamespace(num_draft_tokens=counts, draft_token_ids=torch.tensor([3, V + 5, 3, 3]))
    logits = torch.zeros(2 * (num_drafts + 1), V)
    logits[:, 3] = 1.0
    for _ in range(2):
        made = state.draw(logits, drafts if num_drafts else None)
        wanted = [[3], [EOS]] if not num_drafts else [[3, 3, -1], [EOS, -1, -1]]
        assert made.sampled_token_ids.tolist() == wanted
        assert not made.logprobs_tensors.logprobs.isnan().any()
    assert caplog.text.count("request b ends without a token of its own") == 1
    assert state.counts == {"batches": 2, "stock_batches": 0}


def test_a_placeholder_in_a_prompt_ends_nothing() -> None:
    """Admission takes ids that the tokenizer has and the model's head has not; they met an error in the step."""
    state = state_of({"a": Given(**GREEDY, repetition_penalty=2.0)}, prompt=(V, 3))
    logits = torch.zeros(1, V)
    logits[0, 3], logits[0, 5] = 1.0, 0.75
    assert state.draw(logits, None).sampled_token_ids.tolist() == [[5]]


@pytest.mark.parametrize(
    ("params", "prompt", "message"),
    [
        (Given(repetition_penalty=2.0), None, "the prompt must be of tokens for penalties, got embeddings"),
        (Given(logit_bias={V: 1.0}), [1], f"logit_bias must be below vocab_size {V}, got {V}"),
        (Given(allowed_token_ids=[V]), [1], f"allowed_token_ids must have a token below vocab_size {V}"),
        (Given(min_tokens=1, _all_stop_token_ids={V}), [V, 1], None),
    ],
)
def test_admission_refuses_a_request_alone(params: Given, prompt: list[int] | None, message: str | None) -> None:
    from compiled_sampler.integrations.vllm import plugin
    from compiled_sampler.integrations.vllm.settings import Settings

    plugin._INSTALLED.settings = Settings()
    request = SimpleNamespace(sampling_params=params, prompt_token_ids=prompt)
    checked = plugin._checked_inputs(lambda _: request)
    processor = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: V))
    if message is None:
        assert checked(processor) is request
        return
    with pytest.raises(ValidationError, match=message):
        checked(processor)


def test_a_request_whose_tokens_the_host_does_not_know_is_drawn_by_vllm_where_it_shall() -> None:
    """With asynchronous scheduling, after a batch that vLLM drew; it would end otherwise."""
    from compiled_sampler.integrations.vllm.settings import Settings

    state = state_of({"a": Given(**GREEDY, repetition_penalty=2.0)})
    state._settings = Settings("stock", backend="eager")
    state._runner.requests["a"].output_token_ids = [4, -1]
    assert state.draw(torch.zeros(1, V), None) is None
    assert state.counts["stock_batches"] == 1
