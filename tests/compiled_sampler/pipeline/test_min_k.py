"""Min-k keeps the tokens before the cliff: exactly, whatever the ranks, the scale of the logits and the chunks."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from compiled_sampler.core.order import order_key
from compiled_sampler.edits.min_k import MinK
from compiled_sampler.modes import mode_table
from compiled_sampler.passes.cliff import cliff_logit, descending, first_steepest
from compiled_sampler.pipeline.schedule import row_bytes
from tests.builders.filters import filtered_by_hand, filtered_by_stages, hard_rows, same_bits
from tests.chunked import chunks_of
from tests.oracles import oracle_filters
from tools.bench.memory import scratch_bytes
from tools.kernels.launches import for_a_gpu

MOST_RANKS = 2**22 - 1


def hard_pairs(count):
    """Pairs of (drop, rank) whose quotients differ by as little as they can, or not at all; the rank ascends."""
    source = np.random.default_rng(5)
    while count:
        low, high = sorted(int(each) for each in source.integers(2, MOST_RANKS + 1, 2))
        if math.gcd(low, high) > 1:
            continue
        for apart in (-1, 0, 1):  # first * high - second * low
            first = apart * pow(high, -1, low) % low or low
            second = (first * high - apart) // low
            times = (2**24 - 1 - second) // high
            first, second = first + times * low, second + times * high
            if times >= 0 < second:
                count = max(count - 1, 0)
                yield (first, low), (second, high)


def test_the_first_of_the_largest_quotients_is_found_however_near_the_others_are():
    pairs = list(hard_pairs(600))
    quotients = [[Fraction(*each) for each in pair] for pair in pairs]
    assert {(a > b) - (a < b) for a, b in quotients} == {-1, 0, 1}
    assert any(0 < abs(a - b) < a * Fraction(1, 2**45) for a, b in quotients)
    assert any(np.float32(a) == np.float32(b) for a, b in quotients if a != b)  # the control: floats do not tell them
    wanted = [pair[b > a][1] for pair, (a, b) in zip(pairs, quotients, strict=True)]
    for scale in (2.0**-126, 1.0, 2.0**103):
        drops = torch.tensor([[drop for drop, _ in pair] for pair in pairs], dtype=torch.float32) * scale
        ranks = torch.tensor([[rank for _, rank in pair] for pair in pairs], dtype=torch.int32)
        found = [int(first_steepest(*each)) for each in zip(drops[:, None], ranks, strict=True)]
        assert found == wanted


@pytest.mark.parametrize(("low", "high"), [(1, 2), (2, 3), (3, 7), (48, 49), (100, 4999), (3000, 4500)])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_of_equally_steep_drops_the_first_counts(low, high, more):
    """Two drops in a row of 5,000 tokens, in proportion to their ranks but for a unit in the last place."""
    logits = torch.full((1, 5000), -float(1000 * high + more))
    logits[0, :high], logits[0, :low] = 0.0, 1000.0 * low
    made = filtered_by_stages(logits, [{"min_k": True, "min_k_tau": 0.0}])
    assert int(made.isfinite().sum()) == (high if more > 0 else low)
    assert same_bits(made, filtered_by_hand(logits, [{"min_k": True, "min_k_tau": 0.0}]))


@pytest.mark.parametrize("tau", [0.0, 3.0, 40.0])
def test_no_temperature_changes_what_is_kept(tau):
    logits = hard_rows(129)
    wanted = filtered_by_stages(logits, [{"min_k": True, "min_k_tau": tau}] * len(logits))
    for temperature in (1e-5, 0.3, 4.0, 1e30):
        given = {"min_k": True, "min_k_tau": tau, "temperature": temperature}
        assert same_bits(filtered_by_stages(logits, [given] * len(logits)), wanted)


def test_logits_divided_by_a_temperature_before_keep_the_same_but_for_tau():
    """By powers of two, so exactly; tau is in units of the logits, so it is divided too."""
    logits = 3.0 * torch.randn(40, 129, generator=torch.Generator().manual_seed(7))
    for tau, shift in itertools.product((0.0, 100.0), (-4, 1, 3)):
        kept = filtered_by_stages(logits, [{"min_k": True, "min_k_tau": tau}] * 40).isfinite()
        scaled = [{"min_k": True, "min_k_tau": tau * 2.0**shift}] * 40
        assert torch.equal(filtered_by_stages(logits * 2.0**shift, scaled).isfinite(), kept)
        if tau:
            unscaled = [{"min_k": True, "min_k_tau": tau}] * 40
            assert not torch.equal(filtered_by_stages(logits * 2.0**shift, unscaled).isfinite(), kept)


@pytest.mark.parametrize("tau", [0.0, 1e-300, 3.0, 1e300])
@pytest.mark.parametrize("value", [0.0, -0.0, 2.5, -3e38, 1e-40])
def test_equal_logits_all_stay(value, tau):
    logits = torch.full((2, 129), value)
    logits[1, 7:] = -math.inf
    assert same_bits(filtered_by_stages(logits, [{"min_k": True, "min_k_tau": tau}] * 2), logits)


def test_tokens_with_the_logit_of_the_last_rank_stay():
    logits = torch.tensor([[4.0, 3.0, 3.0, 3.0, 2.5, 2.5, 0.0]])
    for tau, count in ((0.0, 1), (7.9, 1), (8.0, 4), (16.0, 4), (19.9, 4), (20.0, 6), (24.0, 6), (28.0, 7)):
        assert int(filtered_by_stages(logits, [{"min_k": True, "min_k_tau": tau}]).isfinite().sum()) == count


def test_a_mask_is_no_drop_and_a_finite_one_is():
    """The order ends at the last logit that is not -inf; -1e9, a mask of some engines, is a logit like others."""
    logits = torch.tensor([[5.0, 4.5, 1.0, 0.5, -math.inf, -math.inf]]).repeat(2, 1)
    logits[1, 4:] = -1e9
    made = filtered_by_stages(logits, [{"min_k": True, "min_k_tau": 0.0}] * 2)
    assert made.isfinite().sum(-1).tolist() == [2, 4]


def test_padding_and_requests_without_the_filter_keep_all():
    ordered = order_key(torch.tensor([[9.0, 1.0, 0.5]] * 4))
    given = MinK(torch.tensor([0.0, -1.0], dtype=torch.float64))
    assert cliff_logit(ordered, torch.tensor([0, 1, -1, 0]), given).tolist() == [9.0, -math.inf, -math.inf, 9.0]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_chunks_and_the_sort_of_a_gpu_change_nothing(rows):
    logits = torch.cat([hard_rows(129), hard_rows(129).flip(1)])
    given = [{"min_k": True, "min_k_tau": 9.0 * (row % 4)} for row in range(len(logits))]
    wanted = filtered_by_stages(logits, given)

    def fused(stage, /, *tensors, **static):
        return stage(*tensors, **static)

    fused.fuses = True
    with for_a_gpu():
        assert same_bits(filtered_by_stages(logits, given, fused), wanted)
    with chunks_of(rows):
        assert same_bits(filtered_by_stages(logits, given, fused), wanted)
        with for_a_gpu():
            assert same_bits(filtered_by_stages(logits, given, fused), wanted)
    keys = order_key(logits)
    assert torch.equal(descending(keys), keys.sort(-1, descending=True).values)


def test_the_scratch_of_the_filter_is_below_that_of_a_row():
    vocab_size, rows = 2000, 96
    logits, given = torch.randn(rows, vocab_size), [{"min_k": True}] * rows
    allowed = row_bytes(mode_table(vocab_size, "top_k")[0], triton=False, fused=False, edited=True)
    made = 4 * vocab_size  # the filtered copies of all rows, which are results
    for most in (rows, rows // 4):
        with chunks_of(most):
            held = scratch_bytes(lambda: filtered_by_stages(logits, given), logits.device)
        assert held <= most * allowed + rows * made
    assert held > rows * made


def test_the_slow_truth_is_that_of_the_paper():
    """By hand: drops of 0.5, 4.5 and 1 over ranks 1, 2 and 3; a range of 6, of which tau 18 has three."""
    row = [-1.0, 5.0, 4.5, 0.0]
    assert oracle_filters.above_the_cliff(row, 0.0) == [1, 2]
    assert oracle_filters.above_the_cliff(row, 17.99) == [1, 2]
    assert oracle_filters.above_the_cliff(row, 18.0) == [1, 2, 3]
    assert oracle_filters.above_the_cliff([*row, -math.inf], 24.0) == [0, 1, 2, 3]
    assert oracle_filters.above_the_cliff([3.0, 2.0, 0.0], 0.0) == [0]  # drops of 1 and 2 are as steep: the first
    assert oracle_filters.above_the_cliff([7.0], 0.0) == [0]
