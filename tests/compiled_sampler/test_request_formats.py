"""Parameters from a GenerationConfig, without transformers, and from the body of a request."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compiled_sampler import SamplingParams

config = SimpleNamespace


def test_a_config_without_do_sample_is_greedy() -> None:
    for fields in ({}, {"do_sample": False, "temperature": 0.7, "top_p": 0.5}, {"do_sample": None, "typical_p": 0.3}):
        params = SamplingParams.from_generation_config(config(**fields), seed=3)
        assert (params.temperature, params.top_p, params.seed) == (0.0, 1.0, 3)


def test_fields_that_nobody_set_have_the_defaults_of_generate() -> None:
    params = SamplingParams.from_generation_config(config(do_sample=True, temperature=None))
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 50, 1.0, 0.0)


def test_every_field_of_a_config_that_the_sampler_has_is_taken() -> None:
    fields: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "bad_words_ids": [[1], [4, 5], [2]],
        "eos_token_id": [2, 3],
        "min_new_tokens": 4,
        "suppress_tokens": [7, 8],
        "sequence_bias": [[[8], 2.0], [[9], 1.5]],
        "renormalize_logits": True,
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
    }
    assert SamplingParams.from_generation_config(config(**fields), seed=5) == SamplingParams(
        temperature=0.7,
        top_p=0.9,
        min_p=0.1,
        seed=5,
        repetition_penalty=1.2,
        bad_words_token_ids=[[1], [4, 5]],  # a word that is an eos token is none
        bad_words_scope="all",
        min_tokens=4,
        stop_token_ids=[2, 3],
        logit_bias={7: -math.inf, 8: -math.inf, 9: 1.5},
    )


def test_typical_p_of_a_config_stands_without_filters_before_it() -> None:
    fields = {"do_sample": True, "top_k": 0, "typical_p": 0.4}
    assert SamplingParams.from_generation_config(config(**fields)).typical_p == 0.4
    for name, value in (("top_k", None), ("top_k", 5), ("top_p", 0.5), ("min_p", 0.1)):
        with pytest.raises(ValueError, match=r"typical_p must be 1 beside top_k, top_p and min_p, got 0\.4; "):
            SamplingParams.from_generation_config(config(**{**fields, name: value}))


def test_what_is_no_config_is_refused() -> None:
    for given in (None, 5, [], {"do_sample"}, "generation_config.json", Path("generation_config.json")):
        with pytest.raises(TypeError, match=r"^generation_config must have the fields of a GenerationConfig, got "):
            SamplingParams.from_generation_config(given)


def test_min_length_counts_the_prompt() -> None:
    given = config(min_length=10, eos_token_id=2)
    assert SamplingParams.from_generation_config(given, prompt_len=4).min_tokens == 6
    assert SamplingParams.from_generation_config(given, prompt_len=40).min_tokens == 0
    assert SamplingParams.from_generation_config(config(min_length=10)).min_tokens == 0
    with pytest.raises(ValueError, match="min_length must come with prompt_len"):
        SamplingParams.from_generation_config(given)


@pytest.mark.parametrize(
    "fields",
    [
        {"typical_p": 0.2},
        {"epsilon_cutoff": 0.01},
        {"num_beams": 4},
        {"no_repeat_ngram_size": 2},
        {"begin_suppress_tokens": [3]},
        {"forced_eos_token_id": 1},
        {"remove_invalid_values": True},
        {"sequence_bias": {(1, 2): 1.0}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_field_of_a_config_that_the_sampler_does_not_have_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(fields))} must be .*got .*; "):
        SamplingParams.from_generation_config(config(do_sample=True, **fields))


@pytest.mark.parametrize("do_sample", [False, True])
def test_what_one_request_without_text_cannot_honour_is_refused_in_a_config(do_sample: bool) -> None:
    for given, message in (
        ({"stop_strings": ["END"]}, r"^stop_strings must be None here, got \['END'\]; a sampler sees no text"),
        ({"stop_strings": "END"}, "^stop_strings must be None here, got 'END'; "),
        ({"num_return_sequences": 3}, "^num_return_sequences must be 1 here, got 3; add a request for each sequence"),
    ):
        with pytest.raises(ValueError, match=message):
            SamplingParams.from_generation_config(config(do_sample=do_sample, **given))
    neutral = config(do_sample=do_sample, stop_strings=None, num_return_sequences=1)
    assert SamplingParams.from_generation_config(neutral) == SamplingParams.from_generation_config(
        config(do_sample=do_sample, stop_strings=[], num_return_sequences=None)
    )


def test_a_field_that_generate_does_not_read_is_refused() -> None:
    """In a mapping each; of an object, as of a model's own configuration, those that a request has."""
    for name, value in (
        ("frequency_penalty", 1.0),
        ("logit_bias", {1: 2.0}),
        ("stop_token_ids", [3]),
        ("dry_base", 2.0),
        ("min_k", True),
    ):
        for given in ({name: value}, config(**{name: value})):
            with pytest.raises(ValueError, match=f"^{name} must be left out, got .*; generate does not read it; "):
                SamplingParams.from_generation_config(given)
    with pytest.raises(ValueError, match=r"^chat_format must be left out, got 'raw'; generate does not read it"):
        SamplingParams.from_generation_config({"chat_format": "raw", "_from_model_config": True})
    greedy = SamplingParams.from_generation_config({"_from_model_config": True, "max_length": 20, "logit_bias": None})
    assert greedy == SamplingParams.from_generation_config(config(chat_format="raw"))


