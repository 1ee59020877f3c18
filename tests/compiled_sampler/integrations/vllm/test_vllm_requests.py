"""Parameters of vLLM as ours, the adapter's settings, and requests that cannot be drawn, on stand-ins.

test_vllm_contract.py holds the fields of the stand-ins to vLLM's.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from compiled_sampler import SamplingParams
from compiled_sampler.integrations.vllm.parameters import (
    MAPPED,
    OWN,
    SIZES,
    Settings,
    ending_token,
    sampler_params,
    seed_of,
    settings_of_text,
    unsupported,
)
from tests.engines.published_engine import isolated, put_module
from tests.engines.vllm_stand_in import DEFAULTS, Given, runner


def test_every_parameter_is_mapped_by_its_name():
    same = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "seed": -5, "logit_bias": {3: 1.5}, "min_tokens": 3}
    same |= {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.5}
    same |= {"allowed_token_ids": [1, 2, 3]}
    words = [[4], [5, 6]]
    given = Given(**same, top_k=-1, _bad_words_token_ids=words, _all_stop_token_ids={9, 7})
    assert sampler_params(given, "a", 0) == SamplingParams(**same, bad_words_token_ids=words, stop_token_ids=[7, 9])
    assert set(DEFAULTS) >= MAPPED


def test_extra_args_bring_what_vllm_has_no_field_for():
    own = {"dry_multiplier": 0.8, "dry_sequence_breakers": [5], "top_n_sigma": 1.5, "min_k": True}
    own["watermark_tokens"] = 3
    given = Given(seed=1, extra_args={**own, "kv_transfer_params": {"a": 1}})
    assert sampler_params(given, "a", 0) == SamplingParams(seed=1, **own)
    assert sampler_params(Given(seed=1, extra_args={"kv_transfer_params": {}}), "a", 0) == SamplingParams(seed=1)
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields - MAPPED - OWN == {"bad_words_token_ids", "stop_token_ids", "eos_token_id", "ignore_eos"}


def test_stop_tokens_are_the_engines_matter_without_min_tokens():
    assert sampler_params(Given(_all_stop_token_ids={1}), "a", 0).edits == ()
    assert sampler_params(Given(_all_stop_token_ids={1}, min_tokens=2), "a", 0).edits == ("min_tokens", "stops")
    assert sampler_params(Given(min_tokens=2), "a", 0).edits == ()


def test_a_request_without_a_seed_gets_one_of_its_id_and_the_salt():
    seeds = {sampler_params(Given(), request_id, salt).seed for request_id in ("a", "b") for salt in (0, 1)}
    assert len(seeds) == 4
    assert sampler_params(Given(), "a", 0).seed == seed_of("a", 0) == 140742745180244919


REFUSED = {
    "logprob_token_ids": {"logprob_token_ids": [3]},
    "watermarking": {"watermarking": True},
    "thinking_token_budget": {"thinking_token_budget": 0},
    "trace_decode_token_ids": {"trace_decode_token_ids": [3]},
    "brand_new": {"brand_new": 1},
    "seed": {"seed": 2**70},
    "repetition_penalty": {"repetition_penalty": 1e9},
    "logit_bias": {"logit_bias": {100: 1.0}},
    "biases": {"logit_bias": dict.fromkeys(range(SIZES.biases + 1), 1.0)},
    "allowed_token_ids": {"allowed_token_ids": [100]},
    "dry_sequence_breakers": {"extra_args": {"dry_sequence_breakers": [100], "dry_multiplier": 1.0}},
    "xtc_probability": {"extra_args": {"xtc_probability": 2.0}},
    "top_n_sigma": {"extra_args": {"top_n_sigma": "1"}},
    "min_k": {"extra_args": {"min_k": 1}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_sampler_does_not_have_is_named(name):
    assert name in str(unsupported(Given(**REFUSED[name]), 100))


@pytest.mark.parametrize(
    "given",
    [
        {"min_tokens": 2, "_all_stop_token_ids": {7, 100}},
        {"min_tokens": 2, "_all_stop_token_ids": {100}},  # from the model's generation config; nothing can draw it
        {"allowed_token_ids": [3, 100]},
        {"watermarking": False, "structured_outputs": object(), "max_tokens": 3, "logprobs": 5},
    ],
)
def test_what_it_has_is_not_refused(given):
    assert unsupported(Given(**given), 100) is None


def test_a_prompt_of_embeddings_is_refused_only_with_edits_that_read_its_tokens():
    reason = unsupported(Given(repetition_penalty=1.5), 100, has_tokens=False)
    assert reason == "the prompt must be of tokens for penalties, got embeddings; pass token ids"
    assert unsupported(Given(logit_bias={3: 1.0}), 100, has_tokens=False) is None


def test_extra_args_that_an_engine_cannot_serve_are_named():
    dry, watermark = (Given(extra_args={name: 1}) for name in ("dry_multiplier", "watermark_tokens"))
    for rule in ("rejection", "block"):
        assert f"under {rule}" in str(unsupported(watermark, 100, Settings(rule=rule)))
        assert unsupported(dry, 100, Settings(rule=rule)) is None
    assert unsupported(watermark, 100, Settings()) is None
    assert unsupported(Given(extra_args={"other": 1}), 100, Settings()) is None


def test_a_request_without_any_token_ends():
    assert ending_token(Given(_eos_token_id=5, _all_stop_token_ids={3, 5})) == 5
    assert ending_token(Given(_all_stop_token_ids={7, 3})) == 3
    assert ending_token(Given()) == 0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (Settings(), "1"),
        (Settings(rule="block"), "rule=block"),
        (Settings(warmup="off"), "warmup=off"),
        (Settings("stock", "rejection", "eager"), "on_unsupported=stock,rule=rejection,backend=eager"),
    ],
)
def test_settings_come_back_from_their_text(settings, text):
    assert settings.text == text
    assert settings_of_text(text) == settings
    assert settings_of_text("") is settings_of_text("0") is None


@pytest.mark.parametrize("text", ["yes", "rule=fast", "speed=1", "rule"])
def test_another_text_is_refused_with_the_choices(text):
    with pytest.raises(ValueError, match="must be"):
        settings_of_text(text)


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
def stand_in():
    """The modules of vLLM that the adapter imports."""
    with isolated(("vllm",), "compiled_sampler.integrations.vllm"):
        put_module("vllm.v1.outputs", {"SamplerOutput": SamplerOutput, "LogprobsTensors": LogprobsTensors})
        put_module("vllm.exceptions", {"VLLMValidationError": ValidationError})
        yield


def state_of(requests, num_drafts=0, prompt=(1, 2)):
    """A RunnerState with a batch of requests with prompts of two tokens; None makes the last one of embeddings."""
    from compiled_sampler.integrations.vllm.parameters import Settings
    from compiled_sampler.integrations.vllm.v1_sampler import RunnerState

    made = runner(num_drafts)
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
    vars(made.input_batch).update(generators={}, sampling_metadata=metadata, **fields)
    return RunnerState(made, Settings(backend="eager"))


GREEDY = {"temperature": 0.0, "seed": 1, "_eos_token_id": EOS}


@pytest.mark.parametrize("refused", [{"brand_new": 1}, {"repetition_penalty": 2.0}], ids=["unknown", "embeddings"])
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_request_that_no_admission_refused_ends_with_its_eos_and_the_others_go_on(refused, num_drafts, caplog):
    requests = {"a": Given(**GREEDY), "b": Given(**GREEDY, **refused)}
    state = state_of(requests, num_drafts, None if "repetition_penalty" in refused else (1, 2))
    drafts = SimpleNamespace(num_draft_tokens=[num_drafts] * 2, draft_token_ids=torch.tensor([3, V + 5, 3, 3]))
    logits = torch.zeros(2 * (num_drafts + 1), V)
    logits[:, 3] = 1.0
    for _ in range(2):
        made = state.draw(logits, drafts if num_drafts else None)
        wanted = [[3], [EOS]] if not num_drafts else [[3, 3, -1], [EOS, -1, -1]]
        assert made.sampled_token_ids.tolist() == wanted
        assert not made.logprobs_tensors.logprobs.isnan().any()
    assert caplog.text.count("request b ends without a token of its own") == 1
    assert state.counts == {"batches": 2, "stock_batches": 0}


def test_a_placeholder_in_a_prompt_ends_nothing():
    """Admission takes ids that the tokenizer has and the model's head has not; they met an error in the step."""
    state = state_of({"a": Given(**GREEDY, repetition_penalty=2.0)}, prompt=(V, 3))
    logits = torch.zeros(1, V)
    logits[0, 3], logits[0, 5] = 1.0, 0.75
    assert state.draw(logits, None).sampled_token_ids.tolist() == [[5]]


