"""A watermark keys the noise by the text: the slow truth draws so too, and only the key finds it."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest

from compiled_sampler import Sampler, SamplingParams
from examples.watermark import detect
from tests.builders.edits import V
from tests.builders.sampler import planned

FALSE_ALARM = 1e-6


def decoded(sampler: Sampler, seed: int, num_tokens: int, length: int) -> list[int]:
    """A text of the sampler whose logits follow from the last token."""
    text = [1, 2, 3]
    slot = sampler.add_request(SamplingParams(seed=seed, watermark_tokens=num_tokens), text)
    plan, model = sampler.plan([slot]), torch.randn(V, V, generator=torch.Generator().manual_seed(1))
    while len(text) < length:
        text += sampler.sample(plan, model[text[-1]][None], torch.tensor([len(text)])).tolist()
    sampler.remove_request(slot)
    return text


def test_the_key_finds_the_watermark_and_no_other_does():
    """200 keys that did not draw the text: their p-values are uniform, at a false-alarm rate of 1e-6."""
    sampler = Sampler(V, 1, backend="eager", history_len=256)
    text = decoded(sampler, 5, 3, 256)
    assert detect(text, 3, 5, 3).p_value < FALSE_ALARM
    assert detect(text, 3, 5, 2).p_value > FALSE_ALARM
    repeated = [1, 2, 3, 1, 2, 3]
    assert detect(repeated, 1, 5, 1).num_scored == 3  # a context that comes again has no new noise
    assert detect(repeated, 6, 5, 1) == (0, 0.0, 1.0)
    others = [detect(text, 3, key, 3).p_value for key in range(100, 300)]
    assert kstest(others, "uniform").pvalue > FALSE_ALARM
    assert kstest([p**3 for p in others], "uniform").pvalue < FALSE_ALARM  # the control: another law is seen


def test_the_law_over_contexts_is_that_of_the_parameters():
    """Of 8,192 contexts that each come once; the false-alarm rate is 1e-6, and a law off by 10 % is seen."""
    count, size = 8_192, 8
    sampler = Sampler(size, 64, backend="eager", history_len=40)
    logits = torch.linspace(-1.0, 1.0, size).expand(64, size)
    source, drawn = np.random.default_rng(1), np.zeros(size)
    for _ in range(count // 64):
        texts = source.integers(0, size, (64, 24)).tolist()
        params = SamplingParams(seed=9, watermark_tokens=8)
        slots = [sampler.add_request(params, text) for text in texts]
        tokens = sampler.sample(sampler.plan(slots), logits.contiguous(), torch.full((64,), 24)).token_ids
        drawn += np.bincount(tokens.numpy(), minlength=size)
        for slot in slots:
            sampler.remove_request(slot)
    law = torch.softmax(logits[0].double(), -1).numpy()
    assert chisquare(drawn, law * drawn.sum()).pvalue > FALSE_ALARM
    wrong = law * np.where(np.arange(size) % 2, 1.1, 0.9)
    assert chisquare(drawn, wrong / wrong.sum() * drawn.sum()).pvalue < FALSE_ALARM


def test_what_draws_by_other_noise_is_refused():
    sampler, plan = planned(SamplingParams(seed=1, watermark_tokens=2), num_drafts=[1], history_len=8)
    rows, drafts, where = torch.zeros(2, V), torch.tensor([[1]]), torch.tensor([1])
    with pytest.raises(ValueError, match="watermark_tokens must be verified by"):
        sampler.verify(plan, rows, drafts, where, "rejection")
    with pytest.raises(ValueError, match="watermark_tokens must be verified by"):
        sampler.verify_from_probs(plan, rows.softmax(-1), drafts, where)
    with pytest.raises(ValueError, match="watermark_tokens must be in"):
        SamplingParams(watermark_tokens=9)
    with pytest.raises(ValueError, match="history_len must be > 0 for watermark"):
        Sampler(V, 1, backend="eager").add_request(SamplingParams(seed=1, watermark_tokens=1))
