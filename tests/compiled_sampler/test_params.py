"""Parameters and questions are checked when they are made: the rule, the value, the way out, what was meant."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from compiled_sampler import Logprobs, Sampler, SamplingParams, Verification
from compiled_sampler.functional.functions import run_of
from compiled_sampler.logprobs import LAWS
from compiled_sampler.params import MIN_TEMPERATURE
from compiled_sampler.scalars import check_choice

LEAST, NAN, INF = math.nextafter(0.0, 1.0), math.nan, math.inf
OUT_OF_RANGE = {
    ("temperature", "0 is greedy"): (-0.1, MIN_TEMPERATURE / 2, LEAST, INF, NAN, -1),
    ("top_k", "did you mean 0? 0 keeps every token"): (-1,),
    ("top_k", "pass 0 to switch it off, 0 keeps every token"): (-2,),
    ("top_p", "1.0 keeps every token"): (0.0, 1.0000001, NAN),
    ("min_p", "0.0 keeps every token"): (-1e-9, 1.5, NAN),
    ("seed", "modulo"): (2**64, -(2**63) - 1),
}
WRONG_TYPES = {
    "temperature": ("1", None, True, torch.tensor(0.7)),
    "top_k": (5.0, None, True, np.True_, np.float64(5.0)),
    "top_p": (None, np.True_),
    "min_p": ([0.1],),
    "seed": (1.0, False, "7", torch.tensor(7)),
}
ENDS = {
    "temperature": (0, MIN_TEMPERATURE, 1e30),
    "top_k": (2**40,),
    "top_p": (1e-300, 1),
    "min_p": (0, 1.0),
    "seed": (-(2**63), 2**64 - 1, None),
}


def each_of(table):
    """The values of a table one by one, each behind its key."""
    return [(key, value) for key, values in table.items() for value in values]


@pytest.mark.parametrize(("where", "value"), each_of(OUT_OF_RANGE))
def test_values_out_of_range_name_the_value_and_the_way_out(where, value):
    field, way_out = where
    with pytest.raises(ValueError, match=field) as error:
        SamplingParams(**{field: value})
    assert str(value) in str(error.value)
    assert way_out in str(error.value)


@pytest.mark.parametrize(("field", "value"), each_of(WRONG_TYPES))
def test_values_of_the_wrong_type_are_refused(field, value):
    with pytest.raises(TypeError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "stored"),
    [
        ("temperature", np.float32(0.7), 0.699999988079071),
        ("top_p", np.float32(0.9), 0.8999999761581421),
        ("min_p", np.float16(0.1), 0.0999755859375),
        ("temperature", np.int64(2), 2.0),
        ("top_p", Fraction(1, 2), 0.5),
        ("top_k", np.int32(5), 5),
        ("seed", np.uint64(2**64 - 1), 2**64 - 1),
        ("seed", np.int64(-(2**63)), -(2**63)),
    ],
)
def test_numbers_of_numpy_are_stored_as_the_python_numbers_that_they_are(field, value, stored):
    found = getattr(SamplingParams(**{field: value}), field)
    assert found == stored
    assert type(found) is type(stored)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.float32(MIN_TEMPERATURE), r"must be 0 or in .* got 9.99999974"),  # rounds to less
        (10**5000, "must fit a float, got a number beyond 1e308"),
    ],
    ids=["rounded", "no float"],
)
def test_the_stored_value_is_checked(value, message):
    with pytest.raises(ValueError, match=f"temperature {message}"):
        SamplingParams(temperature=value)


@pytest.mark.parametrize(("field", "value"), each_of(ENDS))
def test_the_ends_of_every_range_are_allowed(field, value):
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_params_and_questions_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_k = 5  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Logprobs().top = 3


WRONG_EDITS = {
    "repetition_penalty": (0.0, NAN, "1.5", True),
    "repetition_scope": ("prompt",),
    "frequency_penalty": (2.1,),
    "presence_penalty": (NAN,),
    "dry_multiplier": (-0.5,),
    "dry_base": (0.5, INF),
    "dry_allowed_length": (0, 51, 2.0),
    "dry_range": (-1, 2**31),
    "dry_sequence_breakers": ("\n", ["\n"]),
    "logit_bias": ({1: NAN}, {1: -1e39}, [1, 2], {-1: 1.0}),
    "allowed_token_ids": ((), "12"),
    "bad_words_token_ids": ([[]], [1], [{1, 2}]),
    "bad_words_scope": ("none",),
    "min_tokens": (1,),
    "stop_token_ids": ([True],),
    "eos_token_id": (-1,),
    "ignore_eos": (1,),
    "watermark_tokens": (9,),
    "top_n_sigma": (-1.0, INF, "1"),
    "min_k": (1,),
    "min_k_tau": (-1.0, INF, True),
    "p_less": (1,),
    "typical_p": (0.0, 1.5),
    "xtc_probability": (1.5, True),
    "xtc_threshold": (-0.1, NAN),
}


@pytest.mark.parametrize(("name", "value"), [*each_of(WRONG_EDITS), ("min_tokens", -1)])
def test_each_wrong_edit_alone_is_refused_by_name(name, value):
    stops = {"stop_token_ids": [1]} if (name, value) == ("min_tokens", -1) else {}  # which are needed
    with pytest.raises((TypeError, ValueError), match=name):
        SamplingParams(**{name: value}, **stops)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (SamplingParams(), "SamplingParams()"),
        (SamplingParams(seed=1), "SamplingParams(seed=1)"),
        (
            SamplingParams(temperature=0.5, logit_bias={7: -5.0}, ignore_eos=True),
            "SamplingParams(temperature=0.5, logit_bias=((7, -5.0),), ignore_eos=True)",
        ),
        (SamplingParams(allowed_token_ids=[3]), "SamplingParams(allowed_token_ids=(3,))"),
    ],
    ids=str,
)
def test_what_differs_from_the_defaults_is_shown_as_it_is_passed(params, text):
    assert repr(params) == text
    assert eval(text) == params


def test_a_request_for_a_vocabulary_keeps_what_a_user_asked_and_drops_what_nothing_can_draw():
    law, suppressed = {"temperature": 0.5, "seed": 1}, {3: -math.inf, 100: -math.inf}
    config = SamplingParams(stop_token_ids=[2, 100], eos_token_id=101, min_tokens=3, logit_bias=suppressed, **law)
    kept = SamplingParams(stop_token_ids=[2], min_tokens=3, logit_bias={3: -math.inf}, **law)
    assert config.for_vocab(100) == kept
    assert SamplingParams(stop_token_ids=[100], min_tokens=3, **law).for_vocab(100) == SamplingParams(**law)
    mistaken = SamplingParams(logit_bias={100: 1.0}, allowed_token_ids=[100], bad_words_token_ids=[[100]])
    assert mistaken.for_vocab(100) == mistaken


NO_QUESTIONS = {
    ("top", ValueError): (-1, 2**22, 2**70),
    ("top", TypeError): (1.0, True),
    ("of", ValueError): ("logits", None),
    ("rank", TypeError): (1,),
    ("entropy", TypeError): (None,),
    ("num_kept", TypeError): ("yes",),
    ("boundary", TypeError): (0,),
    ("token_ids", ValueError): ((), (3, -1)),
    ("token_ids", TypeError): ((3, 0.5), "12", 12, {3, 4}, {3: 1.0}),
}


@pytest.mark.parametrize(("where", "value"), each_of(NO_QUESTIONS))
def test_what_cannot_be_asked_for_is_refused_by_name(where, value):
    field, error = where
    with pytest.raises(error, match=f"^{field} "):
        Logprobs(**{field: value})


def test_equal_questions_are_one_key():
    asked = Logprobs(top=np.int64(3), token_ids=[1, np.int32(2)])
    assert asked == Logprobs(top=3, token_ids=(1, 2))
    assert hash(asked) == hash(Logprobs(top=3, token_ids=(1, 2)))
    assert (type(asked.top), [type(each) for each in asked.token_ids]) == (int, [int, int])
    others = {Logprobs(), asked, *(Logprobs(of=of, rank=True) for of in LAWS)}
    assert len(others) == 2 + len(LAWS)


def test_only_what_filters_decide_reads_them():
    assert not Logprobs(top=3, rank=True, entropy=True, token_ids=(1,)).reads_filters
    assert not Logprobs(of="processed").reads_filters
    assert all(each.reads_filters for each in (Logprobs(of="filtered"), Logprobs(num_kept=True)))
    assert Logprobs(boundary=True).reads_filters


CHOICES = ("match", "rejection", "block")


@pytest.mark.parametrize(
    ("value", "way_out"),
    [
        ("Block", "did you mean 'block'?"),
        ("fast", "the way out"),
        ("", "the way out"),
        (["match"], "the way out"),
    ],
)
def test_a_name_that_is_none_of_the_choices_gets_the_nearest_one(value, way_out):
    with pytest.raises(ValueError, match="rule must be one of") as error:
        check_choice("rule", value, CHOICES, "the way out")
    assert str(error.value) == f"rule must be one of {CHOICES}, got {value!r}; {way_out}"


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: Verification("rejection_sampling", 2), "rejection"),
        (lambda: Verification("rejection", 2, "probability"), "probabilities"),
        (lambda: Sampler(8, 1, "cpu", backend="graphs"), "graph"),
        (lambda: Sampler(8, 1, "cpu", top_p_base="topk"), "top_k"),
        (lambda: Sampler(8, 1, "cpu", backend="eager").plan([], mode="no_filters"), "no_filter"),
        (lambda: run_of("compile"), "compiled"),
        (lambda: Logprobs(of="process"), "processed"),
        (lambda: SamplingParams(repetition_scope="outputs"), "output"),
    ],
)
def test_what_was_probably_meant_is_named_everywhere(call, meant):
    with pytest.raises(ValueError, match=f"did you mean '{meant}'\\?"):
        call()
