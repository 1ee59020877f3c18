"""Keywords that the functions do not have are refused with the way out, and signatures stay what they are."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiled_sampler import functional

FUNCTIONS = [getattr(functional, name) for name in functional.__all__]
OF_REQUEST = "a request of a Sampler has it: add_request(SamplingParams({}=...))"
OF_CALL = "a call of a Sampler has it: sample or verify(plan, ..., {}=...)"
ELSEWHERE = {
    **dict.fromkeys(["repetition_penalty", "logit_bias", "stop_token_ids", "typical_p", "extra_args"], OF_REQUEST),
    **dict.fromkeys(["token_bitmask", "edit_inputs", "logprobs", "consume_logits", "out"], OF_CALL),
    **dict.fromkeys(["edits", "history_len", "draft_cache_len"], "a Sampler has it: Sampler({}=...)"),
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_a_sampler_has_is_named_with_its_place(name: str, function: Callable[..., Any]) -> None:
    way_out = ELSEWHERE[name].format(name)
    wanted = re.escape(f"{function.__name__}() must get keywords of its own, got {name!r}; {way_out}")
    with pytest.raises(TypeError, match=wanted):
        function(**{name: 1})


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
def test_any_other_keyword_is_answered_with_those_that_there_are(function: Callable[..., Any]) -> None:
    names = ", ".join(sorted(inspect.signature(function).parameters))
    with pytest.raises(TypeError, match=re.escape(f"got 'top_q'; these are: {names}")):
        function(torch.zeros(1, 5), top_q=0.5)


def test_a_seed_is_told_from_seeds() -> None:
    with pytest.raises(TypeError, match=re.escape("got 'seed'; seeds=... has one a row")):
        functional.sample(torch.zeros(1, 5), seed=1, positions=0)  # type: ignore[call-arg]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
def test_every_keyword_of_its_own_passes(function: Callable[..., Any]) -> None:
    """Up to the first check of a value: a tensor is missed, no keyword."""
    with pytest.raises(TypeError, match=r"must be a (torch\.)?[Tt]ensor"):
        function(**dict.fromkeys(inspect.signature(function).parameters))
