"""What a caller passes wrongly raises before anything runs: the rule, the value and the way out."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from compiled_sampler import functional
from compiled_sampler.functional import probs, sample, verify, verify_from_probs

R, V = 3, 10
LOGITS, SEEDS = torch.zeros(R, V), torch.arange(R)
DRAFTS, TARGET = torch.zeros(R, 1, dtype=torch.int64), torch.zeros(2 * R, V)
OF_VERIFY = {"logits": TARGET, "draft_token_ids": DRAFTS, "seeds": SEEDS, "positions": 0, "backend": "eager"}

ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"temperature": -1.0}, ValueError, r"temperature must be 0 or in .*, got -1.0; 0 is greedy"),
    ({"temperature": True}, TypeError, r"temperature must be a number, got True"),
    ({"temperature": [1.0] * R}, TypeError, r"temperature must be a number, got \[1.0"),
    ({"temperature": np.ones(R)}, TypeError, r"temperature must be a number, got array"),
    ({"temperature": torch.ones(R).half()}, TypeError, r"temperature must be torch.float32 or torch.float64"),
    ({"temperature": torch.ones(R, 1)}, ValueError, r"temperature must be \[3\], one a row, got \[3, 1\]; a Python"),
    ({"temperature": torch.tensor(1.0)}, ValueError, r"temperature must be \[3\], one a row, got \[\]"),
    ({"temperature": torch.ones(R, device="meta")}, ValueError, r"temperature must be on cpu, got meta"),
    ({"top_k": -1}, ValueError, r"top_k must be >= 0, got -1"),
    ({"top_k": 2.0}, TypeError, r"top_k must be an int, got 2.0"),
    ({"top_k": torch.ones(R)}, TypeError, r"top_k must be torch.int64 or torch.int32, got torch.float32"),
    ({"top_p": 0.0}, ValueError, r"top_p must be in \(0, 1\], got 0.0"),
    ({"top_p": torch.ones(R + 1)}, ValueError, r"top_p must be \[3\], one a row, got \[4\]"),
    ({"min_p": 1.5}, ValueError, r"min_p must be in \[0, 1\], got 1.5"),
    ({"mode": "fast"}, ValueError, r"mode must be one of \('greedy', "),
    ({"mode": 3}, TypeError, r"mode must be the name of a mode, got 3"),
    ({"mode": "greedy"}, ValueError, r"mode 'greedy' must cover the parameters, but temperature 1.0 draws"),
    ({"vocab_size": V + 1}, ValueError, r"must be in \[1, 10\] for logits \[3, 10\], got 11; None takes all"),
    ({"vocab_size": 0}, ValueError, r"vocab_size must be in \[1, 10\]"),
    ({"vocab_size": 2.0}, TypeError, r"vocab_size must be an int, got 2.0"),
    ({"top_p_base": "row"}, ValueError, r"top_p_base must be one of \('top_k', 'all'\), got 'row'"),
    ({"backend": "graph"}, ValueError, r"backend must be one of .*, got 'graph'; to replay a graph, capture"),
    ({"logits": LOGITS.double()}, TypeError, r"logits must be torch.float32 or .*, got torch.float64"),
    ({"logits": LOGITS[0]}, ValueError, r"logits must be \[R, >= V\], got \[10\]; unsqueeze"),
    ({"logits": LOGITS.t()[:R]}, ValueError, r"logits must have column stride 1, got strides"),
    ({"logits": LOGITS.tolist()}, TypeError, r"logits must be a torch.Tensor, got list"),
]
NOISE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"seeds": 1}, ValueError, r"seeds must be a tensor \[3\], one a row, got the number 1; rows of one seed"),
    ({"seeds": SEEDS.to(torch.int32)}, TypeError, r"seeds must be torch.int64, got torch.int32"),
    ({"seeds": None}, TypeError, r"seeds must be an int, got None; pass an int64 tensor"),
    ({"logits": LOGITS[:1], "seeds": 2**64}, ValueError, r"seeds must be in \[-2\*\*63, 2\*\*64\), got 18446744073"),
    ({"positions": -1}, ValueError, r"positions must be in \[0, 2\*\*63\), got -1"),
    ({"positions": 2**63}, ValueError, r"positions must be in \[0, 2\*\*63\), got 9223372036854775808"),
    ({"positions": 1.0}, TypeError, r"positions must be an int, got 1.0"),
    ({"positions": torch.zeros(2, dtype=torch.int64)}, ValueError, r"positions must be \[3\], one a row, got \[2\]"),
]
DRAFTED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"draft_token_ids": DRAFTS[:, 0]}, ValueError, r"draft_token_ids must be \[N, K\], K at most 64, got \[3\]"),
    ({"draft_token_ids": DRAFTS.expand(3, 65)}, ValueError, r"draft_token_ids must be \[N, K\], K at most 64"),
    ({"draft_token_ids": DRAFTS.float()}, TypeError, r"draft_token_ids must be torch.int64 or torch.int32"),
    ({"logits": TARGET[:5]}, ValueError, r"must be \[6, >= V\], 2 rows a request, got \[5, 10\]; num_drafts says"),
    ({"num_drafts": [1, 1, 1]}, TypeError, r"num_drafts must be a torch.Tensor, got list"),
    ({"num_drafts": SEEDS[:2]}, ValueError, r"num_drafts must be \[3\], one a row, got \[2\]"),
    ({"num_drafts": SEEDS, "logits": TARGET[:0]}, ValueError, r"logits must have a row at least for 3 requests"),
    ({"rule": "strict"}, ValueError, r"rule must be one of .*, got 'strict'; it is called 'match' here"),
    ({"draft_probs": TARGET[:3]}, ValueError, r"rule 'match' never looks at .*, got draft_probs; leave it out"),
    ({"rule": "block", "draft_probs": TARGET[:2]}, ValueError, r"draft_probs must be \[3, >= 10\], one row a draft,"),
    ({"rule": "block", "draft_probs": TARGET[:3].half()}, TypeError, r"draft_probs must be torch.float32, got"),
    ({"rule": "block", "draft_probs": torch.zeros(V, 3).t()}, ValueError, r"draft_probs must have column stride 1"),
    ({"rule": "block", **dict.fromkeys(("draft_probs", "draft_logits"), TARGET[:3])}, ValueError, "must not both be"),
    ({"rule": "block", "draft_logits": TARGET[:3].double()}, TypeError, r"draft_logits must be torch.float32, got"),
]


@pytest.mark.parametrize(("changed", "error", "message"), ARGUMENTS + NOISE)
def test_a_wrong_argument_of_sample_raises(changed, error, message):
    with pytest.raises(error, match=message):
        sample(**{"logits": LOGITS, "seeds": SEEDS, "positions": 0, "backend": "eager", **changed})


@pytest.mark.parametrize(("changed", "error", "message"), ARGUMENTS)
def test_a_wrong_argument_of_probs_and_of_verify_raises(changed, error, message):
    with pytest.raises(error, match=message):
        probs(**{"logits": LOGITS, "backend": "eager", **changed})
    if "logits" not in changed:
        with pytest.raises(error, match=message.replace(r"logits \[3", r"logits \[6")):
            verify(**{**OF_VERIFY, **changed})


@pytest.mark.parametrize(("changed", "error", "message"), DRAFTED)
def test_wrong_drafts_raise(changed, error, message):
    with pytest.raises(error, match=message):
        verify(**{**OF_VERIFY, **changed})


def test_wrong_probabilities_raise():
    with pytest.raises(TypeError, match=r"target_probs must be torch.float32, got torch.bfloat16; convert"):
        verify_from_probs(TARGET.bfloat16(), DRAFTS, seeds=SEEDS, positions=0, backend="eager")
    with pytest.raises(ValueError, match=r"target_probs must be \[6, >= V\], 2 rows a request, got \[4, 10\]"):
        verify_from_probs(TARGET[:4], DRAFTS, seeds=SEEDS, positions=0, backend="eager")


FUNCTIONS = [getattr(functional, name) for name in functional.__all__ if name != "warmup"]  # that take rows
OF_REQUEST = "a request of a Sampler has it: add_request(SamplingParams({}=...))"
OF_CALL = "a call of a Sampler has it: sample or verify(plan, ..., {}=...)"
ELSEWHERE = {
    **dict.fromkeys(["repetition_penalty", "logit_bias", "stop_token_ids", "typical_p", "extra_args"], OF_REQUEST),
    **dict.fromkeys(["token_bitmask", "edit_inputs", "logprobs", "consume_logits", "out"], OF_CALL),
    **dict.fromkeys(["edits", "history_len", "draft_cache_len"], "a Sampler has it: Sampler({}=...)"),
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
def test_what_a_sampler_has_is_named_with_its_place(function: Callable[..., Any]) -> None:
    for name, place in ELSEWHERE.items():
        wanted = f"{function.__name__}() must get keywords of its own, got {name!r}; {place.format(name)}"
        with pytest.raises(TypeError, match=re.escape(wanted)):
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
