"""Names that callers pass: what was probably meant is in the message."""

import pytest

from compiled_sampler import Logprobs, Sampler, SamplingParams, Verification
from compiled_sampler.functional.arguments import run_of
from compiled_sampler.scalars import check_choice

CHOICES = ("match", "rejection", "block")


@pytest.mark.parametrize(
    ("value", "way_out"),
    [
        ("rejection_sampling", "did you mean 'rejection'?"),
        ("Block", "did you mean 'block'?"),
        ("fast", "the way out"),
        ("", "the way out"),
        (3, "the way out"),
        (["match"], "the way out"),
    ],
)
def test_a_name_that_is_none_of_the_choices_gets_the_nearest_one(value, way_out):
    with pytest.raises(ValueError, match="rule must be one of") as error:
        check_choice("rule", value, CHOICES, "the way out")
    assert str(error.value) == f"rule must be one of {CHOICES}, got {value!r}; {way_out}"


def test_each_choice_is_one():
    for name in CHOICES:
        check_choice("rule", name, CHOICES, "the way out")


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
