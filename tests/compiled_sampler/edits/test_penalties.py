"""Penalties are vLLM's to the bit, and DRY subtracts what the slow truth does, on every path.

vLLM's formulas are here in torch, each operation rounded to float32, as it computes eagerly: ``apply_penalties`` and
``get_token_bin_counts_and_mask`` of ``vllm/model_executor/layers/utils.py``, and ``apply_repetition_penalties_torch``
of ``vllm/_custom_ops.py`` (vllm-project/vllm, Apache-2.0).
"""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled_sampler import RowStatus, Sampler, SamplingParams
from compiled_sampler.edits.dry import Dry, without_repetitions
from compiled_sampler.edits.history import UNWRITTEN, History
from tests.builders.edits import HISTORY, Request, V, edited_by, edited_rows, edited_sampler
from tests.oracles import oracle_edits

ALLOWED_1 = {"dry_multiplier": 1.0, "dry_allowed_length": 1}


def test_the_slow_truth_is_that_of_the_definition():
    """By hand: after 1 2 3 1 2 a 3 makes three tokens that stood there before; breakers and ranges shorten that."""
    text = [1, 2, 3, 1, 2]
    found = oracle_edits.repetitions
    assert found(text, {"dry_multiplier": 1.0}) == {3: 2}
    assert found(text, {"dry_multiplier": 1.0, "dry_allowed_length": 3}) == {}
    assert found(text, {**ALLOWED_1, "dry_sequence_breakers": (1,)}) == {3: 1}
    assert found(text, {**ALLOWED_1, "dry_sequence_breakers": (3,)}) == {}
    assert found(text, {**ALLOWED_1, "dry_range": 4}) == {3: 1}
    assert found([5] * 4, {"dry_multiplier": 1.0}) == {5: 3}
    assert found([1, 2, 7, 9, 2, 7, 8, 1, 2], {**ALLOWED_1}) == {7: 2}  # of two places, the longer one
    assert found([5] * 80, {"dry_multiplier": 1.0}) == {5: 50}
    assert oracle_edits.dry_penalty(4, {"dry_multiplier": 0.5, "dry_base": 2.0}) == 2.0
    assert oracle_edits.dry_penalty(50, {"dry_multiplier": 1.0, "dry_base": 1000.0}) == np.finfo(np.float32).max


@pytest.mark.parametrize(("backend", "rounds"), [("eager", 40), ("compiled", 3)])
def test_texts_of_few_tokens_are_penalized_by_the_slow_truth(backend, rounds):
    """Also -0.0, denormals and infinities; the control: three of four batches have a row with a repetition of three."""
    source, rows, long = random.Random(21), 8, 0
    sampler, generator = edited_sampler(backend, rows), torch.Generator().manual_seed(1)
    for _ in range(rounds):
        requests = []
        for _ in range(rows):
            ids = source.sample(range(V), 3)
            given = {
                "seed": 1,
                "dry_multiplier": source.choice([0.8, 1e-39, 2.0**20]),
                "dry_base": source.choice([1.0, 1.75, 2.0**10]),
                "dry_allowed_length": source.choice([1, 2, 3]),
                "dry_range": source.choice([0, 1, 5, 20, 1000]),
                "dry_sequence_breakers": source.choice([(), (ids[0],), (ids[0], 128)]),
            }
            text = [source.choice(ids) for _ in range(source.randrange(HISTORY))]
            half = source.randrange(len(text) + 1)
            requests.append(Request(given, text[:half], text[half:]))
            long += max(oracle_edits.repetitions(text, {**given, "dry_multiplier": 1.0}).values(), default=0) >= 3
        logits = 3.0 * torch.randn(rows, V, generator=generator)
        logits[0] = logits[0] * 2.0**-128
        logits[1, ::3], logits[2, ::2] = -0.0, torch.inf
        made = edited_by(sampler, requests, logits)
        assert torch.equal(made.view(torch.int32), edited_rows(logits, requests).view(torch.int32))
    assert long >= rounds


@pytest.mark.parametrize(
    ("name", "value"), [("repetition_penalty", 2.0), ("frequency_penalty", 1.25), ("presence_penalty", 1.25)]
)
def test_a_logit_that_a_penalty_makes_a_denormal_is_0(name, value):
    """Half of the least normal number, and a quarter of it."""
    least = 2.0**-126
    given = {"seed": 1, name: value if name == "repetition_penalty" else value * least}
    sampler, request = edited_sampler("eager", 1), Request(given, [], [3])
    logits = torch.zeros(1, V)
    logits[0, 3] = least
    made = edited_by(sampler, [request], logits)
    assert torch.equal(made.view(torch.int32), edited_rows(logits, [request]).view(torch.int32))
    assert made[0, 3].view(torch.int32) == 0


def test_repetitions_count_up_to_fifty_tokens():
    sampler, logits = Sampler(V, 2, backend="eager", history_len=200), torch.zeros(2, V)
    given = {"seed": 1, "dry_multiplier": 1.0, "dry_base": 1.125}
    requests = [Request(given, [7] * count, []) for count in (51, 120)]
    made = edited_by(sampler, requests, logits)
    assert torch.equal(made, edited_rows(logits, requests))
    assert made[0, 7] == made[1, 7] == -oracle_edits.dry_penalty(50, given)


