"""Penalties are vLLM's, to the bit: its formulas in torch, each operation rounded to float32, as it computes eagerly.

Source: ``apply_penalties`` and ``get_token_bin_counts_and_mask`` of ``vllm/model_executor/layers/utils.py``, and
``apply_repetition_penalties_torch`` of ``vllm/_custom_ops.py`` (vllm-project/vllm, Apache-2.0).
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams

V, HISTORY, ROWS, IDS = 300, 64, 12, 20
NAMES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
VALUES: dict[str, tuple[float, ...]] = {
    "repetition_penalty": (1.1, 0.7, 3.0, 5.17),
    "frequency_penalty": (0.3, 2.0, -2.0, 1 / 3),
    "presence_penalty": (0.7, -0.1, 2.0, -2.0),
}
Texts = list[tuple[list[int], list[int]]]


def counts(tokens: list[list[int]]) -> Tensor:
    """How many times each token stands in each row, int64 ``[R, V]``."""
    return torch.stack([torch.tensor(each, dtype=torch.int64).bincount(minlength=V) for each in tokens])


def of_vllm(logits: Tensor, of_rows: Texts, given: list[dict[str, float]]) -> Tensor:
    """What vLLM makes of rows of logits: repetition, frequency and presence, in this order."""
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
    """The logits after the edits of requests with such parameters and texts."""
    sampler = Sampler(V, ROWS, backend="eager", history_len=HISTORY)
    pairs = zip(given, of_rows, strict=True)
    slots = [sampler.add_request(SamplingParams(seed=1, **each), *text) for each, text in pairs]
    positions = torch.tensor([len(prompt) + len(output) for prompt, output in of_rows])
    return sampler.edited_logits(sampler.plan(slots), logits, positions)


@pytest.mark.parametrize("names", [*((name,) for name in NAMES), NAMES[1:], NAMES], ids="+".join)
def test_penalties_are_those_of_vllm_to_the_bit(names):
    """Of texts of few ids, some without prompt or without drawn tokens; what was not drawn stays as it is."""
    source, lowered = random.Random(str(names)), 0
    for turn in range(8):
        lengths = [(source.randrange(20), source.randrange(30) if row % 4 else 0) for row in range(ROWS)]
        of_rows = [tuple([source.randrange(IDS) for _ in range(length)] for length in each) for each in lengths]
        given = [{name: source.choice(VALUES[name]) for name in names} for _ in range(ROWS)]
        logits = 10.0 ** (turn - 2) * torch.randn(ROWS, V)
        logits[:, ::7] = -torch.inf
        found, wanted = ours(logits, of_rows, given), of_vllm(logits, of_rows, given)
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
        assert torch.equal(found[:, IDS:], logits[:, IDS:])
        lowered += int((found != logits).sum())
    assert lowered > 200
