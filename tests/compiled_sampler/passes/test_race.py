"""The draw follows the exact law of the kept tokens, also in the tail, and draws are independent of one another.

Rows of few tokens at a million positions go through the production race at once (``builders.inputs.race``).
"""

import functools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from compiled_sampler.batch import RowStatus
from compiled_sampler.core.noise import ACCEPT, DRAFT, RESIDUAL, TARGET, gumbel
from compiled_sampler.core.order import MASKED_KEY, POSITIVE_INFINITY_KEY, key_float
from compiled_sampler.core.rows import RowParams, RowSlots, gather_rows
from compiled_sampler.core.score import score_key
from compiled_sampler.modes import mode_table
from compiled_sampler.params import SamplingParams
from compiled_sampler.passes.race import draw_from_blocks, race_maxima
from tests.builders.inputs import race, sample_inputs, slot_table
from tests.cases.hard_rows import mixed_batch, mixed_requests
from tests.oracles import oracle
from tests.oracles.goodness_of_fit import Fit, accept, chi_square, detects, poisson_p_value, serial_independence
from tools.kernels.launches import for_a_gpu

N = 2**18
STREAMS = (TARGET, DRAFT, ACCEPT, RESIDUAL)

LAWS = {
    "fair_coin": [0.0, 0.0],
    "one_in_ten": [0.0, -math.log(9.0)],
    "flat": [0.0] * 8,
    "steps": [0.0, -0.5, -1.0, -1.5, -2.0, -2.5, -3.0, -3.5],
    "peaked": [4.0, 0.0, 0.0, -1.0],
    "far_from_zero": [40.0, 39.0, 38.0, 40.0],
}


@functools.cache
def rows_of(seed: int, stream: int = TARGET, temperature: float = 1.0, count: int = N, start: int = 0) -> RowParams:
    table = slot_table([SamplingParams(temperature=temperature, seed=seed)], 8)
    positions = torch.arange(start, start + count)
    return gather_rows(RowSlots(table, torch.zeros_like(positions), positions), stream=stream)


def draws(logits: list[float], rows: RowParams) -> torch.Tensor:
    return race(torch.tensor([logits]).expand(len(rows.live), -1), rows).token_ids


def fit(logits: list[float], tokens: torch.Tensor, temperature: float = 1.0) -> Fit:
    law = oracle.exact_law(oracle.masses(logits, temperature), range(len(logits)))
    return chi_square(np.bincount(tokens, minlength=len(logits)), [float(p) for p in law])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", LAWS)
def test_draws_follow_the_exact_law(name, temperature):
    accept(fit(LAWS[name], draws(LAWS[name], rows_of(1, temperature=temperature)), temperature))


@pytest.mark.parametrize("stream", STREAMS)
def test_draws_of_every_stream_follow_the_exact_law(stream):
    accept(fit(LAWS["steps"], draws(LAWS["steps"], rows_of(2, stream))))


def test_draws_over_neighbouring_seeds_follow_the_exact_law():
    table = slot_table([SamplingParams(seed=seed) for seed in range(2**16)], 8)
    slots = torch.arange(2**16)
    rows = gather_rows(RowSlots(table, slots, torch.full_like(slots, 3)), stream=TARGET)
    tokens = draws(LAWS["flat"], rows)
    accept(fit(LAWS["flat"], tokens), serial_independence(tokens))


def test_a_law_that_is_off_by_a_hundredth_is_detected():
    tokens = draws(LAWS["steps"], rows_of(1))
    law = [float(p) for p in oracle.exact_law(oracle.masses(LAWS["steps"], 1.0), range(8))]
    biased = [law[0] + 0.01, law[1] - 0.01, *law[2:]]
    accept(fit(LAWS["steps"], tokens))
    detects(chi_square(np.bincount(tokens, minlength=8), biased))


def wins_of_the_tail(chunks: int) -> float:
    """P-value of how often one of 16 tokens wins that are 14 logits down: 56 times in 2**22 draws, in the mean."""
    wins = sum(int((draws([0.0] + [-14.0] * 16, rows_of.__wrapped__(5, start=k * N)) > 0).sum()) for k in range(chunks))
    return poisson_p_value(wins, chunks * N * 16.0 * math.exp(-14.0))


