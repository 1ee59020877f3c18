"""The draw of a V2 runner against ``Sampler``, on stand-ins of what vLLM's samplers hold; needs no vLLM."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.integrations.vllm import mrv2_drawing
from tests.engines.vllm_stand_in import context_of, sampler_of, states_of

VOCAB = 100
REQUESTS: dict[int, dict[str, Any]] = {
    7: {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 11},
    0: {"temperature": 0.0, "seed": 1},
    11: {"temperature": 1.3, "seed": -(2**63)},
    4: {"top_p": 0.6, "seed": 2**62},
    2: {"temperature": 0.9, "top_k": 70, "min_p": 0.05, "seed": 5},
}
SLOTS = list(REQUESTS)
POSITIONS = [3, 0, 100, 7, 2**20]
"""Of the input token of each request."""


def logits_of(rows: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def sampler_with(slots: list[int]) -> tuple[Sampler, Any]:
    """A sampler and a plan of the same requests, whose numbers are those that float32 holds."""
    sampler = Sampler(VOCAB, len(slots), backend="eager")
    held = []
    for slot in slots:
        law = {name: v if name in ("seed", "top_k") else float(np.float32(v)) for name, v in REQUESTS[slot].items()}
        held.append(sampler.add_request(SamplingParams(**{**law, "seed": law["seed"] % 2**64})))
    return sampler, sampler.plan(held)


def expected(logits: Tensor, slots: list[int], positions: list[int]) -> list[int]:
    sampler, plan = sampler_with(slots)
    return sampler.sample(plan, logits, torch.tensor(positions) + 1).token_ids.tolist()


def drawn(logits: Tensor, slots: list[int], positions: list[int], **changed: Any) -> tuple[list[int], Tensor]:
    context = SimpleNamespace(**context_of(slots, [1] * len(slots), positions, torch.zeros(len(slots))))
    sampler = sampler_of(states_of(VOCAB, REQUESTS), **changed)
    tokens, shown = mrv2_drawing.sample(sampler, logits, context, "eager", return_logprobs=True)
    assert tokens.dtype == torch.int64
    return tokens.tolist(), shown


@pytest.mark.parametrize("slots", [SLOTS, SLOTS[::-1], [0], [7, 0], [11], [4], [2, 7]], ids=str)
def test_the_tokens_are_those_of_a_sampler_in_any_batch(slots: list[int]) -> None:
    rows = [SLOTS.index(slot) for slot in slots]
    logits, positions = logits_of(len(SLOTS))[rows], [POSITIONS[row] for row in rows]
    tokens, shown = drawn(logits, slots, positions)
    assert tokens == expected(logits, slots, positions)
    assert shown is logits


def test_vllms_edits_are_applied_before_the_draw() -> None:
    logits = logits_of(len(SLOTS))
    edited = logits.clone()
    edited[:, 3] += torch.tensor(SLOTS)
    edited[:, 5] -= 1
    before = logits.clone()
    assert drawn(logits, SLOTS, POSITIONS, edits=True)[0] == expected(edited, SLOTS, POSITIONS)
    assert torch.equal(logits, before)


def test_processed_logits_are_those_of_the_law_that_is_drawn_from() -> None:
    logits = logits_of(len(SLOTS))
    tokens, shown = drawn(logits, SLOTS, POSITIONS, logprobs_mode="processed_logprobs")
    sampler, plan = sampler_with(SLOTS)
    assert torch.equal(shown.isfinite(), sampler.probs(plan, logits) > 0)
    assert shown.isfinite().sum(-1).tolist()[1:3] == [1, VOCAB]
    assert shown.gather(1, torch.tensor(tokens)[:, None]).isfinite().all()
    law = torch.log_softmax(logits[2] / np.float32(1.3), -1)
    torch.testing.assert_close(torch.log_softmax(shown[2], -1), law)


@pytest.mark.parametrize("right", [0, 1, 3])
def test_drafts_are_verified_by_match_as_ragged_rows(right: int) -> None:
    counts = [4, 1, 3, 4, 2]
    first = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    logits = logits_of(sum(counts))
    by_row = [(slot, at + place) for slot, at, n in zip(SLOTS, POSITIONS, counts, strict=True) for place in range(n)]
    plain = expected(logits, [slot for slot, _ in by_row], [at for _, at in by_row])
    inputs = torch.tensor([-5, *plain[:-1]], dtype=torch.int32)
    for start, end in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        wrong = start + right + 1
        if wrong < end:
            inputs[wrong] = -1 if right == 1 else (plain[wrong - 1] + 1) % VOCAB
    context = SimpleNamespace(**context_of(SLOTS, counts, POSITIONS, inputs))
    verifier = SimpleNamespace(sampler=sampler_of(states_of(VOCAB, REQUESTS)), num_speculative_steps=3)
    shown, tokens, lengths = mrv2_drawing.verify(verifier, logits, context, first, inputs, "eager")
    assert shown is logits
    assert (tokens.dtype, tuple(tokens.shape), lengths.dtype) == (torch.int32, (5, 4), torch.int32)
    wanted = [min(right, count - 1) + 1 for count in counts]
    assert lengths.tolist() == wanted
    for row, (start, length) in enumerate(zip(first[:-1].tolist(), wanted, strict=True)):
        assert tokens[row, :length].tolist() == plain[start : start + length]


def test_a_row_without_any_token_gets_token_0() -> None:
    logits = logits_of(len(SLOTS))
    logits[2] = -torch.inf
    tokens = drawn(logits, SLOTS, POSITIONS)[0]
    assert tokens[2] == 0
    assert tokens[:2] == expected(logits[:2], SLOTS[:2], POSITIONS[:2])


@pytest.mark.parametrize(
    ("rule", "watermark", "method", "named"),
    [
        ("block", None, None, "rule must be 'match' with a V2 runner, got 'block'"),
        ("match", object(), None, "watermark_config"),
        ("match", None, "synthetic", "rejection_sample_method"),
        ("match", None, "standard", None),
        ("match", None, None, None),
    ],
)
def test_an_engine_that_cannot_be_served_is_named(
    rule: str, watermark: Any, method: str | None, named: str | None
) -> None:
    drafts = None if method is None else SimpleNamespace(rejection_sample_method=method)
    config = SimpleNamespace(speculative_config=drafts, watermark_config=watermark)
    reason = mrv2_drawing.unsupported_runner(SimpleNamespace(vllm_config=config), rule)
    assert reason is None if named is None else named in str(reason)
