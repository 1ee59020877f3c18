"""Every backend gives the bits that ``golden.json`` was recorded with."""

import json

import pytest

from compiled_sampler import STREAM_VERSION
from tests.golden import DATA, LAWS, Call, calls, hash_of, sizes
from tests.tiers import tiers

WANTED = json.loads(DATA.read_text())
SIZES = tiers([(1009, "float32"), (64, "bfloat16")], sizes())
COMPILED = [
    *(Call("sample", 1009, "float32", law=law) for law in LAWS),
    Call("sample", 1009, "float32", edit="all", logprobs="filtered"),
    Call("sample", 1009, "float32", edit="watermark"),
    Call("own draft", 1009, "float32"),
    Call("probs", 1009, "float32"),
    Call("verify", 1009, "float32", rule="match"),
    Call("verify", 1009, "float32", rule="rejection", form="probs"),
    Call("verify", 1009, "float32", rule="block", form="logits"),
]
"""Each mode, each entry point, and all edits and logprobs at once."""


def differing(compared: list[Call], backend: str) -> list[str]:
    return [call.name for call in compared if hash_of(call.results(backend)) != WANTED[call.name]]


@pytest.mark.parametrize(("vocab_size", "dtype"), SIZES)
def test_eager_bits_are_those_that_were_recorded(vocab_size, dtype):
    assert not differing(calls(vocab_size, dtype), "eager")


def test_the_stream_and_the_cases_are_those_that_were_recorded():
    assert STREAM_VERSION == 1
    assert sorted(WANTED) == sorted(call.name for size in sizes() for call in calls(*size))


def test_the_definition_gives_the_recorded_bits():
    of_definition = [call for call in calls(64, "bfloat16") if not call.kind.startswith("functional")]
    assert not differing(of_definition, "reference")


@pytest.mark.full  # the first tier draws what the self-check stores with compiled stages
@pytest.mark.parametrize("call", COMPILED, ids=lambda call: call.name)
def test_compiled_bits_are_those_that_were_recorded(call):
    assert not differing([call], "compiled")
