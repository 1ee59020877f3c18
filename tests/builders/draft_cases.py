"""Targets and drafters of every kind, as rows by prefix and as exact laws, for the law of verification."""

import functools
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from compiled_sampler.params import SamplingParams
from compiled_sampler.pipeline.law import probability_step
from tests.builders.inputs import full_mode, repeated
from tests.oracles import oracle
from tests.oracles import oracle_verification as exact

PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 2},
    {"top_p": 0.7},
    {"temperature": 1.3, "min_p": 0.2},
]
PARAMS.append({"top_k": 3, "top_p": 0.9, "min_p": 0.05})
KINDS = {
    "one_hot": "one_hot",
    **dict.fromkeys(("normalised", "unnormalised", "equal", "one_ulp"), "probabilities"),
    **dict.fromkeys(("float32", "bfloat16", "same_logits"), "logits"),
    **dict.fromkeys(("processed", "processed bfloat16", "processed same"), "processed"),
}


class Case(NamedTuple):
    """A target and a drafter: rows ``[V]`` by prefix, as the sampler gets them, and their exact laws."""

    params: dict[str, Any]
    targets: dict[exact.Tokens, torch.Tensor]
    proposals: dict[exact.Tokens, torch.Tensor]
    ps: exact.Rows
    qs: exact.Rows


Laws = list[tuple[Case, exact.Rows, exact.Law]]
"""Cases, each with the law of a drafter and that of the emitted tokens."""


def logits_row(index: int, vocab_size: int) -> torch.Tensor:
    """A normal, a peaked, a flat or a partly masked row."""
    row = 1.5 * torch.randn(vocab_size)
    row[index % vocab_size] += (0.0, 6.0, 0.0, -torch.inf)[index % 4]
    return torch.zeros(vocab_size) if index % 4 == 2 else row


def proposal_row(name: str, target: torch.Tensor, params: dict[str, Any], index: int) -> torch.Tensor:
    """A row that drafts are drawn from, of the named kind."""
    match name:
        case "equal" | "one_ulp":
            step = repeated(target[None], SamplingParams(seed=0, **params), 1)
            row = probability_step(full_mode(len(target)), step).probabilities[0]
            up = torch.nextafter(row, torch.tensor(2.0))
            return torch.where((row > 0.0) & (torch.rand(len(row)) < 0.5), up, row) if name == "one_ulp" else row
        case "same_logits" | "processed same":
            return target
        case "normalised" | "unnormalised" | "one_hot":
            row = torch.softmax(logits_row(index, len(target)), -1)
            return row.bfloat16().float() if name == "unnormalised" else row
    return logits_row(index, len(target)).to(target.dtype)


def law_of(row: torch.Tensor, params: dict[str, Any], kind: str = "logits") -> list[Fraction]:
    """The exact law of a row of logits under a request's parameters, or of a row of probabilities."""
    x = row.tolist()
    if kind in ("one_hot", "probabilities"):
        return oracle.exact_law(x, range(len(x)))
    if kind == "processed":
        params = {}
    return oracle.exact_law(oracle.masses(x, params.get("temperature", 1.0)), oracle.reference_keep(x, **params))


def case(name: str, vocab_size: int, width: int, params: dict[str, Any], start: int) -> Case:
    """A target and a drafter with rows of every shape."""
    dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
    xs = exact.prefixes(vocab_size, width)
    targets = {x: logits_row(start + i, vocab_size).to(dtype) for i, x in enumerate(xs)}
    proposals = {x: proposal_row(name, targets[x], params, start + 3 * i) for i, x in enumerate(xs)}
    qs = {x: law_of(row, params, KINDS[name]) for x, row in proposals.items()}
    return Case(params, targets, proposals, {x: law_of(row, params) for x, row in targets.items()}, qs)


@functools.cache
def cases(name: str, vocab_size: int, width: int) -> list[Case]:
    """One case for each of the parameters, always the same ones."""
    torch.manual_seed(vocab_size * 10 + width)
    return [case(name, vocab_size, width, params, i) for i, params in enumerate(PARAMS)]
