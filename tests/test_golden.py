"""Every backend gives the bits that ``golden.json`` was recorded with."""

import json

import pytest

from compiled_sampler import STREAM_VERSION
from tests.golden import DATA, Call, calls, hash_of, sizes

WANTED = json.loads(DATA.read_text())
QUICK = [(1009, "float32"), (64, "bfloat16")]
SIZES = [pytest.param(*size, marks=[] if size in QUICK else pytest.mark.full) for size in sizes()]
COMPILED = [
    Call("sample", 1009, "float32"),
    Call("sample", 1009, "float32", edit="all", logprobs="filtered"),
    Call("verify", 1009, "float32", rule="block", form="logits"),
]
"""One of each entry point, for what compiles in seconds."""


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


@pytest.mark.parametrize("call", COMPILED, ids=lambda call: call.name)
def test_compiled_bits_are_those_that_were_recorded(call):
    assert not differing([call], "compiled")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["sample", "own draft", "probs", "edited", "verify"])
def test_all_compiled_bits_are_those_that_were_recorded(kind):
    """Each law, form of drafts, edit and logprob, but not two of these at once."""
    compared = [call for call in calls(1009, "float32") if call.kind == kind]
    assert not differing([call for call in compared if _is_single(call)], "compiled")


def _is_single(call: Call) -> bool:
    return [call.law == "full", call.edit == "none", not call.logprobs].count(False) < 2
