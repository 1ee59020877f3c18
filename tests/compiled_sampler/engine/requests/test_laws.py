"""Laws of filters of whole rows and of watermarks, who pays for them, and what probabilities and logprobs say."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest

from compiled_sampler import Logprobs, Sampler, SamplingParams, Verification
from examples.watermark import detect
from tests.builders.sampler import V, planned, sampler_with
from tests.oracles import oracle_filters

DRAWS = 10_000
FILTERS = [
    {"top_n_sigma": 1.0},
    {"min_k": True, "min_k_tau": 60.0},
    {"p_less": True},
    {"typical_p": 0.5},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02},
]
NAMES = ["top_n_sigma", "min_k", "p_less", "typical_p", "xtc"]


def filtered_once(probability, rows=DRAWS):
    """How often the first token is excluded from as many draws, at positions 0, 1, ..."""
    sampler = sampler_with([SamplingParams(seed=12, xtc_probability=probability, xtc_threshold=0.1)])
    logits = torch.full((1, V), -math.inf)
    logits[0, :4] = torch.tensor([3.0, 2.5, 2.0, -1.0])
    plan = sampler.plan([0] * rows)
    found = sampler.probs(plan, logits.expand(rows, -1).contiguous(), positions=torch.arange(rows))
    is_excluded = found[:, 0] == 0.0
    assert torch.equal(is_excluded, found[:, 1] == 0.0)
    assert (found[:, 2] > 0.0).all()
    wanted = [oracle_filters.coin(12, position) < probability for position in range(0, rows, 500)]
    assert is_excluded[::500].tolist() == wanted
    return int(is_excluded.sum())


def is_plausible(count, probability, rows=DRAWS):
    """Whether a count is within five deviations of a binomial: a false alarm in 1.7 million."""
    return abs(count - rows * probability) <= 5.0 * math.sqrt(rows * probability * (1.0 - probability))


@pytest.mark.parametrize("probability", [0.1, 0.85])
def test_top_choices_are_excluded_as_often_as_asked_for(probability):
    """False alarm: 6e-7 each; the control is the count of another probability, 0.03 away, which must fail."""
    count = filtered_once(probability)
    assert is_plausible(count, probability)
    assert not is_plausible(count, probability + 0.03)


def test_the_coin_is_independent_of_the_token():
    """Where nothing is excluded, tokens are as likely beside either side of the coin; false alarm 6e-7 for each count.

    The control is a share that is 0.2 off, which must fail.
    """
    sampler = sampler_with([SamplingParams(seed=5, xtc_probability=0.5, xtc_threshold=0.3)])
    logits = torch.full((1, V), -math.inf)
    logits[0, :3] = torch.tensor([2.0, 1.5, 1.5])  # 0.45, 0.27, 0.27: one top choice, which stays
    plan, where = sampler.plan([0] * DRAWS), torch.arange(DRAWS)
    tokens = sampler.sample(plan, logits.expand(DRAWS, -1).contiguous(), where).token_ids
    coins = torch.tensor([oracle_filters.coin(5, position) < 0.5 for position in range(2000)])
    of_coin = tokens[:2000][coins]
    share = math.exp(2.0) / (math.exp(2.0) + 2.0 * math.exp(1.5))
    assert is_plausible(int((tokens == 0).sum()), share)
    assert is_plausible(int((of_coin == 0).sum()), share, len(of_coin))
    assert not is_plausible(int((of_coin == 0).sum()), share + 0.2, len(of_coin))


def test_xtc_that_can_exclude_nothing_is_no_edit():
    every = [SamplingParams(xtc_probability=p, xtc_threshold=t).edits for p, t in ((0.0, 0.1), (1.0, 0.51), (1.0, 0.5))]
    assert every == [(), (), ("xtc",)]


@pytest.mark.parametrize("given", FILTERS, ids=NAMES)
def test_a_boundary_is_refused_as_it_does_not_tell_what_is_kept(given):
    sampler, plan = planned(SamplingParams(seed=1, **given), verifications=[Verification("match", 1)])
    asked, logits, where = Logprobs(of="filtered", boundary=True), torch.randn(2, V), torch.tensor([0])
    with pytest.raises(ValueError, match=r"boundary must not be asked for with .*; "):
        sampler.sample(plan, logits[:1], where, logprobs=asked)
    with pytest.raises(ValueError, match=r"boundary must not be asked for with .*; "):
        sampler.verify(sampler.plan([0], num_drafts=[1]), logits, torch.tensor([[1]]), where, logprobs=asked)


def test_probabilities_under_xtc_need_positions():
    sampler, plan = planned(SamplingParams(seed=1, **FILTERS[NAMES.index("xtc")]))
    with pytest.raises(ValueError, match="positions must be given for xtc, got None"):
        sampler.probs(plan, torch.randn(1, V))


# Watermarks, which key the noise by the text: the slow truth draws so too, and only the key finds it.


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
    with pytest.raises(ValueError, match="watermark_tokens must be verified by"):
        sampler.verify_from_probs(plan, torch.zeros(2, V).softmax(-1), torch.tensor([[1]]), torch.tensor([1]))
    with pytest.raises(ValueError, match="history_len must be > 0 for watermark"):
        Sampler(V, 1, backend="eager").add_request(SamplingParams(seed=1, watermark_tokens=1))