def test_positions_that_penalize_nothing_are_writes_in_many_places():
    """Else a GPU would write them one after the other, all but a few of a history that is longer than its text."""
    history = History(torch.full((2, 3, 100), UNWRITTEN, dtype=torch.int32), *torch.zeros(2, 1, dtype=torch.int32))
    numbers, nothing = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)
    dry = Dry(numbers, torch.ones(1, 51), numbers, nothing)
    x = torch.randn(1, V)
    tokens, after = without_repetitions(x, torch.zeros(1, dtype=torch.int64), torch.tensor([3]), dry, history)
    assert len(tokens.unique()) == 100
    assert torch.equal(after, x.gather(1, tokens))


def test_positions_beyond_the_history_penalize_nothing_and_are_reported():
    sampler, logits = Sampler(V, 1, backend="eager", history_len=8), torch.randn(1, V)
    slot = sampler.add_request(SamplingParams(seed=1, dry_multiplier=5.0), [3] * 8)
    plan = sampler.plan([slot])
    assert torch.equal(sampler.edited_logits(plan, logits, torch.tensor([100])), logits)
    assert sampler.sample(plan, logits, torch.tensor([9])).status.tolist() == [int(RowStatus.HISTORY_EXCEEDED)]
    assert not torch.equal(sampler.edited_logits(plan, logits, torch.tensor([8])), logits)


def test_a_multiplier_of_zero_is_no_edit():
    assert SamplingParams(dry_base=3.0, dry_range=7, dry_sequence_breakers=[4]).edits == ()
    assert SamplingParams(dry_multiplier=0.1).edits == ("dry",)


def test_breakers_have_room_of_their_own():
    sampler = edited_sampler("eager", 1)
    with pytest.raises(ValueError, match=r"breakers of a request must be at most 32, got 33; Sampler\(edit_sizes="):
        sampler.add_request(SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=range(33)))
    with pytest.raises(ValueError, match="dry_sequence_breakers must be below vocab_size 129, got 129"):
        sampler.add_request(SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=[V]))
    unused = SamplingParams(dry_multiplier=0.0, dry_sequence_breakers=range(200), logit_bias={1: 2.0})
    sampler.add_request(unused)


def test_request_bodies_have_the_names_of_llama_cpp():
    body = {"dry_multiplier": 0.8, "dry_base": 2.0, "dry_allowed_length": 3, "dry_sequence_breakers": [4]}
    every = SamplingParams(dry_multiplier=0.8, dry_base=2.0, dry_allowed_length=3, dry_sequence_breakers=[4])
    assert SamplingParams.from_openai({**body, "dry_penalty_last_n": -1}) == every
    assert SamplingParams.from_openai({**body, "dry_penalty_last_n": 64}).dry_range == 64
    assert SamplingParams.from_openai({**body, "dry_penalty_last_n": 0}).edits == ()
    with pytest.raises(ValueError, match="dry_range must be None here, got 9; dry_penalty_last_n says the same"):
        SamplingParams.from_openai({**body, "dry_penalty_last_n": 64, "dry_range": 9})
    with pytest.raises(TypeError, match="dry_sequence_breakers"):
        SamplingParams.from_openai({**body, "dry_sequence_breakers": ["\n"]})


VLLM_V, ROWS, IDS = 300, 12, 20
NAMES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
VALUES: dict[str, tuple[float, ...]] = {
    "repetition_penalty": (1.1, 0.7, 3.0, 5.17),
    "frequency_penalty": (0.3, 2.0, -2.0, 1 / 3),
    "presence_penalty": (0.7, -0.1, 2.0, -2.0),
}
Texts = list[tuple[list[int], list[int]]]


def counts(tokens: list[list[int]]) -> Tensor:
    return torch.stack([torch.tensor(each, dtype=torch.int64).bincount(minlength=VLLM_V) for each in tokens])


def of_vllm(logits: Tensor, of_rows: Texts, given: list[dict[str, float]]) -> Tensor:
    prompts, outputs = (counts([text[index] for text in of_rows]) for index in (0, 1))
    off = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    repetition, frequency, presence = (
        torch.tensor([{**off, **each}[name] for each in given], dtype=torch.float32)[:, None] for name in NAMES
    )
    logits = logits.clone()
    penalties = torch.where((prompts > 0) | (outputs > 0), repetition, 1.0)
    logits *= torch.where(logits > 0, 1.0 / penalties, penalties)
    logits -= frequency * outputs
    logits -= presence * (outputs > 0)
    return logits


def ours(logits: Tensor, of_rows: Texts, given: list[dict[str, Any]]) -> Tensor:
    requests = [Request({"seed": 1, **each}, *text) for each, text in zip(given, of_rows, strict=True)]
    return edited_by(Sampler(VLLM_V, ROWS, backend="eager", history_len=64), requests, logits)


@pytest.mark.parametrize("names", [*((name,) for name in NAMES), NAMES[1:], NAMES], ids="+".join)
def test_penalties_are_those_of_vllm_to_the_bit(names):
    """Of texts of few ids, some without prompt or without drawn tokens; what was not drawn stays as it is."""
    source, lowered = random.Random(str(names)), 0
    for turn in range(8):
        lengths = [(source.randrange(20), source.randrange(30) if row % 4 else 0) for row in range(ROWS)]
        of_rows = [tuple([source.randrange(IDS) for _ in range(length)] for length in each) for each in lengths]
        given = [{name: source.choice(VALUES[name]) for name in names} for _ in range(ROWS)]
        logits = 10.0 ** (turn - 2) * torch.randn(ROWS, VLLM_V)
        logits[:, ::7] = -torch.inf
        found, wanted = ours(logits, of_rows, given), of_vllm(logits, of_rows, given)
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
        assert torch.equal(found[:, IDS:], logits[:, IDS:])
        lowered += int((found != logits).sum())
    assert lowered > 200