class Processor:
    """What checks the requests of an engine."""

    model_config = SimpleNamespace(get_vocab_size=lambda: V)


@pytest.mark.parametrize(
    ("params", "prompt", "message"),
    [
        (Given(repetition_penalty=2.0), None, "the prompt must be of tokens for penalties, got embeddings"),
        (Given(logit_bias={V: 1.0}), [1], f"logit_bias must be below vocab_size {V}, got {V}"),
        (Given(allowed_token_ids=[V]), [1], f"allowed_token_ids must have a token below vocab_size {V}"),
    ],
)
def test_admission_refuses_a_request_alone(params, prompt, message):
    from compiled_sampler.integrations.vllm import plugin
    from compiled_sampler.integrations.vllm.parameters import Settings

    processor = Processor()
    plugin._INSTALLED.processors[processor] = Settings()
    refused = SimpleNamespace(sampling_params=params, prompt_token_ids=prompt)
    with pytest.raises(ValidationError, match=message):
        plugin._checked_inputs(lambda _: refused)(processor)
    taken = Given(min_tokens=1, _all_stop_token_ids={V})
    taken = SimpleNamespace(sampling_params=taken, prompt_token_ids=[V, 1])
    assert plugin._checked_inputs(lambda _: taken)(processor) is taken


def test_each_engine_of_a_process_checks_requests_by_the_settings_it_was_made_with(monkeypatch):
    """A second engine's settings once decided about the requests of the first."""
    from compiled_sampler.integrations.vllm import plugin
    from compiled_sampler.integrations.vllm.parameters import Settings

    refusing = SimpleNamespace(
        sampling_params=Given(logprob_token_ids=[3]), prompt_token_ids=[1], drafts_are_checked=False
    )

    def check_drafts(_params, _config):
        refusing.drafts_are_checked = True

    validate = plugin._wider_drafts(check_drafts)

    def original(_):
        validate(refusing.sampling_params, None)
        return refusing

    made = plugin._checking_init(lambda _: None)
    checked, before, strict, stock = plugin._checked_inputs(original), Processor(), Processor(), Processor()
    for processor, settings in ((strict, Settings()), (stock, Settings("stock"))):
        monkeypatch.setattr(plugin._INSTALLED, "settings", settings)
        made(processor)
    with pytest.raises(ValidationError, match="logprob_token_ids"):
        checked(strict)
    assert not refusing.drafts_are_checked
    for processor in (stock, before):
        refusing.drafts_are_checked = False
        assert checked(processor) is refusing
        assert refusing.drafts_are_checked


def test_a_request_whose_tokens_the_host_does_not_know_is_drawn_by_vllm_where_it_shall():
    """With asynchronous scheduling, after a batch that vLLM drew; it would end otherwise."""
    from compiled_sampler.integrations.vllm.parameters import Settings

    state = state_of({"a": Given(**GREEDY, repetition_penalty=2.0)})
    state._settings = Settings("stock", backend="eager")
    state._runner.requests["a"].output_token_ids = [4, -1]
    assert state.draw(torch.zeros(1, V), None) is None
    assert state.counts["stock_batches"] == 1
