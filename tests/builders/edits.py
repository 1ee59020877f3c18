"""Requests with edits, drawn at random, and what the slow truth makes of their logits."""

import contextlib
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.edits import EDIT_SPECS
from tests.oracles import oracle_edits, oracle_filters

V, HISTORY = 129, 48
_BIASES = (-math.inf, 2.5, -1.125, 1e30, -100.0)
FILTERS = tuple(spec.name for spec in EDIT_SPECS if spec.kind == "filter")
BOUNDED_EDITS = tuple(spec.name for spec in EDIT_SPECS if spec.kind in ("mask", "list", "end"))
"""Those with which every row has a boundary."""
EDITS = (*BOUNDED_EDITS, *FILTERS)
OF_EDIT: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"allowed_token_ids": tuple(range(0, 90, 2))},
    "logit_bias": {"logit_bias": {1: 3.5, 8: -math.inf, 64: -2.25, 100: 6.0}},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": tuple(range(0, 64, 2))},
    "penalties": {"repetition_penalty": 1.7, "frequency_penalty": 0.6, "presence_penalty": -0.4},
    "dry": {"dry_multiplier": 30.0, "dry_allowed_length": 1, "dry_sequence_breakers": (2,)},
    "bad_words": {"bad_words_token_ids": ((3,), (10, 12), (10, 14), (4, 4, 4))},
    "stops": {"stop_token_ids": (5, 6), "eos_token_id": 7},
    "top_n_sigma": {"top_n_sigma": 1.25},
    "min_k": {"min_k": True, "min_k_tau": 60.0},
    "p_less": {"p_less": True},
    "typical_p": {"typical_p": 0.6},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.02},
}
"""Parameters that need each edit, for more than 100 tokens; all but stops change what is drawn."""


class Request(NamedTuple):
    """A request, with the tokens that it begins with."""

    given: dict[str, Any]
    """Parameters by name."""
    prompt: list[int]
    output: list[int]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.given)

    @property
    def position(self) -> int:
        """Of the next token."""
        return len(self.prompt) + len(self.output)

    def added(self, sampler: Sampler) -> int:
        return sampler.add_request(self.params, self.prompt, self.output)


@contextlib.contextmanager
def added_to(requests: Sequence[Request], *samplers: Sampler) -> Iterator[list[tuple[Sampler, list[int]]]]:
    """Each sampler with the slots of the requests, which are removed afterwards."""
    sides = [(sampler, [each.added(sampler) for each in requests]) for sampler in samplers]
    yield sides
    for sampler, slots in sides:
        for slot in slots:
            sampler.remove_request(slot)


def edited_by(sampler: Sampler, requests: Sequence[Request], logits: Tensor, masks: Tensor | None = None) -> Tensor:
    """The edited logits of requests that are added and removed, a row each; further rows are padding."""
    padding = len(logits) - len(requests)
    positions = [*(each.position for each in requests), *(3 + 40 * n for n in range(padding))]
    with added_to(requests, sampler) as [(_, slots)]:
        plan = sampler.plan([*slots, *[-1] * padding])
        return sampler.edited_logits(plan, logits, torch.tensor(positions), token_bitmask=masks)