def test_minus_1_switches_off_in_a_body() -> None:
    params = SamplingParams.from_openai({"seed": -1, "top_k": -1, "top_n_sigma": -1})
    assert params == SamplingParams()
    assert SamplingParams(seed=-1).seed == -1


def test_fields_of_other_names_say_which() -> None:
    for name, value, message in (
        ("guided_regex", "a*", "token_bitmask"),
        ("json_schema", "{}", "token_bitmask"),
        ("sampling_seed", 3, "it is seed here"),
        ("repeat_penalty", 1.1, "repetition_penalty"),
        ("min_new_tokens", 4, "min_tokens"),
        ("logits_processors", ["f"], "Sampler"),
        ("repetition_detection", {"n": 3}, "engine"),
    ):
        with pytest.raises(ValueError, match=f"^{name} must be .*; .*{message}"):
            SamplingParams.from_openai({name: value})
    assert SamplingParams.from_openai({"detokenize": False, "repeat_penalty": 1}) == SamplingParams()


def test_a_body_whose_tokens_a_grammar_rules_is_refused() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for given in (
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"function_call": {"name": "f"}},
        {"tools": [tool, {"type": "function", "function": {"name": "g", "strict": True}}]},
        {"tools": [{"type": "function", "name": "g", "strict": True}]},
    ):
        with pytest.raises(ValueError, match=r" must be .* here, got .*; .*pass a grammar's masks as token_bitmask"):
            SamplingParams.from_openai(given)
    for choice in ("none", "auto", None):
        assert SamplingParams.from_openai({"tools": [tool], "tool_choice": choice}) == SamplingParams()
    assert SamplingParams.from_openai({"tools": None, "function_call": "auto"}) == SamplingParams()


def test_a_request_body_is_taken_with_the_further_fields_of_vllm() -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 20,
        "logprobs": True,
        "stream": False,
        "temperature": 0.3,
        "top_p": 0.8,
        "seed": 11,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": {"50": -100, "60": 3},
        "n": 1,
        "stop": None,
        "response_format": {"type": "text"},
        "top_k": -1,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "min_tokens": 3,
        "stop_token_ids": [9],
        "top_n_sigma": 1.5,
        "vllm_xargs": {"xtc_probability": 0.5, "xtc_threshold": 0.2, "p_less": True, "min_k": True},
        "min_k_tau": 2.5,
    }
    assert SamplingParams.from_openai(body, eos_token_id=2) == SamplingParams(
        temperature=0.3,
        top_p=0.8,
        min_p=0.05,
        seed=11,
        repetition_penalty=1.1,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={50: -100, 60: 3},
        min_tokens=3,
        stop_token_ids=[9],
        eos_token_id=2,
        top_n_sigma=1.5,
        xtc_probability=0.5,
        xtc_threshold=0.2,
        p_less=True,
        min_k=True,
        min_k_tau=2.5,
    )
    assert SamplingParams.from_openai({}) == SamplingParams()
    assert SamplingParams.from_openai({"stop": [4, 5], "top_k": 7}) == SamplingParams(stop_token_ids=[4, 5], top_k=7)


