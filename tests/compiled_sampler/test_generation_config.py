"""Parameters from a GenerationConfig; transformers is not needed."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compiled_sampler import SamplingParams


def config(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


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
        {"eta_cutoff": 0.01},
        {"top_h": 0.4},
        {"num_beams": 4},
        {"no_repeat_ngram_size": 2},
        {"encoder_repetition_penalty": 1.2},
        {"encoder_no_repeat_ngram_size": 2},
        {"exponential_decay_length_penalty": (2, 1.1)},
        {"begin_suppress_tokens": [3]},
        {"forced_bos_token_id": 2},
        {"forced_eos_token_id": 1},
        {"remove_invalid_values": True},
        {"guidance_scale": 2},
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
