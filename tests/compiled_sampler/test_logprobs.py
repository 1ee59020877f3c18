"""What may be asked for, checked when it is asked."""

import dataclasses

import numpy as np
import pytest

from compiled_sampler.logprobs import LAWS, LogprobOutputs, Logprobs, check_token_ids


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("top", -1, ValueError),
        ("top", 2**22, ValueError),
        ("top", 2**70, ValueError),
        ("top", 1.0, TypeError),
        ("top", True, TypeError),
        ("of", "logits", ValueError),
        ("of", None, ValueError),
        ("rank", 1, TypeError),
        ("entropy", None, TypeError),
        ("num_kept", "yes", TypeError),
        ("boundary", 0, TypeError),
        ("token_ids", (), ValueError),
        ("token_ids", (3, -1), ValueError),
        ("token_ids", (3, 0.5), TypeError),
        ("token_ids", "12", TypeError),
        ("token_ids", 12, TypeError),
        ("token_ids", {3, 4}, TypeError),
        ("token_ids", {3: 1.0}, TypeError),
    ],
)
def test_what_cannot_be_asked_for_is_refused_by_name(field, value, error):
    with pytest.raises(error, match=f"^{field} "):
        Logprobs(**{field: value})


def test_equal_questions_are_one_key():
    asked = Logprobs(top=np.int64(3), token_ids=[1, np.int32(2)])
    assert asked == Logprobs(top=3, token_ids=(1, 2))
    assert hash(asked) == hash(Logprobs(top=3, token_ids=(1, 2)))
    assert (type(asked.top), [type(each) for each in asked.token_ids]) == (int, [int, int])
    others = {Logprobs(), asked, *(Logprobs(of=of, rank=True) for of in LAWS)}
    assert len(others) == 2 + len(LAWS)


def test_a_question_is_not_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Logprobs().top = 3


def test_only_what_filters_decide_reads_them():
    assert not Logprobs(top=3, rank=True, entropy=True, token_ids=(1,)).reads_filters
    assert not Logprobs(of="processed").reads_filters
    assert all(each.reads_filters for each in (Logprobs(of="filtered"), Logprobs(num_kept=True)))
    assert Logprobs(boundary=True).reads_filters


def test_ids_beyond_the_vocabulary_are_refused():
    check_token_ids(Logprobs(token_ids=(0, 9)), 10)
    check_token_ids(Logprobs(), 10)
    with pytest.raises(ValueError, match=r"token_ids must be in \[0, 10\), got 10"):
        check_token_ids(Logprobs(token_ids=(0, 10)), 10)


def test_every_flag_has_its_result():
    asked = {field.name for field in dataclasses.fields(Logprobs)} - {"of", "token_ids"}
    assert asked <= set(LogprobOutputs._fields)
