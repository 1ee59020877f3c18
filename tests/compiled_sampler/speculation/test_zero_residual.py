"""Where a rejection leaves nothing of p - q, the token is the target's own draw at that position, and flagged.

Both laws are one here, and the draft has no part in them: so it is rejected, and for certain. Nothing is left to chance
but which token is drawn, and that is compared bit for bit.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler.batch import RowStatus, SampleInputs, VerifyInputs, VerifyOutputs
from compiled_sampler.core.noise import RESIDUAL
from compiled_sampler.modes import probabilities_mode, verifying
from compiled_sampler.params import SamplingParams
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.pipeline.verify import verify_step
from compiled_sampler.speculation import acceptance as verification
from tests.builders import BASES, covering_modes, slot_table

COUNT, SIZES, RULES = 200, (2, 3, 64, 129, 2000), ("rejection", "block")
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "a wide top-k": {"top_k": 1000},
    "min-p": {"min_p": 0.3, "temperature": 0.7},
    "top-k and top-p": {"top_k": 20, "top_p": 0.8, "temperature": 1.5},
    "top-p": {"top_p": 0.9},
}


def verify_inputs(target: Tensor, proposals: Tensor, draft: int, **params: Any) -> VerifyInputs:
    """A request for every row, with one draft that it is judged by; rows after drafts hold zeros."""
    count, vocab_size = target.shape
    logits = torch.stack([target, torch.zeros_like(target)], 1).flatten(0, 1)
    table = slot_table([SamplingParams(seed=i, **params) for i in range(count)], vocab_size)
    slots = torch.arange(count)
    return VerifyInputs(logits, slots, 5 * slots, slots * 0 + 1, torch.full((count, 1), draft), proposals, table)


def rows(vocab_size: int) -> Tensor:
    """Logits whose last token has no part."""
    torch.manual_seed(vocab_size)
    logits = 2.0 * torch.randn(COUNT, vocab_size)
    logits[:, -1] = -torch.inf
    return logits


def all_zero(out: VerifyOutputs) -> None:
    """Every request rejects its draft, and says that nothing was left."""
    assert out.num_emitted.tolist() == [1] * COUNT
    assert out.status.tolist() == [RowStatus.ZERO_RESIDUAL] * COUNT


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("filtered", FILTERS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocab_size", SIZES)
def test_the_token_is_the_one_that_the_sampler_draws(vocab_size, rule, filtered, base):
    params = FILTERS[filtered]
    inputs = verify_inputs(rows(vocab_size), rows(vocab_size), vocab_size - 1, **params)
    for mode in covering_modes([SamplingParams(**params)], vocab_size, base):
        out = verify_step(verifying(mode, rule, "logits"), inputs)
        all_zero(out)
        own = sample_step(mode, SampleInputs(inputs.logits[::2], inputs.slots, inputs.positions, inputs.table))
        assert out.token_ids[:, 0].tolist() == own.token_ids.tolist()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_of_probabilities_the_token_is_the_one_of_the_rule_match(vocab_size, rule, temperature):
    law = torch.softmax(rows(vocab_size), -1)
    inputs = verify_inputs(law, law, vocab_size - 1, temperature=temperature)
    out = verify_step(verifying(probabilities_mode(vocab_size), rule, "probabilities"), inputs)
    all_zero(out)
    own = verify_step(verifying(probabilities_mode(vocab_size), "match"), inputs)
    assert out.token_ids[:, 0].tolist() == own.token_ids[:, 0].tolist()


@pytest.mark.parametrize("vocab_size", SIZES[1:])
def test_the_noise_of_the_residual_would_draw_other_tokens(vocab_size, monkeypatch):
    inputs = verify_inputs(rows(vocab_size), rows(vocab_size), vocab_size - 1)
    mode = covering_modes([SamplingParams()], vocab_size)[0]
    own = sample_step(mode, SampleInputs(inputs.logits[::2], inputs.slots, inputs.positions, inputs.table))
    monkeypatch.setattr(verification, "TARGET", RESIDUAL)
    out = verify_step(verifying(mode, "rejection", "logits"), inputs)
    assert (out.token_ids[:, 0] != own.token_ids).any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocab_size", SIZES[2:])
@pytest.mark.parametrize("rare", [2.0**-12, 2.0**-30])
def test_a_token_with_a_residual_wins_however_rare_it_is(vocab_size, rule, rare):
    law = torch.softmax(rows(vocab_size), -1)
    target, proposals = law.clone(), law.clone()
    target[:, -2], proposals[:, -2] = rare, 0.0
    inputs = verify_inputs(target, proposals, vocab_size - 1)
    out = verify_step(verifying(probabilities_mode(vocab_size), rule, "probabilities"), inputs)
    assert out.token_ids[:, 0].tolist() == [vocab_size - 2] * COUNT
    assert out.status.tolist() == [0] * COUNT