def random_request(source: random.Random, vocab_size: int, edits: Sequence[str] = EDITS) -> Request:
    """A request whose parameters are each off or any that it may have; tokens are of a few ids, so that they repeat."""
    ids = [source.randrange(vocab_size) for _ in range(8)]

    def some(count: int) -> list[int]:
        return [source.choice(ids) for _ in range(source.randrange(1, count))]

    every: dict[str, dict[str, Any]] = {
        "allowed_token_ids": {"allowed_token_ids": {*some(9), *range(source.randrange(vocab_size))}},
        "logit_bias": {"logit_bias": {token: source.choice(_BIASES) for token in some(9)}},
        "min_tokens": {"min_tokens": source.randrange(1, 6), "stop_token_ids": some(4)},
        "penalties": {
            "repetition_penalty": source.choice([0.5, 1.0, 1.1, 1.3, 2.0**-20, 2.0**20]),
            "frequency_penalty": source.choice([-2.0, 0.0, 0.3, 2.0]),
            "presence_penalty": source.choice([-2.0, 0.0, 0.7, 2.0]),
            "repetition_scope": source.choice(["all", "output"]),
        },
        "dry": {
            "dry_multiplier": source.choice([0.0, 0.8, 3.0, 1e6]),
            "dry_base": source.choice([1.0, 1.75, 1000.0]),
            "dry_allowed_length": source.choice([1, 1, 2, 4]),
            "dry_range": source.choice([0, 0, 3, 7, 100]),
            "dry_sequence_breakers": some(3) if source.random() < 0.5 else [],
        },
        "bad_words": {
            "bad_words_token_ids": [some(4) for _ in range(source.randrange(1, 5))],
            "bad_words_scope": source.choice(["all", "output"]),
        },
        "stops": {"eos_token_id": source.choice(ids), "ignore_eos": source.random() < 0.2},
        "top_n_sigma": {"top_n_sigma": source.choice([0.0, 0.3, 1.0, 2.5, 1e300])},
        "min_k": {"min_k": source.random() < 0.5, "min_k_tau": source.choice([0.0, 3.0, 60.0, 1e300])},
        "p_less": {"p_less": source.random() < 0.5},
        "typical_p": {"typical_p": source.choice([1.0, 0.05, 0.5, 0.9])},
        "xtc": {
            "xtc_probability": source.choice([0.0, 0.4, 1.0]),
            "xtc_threshold": source.choice([0.0, 1 / 129, 0.05, 0.5, 0.6]),
        },
    }
    given: dict[str, Any] = {"seed": source.getrandbits(64), "temperature": source.choice([0.0, 0.7, 1.0, 1.5])}
    # no share of equal tokens is exactly one of these, which a product rounded to float64 may miss by a token
    given |= source.choice([{}, {"top_k": 3}, {"top_p": 0.815}, {"min_p": 0.1}, {"top_k": 70, "top_p": 0.955}])
    for edit in edits:
        given |= every[edit] if source.random() < 0.6 else {}
    return Request(given, some(9) if source.random() < 0.8 else [], some(9) if source.random() < 0.5 else [])


def edited_rows(logits: Tensor, requests: Sequence[Request], masks: Any = None) -> Tensor:
    """What the slow truth makes of one row of logits a request, float32 ``[R, V]``."""
    rows = []
    for n, (row, request) in enumerate(zip(logits.float().tolist(), requests, strict=True)):
        mask = None if masks is None else masks[n].tolist()
        edited = oracle_edits.edited(row, request.given, request.prompt, request.output, mask)
        rows.append(np.array(oracle_filters.filtered(edited.tolist(), request.given, request.position), np.float32))
    return torch.from_numpy(np.stack(rows))


def unedited(request: Request) -> SamplingParams:
    """The parameters of a request without its edits."""
    names = ("seed", "temperature", "top_k", "top_p", "min_p")
    return SamplingParams(**{name: request.given[name] for name in names if name in request.given})


def random_mask(source: random.Random, rows: int, vocab_size: int) -> Tensor:
    """Bitmasks int32 ``[rows, ceil(V / 32)]`` of which some allow all tokens, some few and one none but the last."""
    words = -(-vocab_size // 32)
    kinds = [source.choice(["all", "half", "few"]) for _ in range(rows)]
    made = np.array([[_word(source, kind) for _ in range(words)] for kind in kinds], np.uint32)
    return torch.from_numpy(made.view(np.int32))


def _word(source: random.Random, kind: str) -> int:
    bits = source.getrandbits(32)
    return {"all": 2**32 - 1, "half": bits, "few": bits & source.getrandbits(32) & source.getrandbits(32)}[kind]


def edited_sampler(backend: str, rows: int, vocab_size: int = V, **options: Any) -> Sampler:
    """A sampler whose requests have a history of ``HISTORY`` positions."""
    return Sampler(vocab_size, rows, backend=backend, history_len=HISTORY, **options)


def hard_logits(source: random.Random, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of which some have ties, NaN, infinities or zeros of both signs."""
    generator = torch.Generator().manual_seed(source.getrandbits(32))
    made = 3.0 * torch.randn(rows, V, generator=generator)
    for row in made:
        kind = source.randrange(6)
        if kind == 0:
            row.round_()
        elif kind == 1:
            row[torch.rand(V, generator=generator) < 0.1] = source.choice([math.nan, -math.inf])
        elif kind == 2:
            row.mul_(0.0)
    return made.to(dtype)


def plain_tokens(
    sampler: Sampler, requests: Sequence[Request], logits: Tensor, positions: Tensor
) -> tuple[list[int], list[int]]:
    """Token and status of each row, from logits that are edited already."""
    slots = [sampler.add_request(unedited(each)) for each in requests]
    drawn = sampler.sample(sampler.plan(slots), logits, positions)
    for slot in slots:
        sampler.remove_request(slot)
    return drawn.token_ids.tolist(), drawn.status.tolist()