def test_tokens_14_logits_down_are_drawn_as_often_as_they_should():
    assert 16 * N == 2**22
    accept(wins_of_the_tail(16))


def test_noise_that_ends_too_early_is_detected(monkeypatch):
    monkeypatch.setattr("compiled_sampler.core.score.gumbel", lambda keys, ids: gumbel(keys, ids).clamp(max=14.0))
    detects(wins_of_the_tail(16))


def test_repeated_noise_is_detected():
    tokens = draws(LAWS["steps"], rows_of(1))[: N // 2]
    detects(serial_independence(tokens.repeat_interleave(2)))


def test_scores_are_the_oracles_within_the_error_of_the_noise(generator):
    row = torch.randn(600, generator=generator)
    inputs = sample_inputs(row[None], [SamplingParams(seed=9, temperature=0.7)], [4])
    rows = gather_rows(RowSlots(inputs.table, inputs.slots, inputs.positions), stream=TARGET)
    key = score_key(row[None], torch.arange(600, dtype=torch.int32), rows)[0]
    words = oracle.row_words(9, 4)
    wanted = torch.tensor([oracle.score(row.tolist(), i, 0.7, words) for i in range(600)], dtype=torch.float64)
    noise_error, roundings = 1.2e-4 + 7.2e-6 * math.log2(math.e), 2.0**-22 * wanted.abs().max()
    assert (key_float(key).double() - wanted).abs().max() <= noise_error + roundings


def test_keys_after_the_noise_are_masked_where_logits_are_and_those_of_finite_scores_below_infinity():
    x = torch.tensor([[-math.inf, math.nan, -3e38, 1e38, 3.4e38, math.inf]])
    first = torch.zeros(1, dtype=torch.int64)
    rows = gather_rows(RowSlots(slot_table([SamplingParams(seed=1)], 6), first, first), stream=TARGET)
    key = score_key(x, torch.arange(6, dtype=torch.int32), rows)
    assert (key == MASKED_KEY).tolist() == [[True, True, False, False, False, False]]
    assert (key >= POSITIVE_INFINITY_KEY).tolist() == [[False, False, False, False, True, True]]


@pytest.mark.parametrize("logit", [math.inf, 3e38])
def test_tokens_at_infinity_share_the_draws_equally(logit):
    logits = [0.0, logit, 1e30, logit, -math.inf, logit]
    result = race(torch.tensor([logits]).expand(N, -1), rows_of(1, temperature=0.5))
    accept(
        chi_square(
            np.bincount(result.token_ids, minlength=6), [0, Fraction(1, 3), 0, Fraction(1, 3), 0, Fraction(1, 3)]
        )
    )
    assert set(result.status.tolist()) == {int(RowStatus.POSITIVE_INFINITY)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 2, 127, 129, 511, 513, 2049])
def test_blocks_in_slices_that_name_their_winner_draw_what_a_second_look_draws(vocab_size, dtype):
    requests = [request for request in mixed_requests(vocab_size, 40, seed=1) if request.top_p == 1.0]
    mode = next(mode for mode in mode_table(vocab_size, "top_k") if mode.filters_min_p)
    x, slots, positions = mixed_batch(requests, mode, 64, dtype, seed=vocab_size)
    rows = gather_rows(RowSlots(slot_table(requests, vocab_size), slots, positions), stream=TARGET)
    for row_max in (None, x.float().nan_to_num(-math.inf, math.inf, -math.inf).amax(-1)):
        static = {"vocab_size": vocab_size, "block": 256}
        looked = draw_from_blocks(x, race_maxima(x, rows, row_max, None, **static), rows, row_max, None, **static)
        for block in (256, 512):
            static = {"vocab_size": vocab_size, "block": block}
            with for_a_gpu():
                named = race_maxima(x, rows, row_max, None, **static, names=True)
            drawn = draw_from_blocks(x, named, rows, row_max, None, **static)
            assert drawn.token_ids.equal(looked.token_ids)
            assert drawn.status.equal(looked.status)