def test_every_parameter_but_the_eos_token_of_the_model_is_a_field_of_a_body() -> None:
    given: dict[str, Any] = {
        **{each.name: each.default for each in dataclasses.fields(SamplingParams) if each.name != "eos_token_id"},
        "repetition_scope": "output",
        "bad_words_token_ids": [[4], [5, 6]],
        "bad_words_scope": "all",
        "watermark_tokens": 3,
        "extra_args": {"MyEdit": {"bias": 2.0}},
        "seed": 7,
    }
    assert SamplingParams.from_openai(given) == SamplingParams(**given)
    assert SamplingParams.from_openai({"vllm_xargs": given}, eos_token_id=2) == SamplingParams(**given, eos_token_id=2)


def test_what_asks_for_nothing_is_taken() -> None:
    """The defaults of a request body of vLLM that are not None, as its clients send them."""
    no = "ignore_eos use_beam_search watermarking logprobs stream echo include_stop_str_in_output return_token_offsets"
    no += " continue_final_message add_special_tokens"
    yes = "include_reasoning parallel_tool_calls skip_special_tokens spaces_between_special_tokens"
    yes += " add_generation_prompt return_mm_kwargs"
    body = {
        **dict.fromkeys(no.split(), False),
        **dict.fromkeys(yes.split(), True),
        **dict.fromkeys(("structured_outputs", "repetition_detection"), None),
        **dict.fromkeys(("min_tokens", "top_logprobs", "priority", "routed_experts_prompt_start", "top_k"), 0),
        "n": 1,
        "length_penalty": 1.0,
        "thinking_token_budget": -1,
        "tool_choice": "none",
        "temperature": 1.0,
        "top_p": 1.0,
        "min_p": 0.0,
    }
    assert SamplingParams.from_openai(body) == SamplingParams()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"stop": "\n"}, "stop must be token ids"),
        ({"stop": [3, "END"]}, "stop must be token ids"),
        ({"n": 2}, "n must be 1 here, got 2"),
        ({"best_of": 3}, "best_of must be 1 here, got 3"),
        ({"response_format": {"type": "json_object"}}, "response_format must be"),
        ({"typical_p": 0}, "typical_p must be in"),
        ({"top_n_sigma": -0.5}, "top_n_sigma must be finite and >= 0"),
        ({"top_k": 3, "vllm_xargs": {"top_k": 4}}, "top_k must be given once"),
        ({"vllm_xargs": {"other": 4}}, "other must be left out, got 4"),
        ({"temperature": -1}, "temperature must be 0 or in"),
        ({"use_beam_search": True}, "use_beam_search must be False here, got True; the sampler draws"),
        ({"length_penalty": 0.8}, "length_penalty must be 1 here, got 0.8"),
        ({"bad_words": ["x"]}, r"bad_words must be None here, got \['x'\]; .* sees no text: bad_words_token_ids"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs must be None here, .*; .* token_bitmask"),
        ({"eos_token_id": 2}, "eos_token_id must be None here, got 2; it is the model's: from_openai"),
    ],
)
def test_what_a_body_asks_for_and_a_sampler_does_not_have_is_refused_by_name(
    body: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams.from_openai(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"stop": 5.5}, r"^stop must be a sequence of ints, got 5\.5; "),
        ({"stop": [5.5]}, r"^stop must be token ids, got \[5\.5\]; "),
        ({"stop": True}, "^stop must be token ids, got True; "),
        ({"stop_token_ids": 5}, r"^stop_token_ids must be a sequence of ints, got 5; \[id, ...\]"),
        ({"bad_words_token_ids": 5}, "^bad_words_token_ids must be a sequence of sequences of ints, got 5; "),
        ({"extra_args": ["MyEdit"]}, "^extra_args must map each name"),
        ('{"n": 1}', "body must be a mapping"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(body: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        SamplingParams.from_openai(body)
