"""Filters of whole rows drop what the slow truth drops, on every path, and leave every other row alone."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from compiled_sampler.core.mass import MASS_BITS, exp2_mass, scaled_logits
from compiled_sampler.core.order import order_key
from compiled_sampler.core.stage import Run
from compiled_sampler.edits.row_filters import PLess, TopNSigma, TypicalP
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.modes import mode_table
from compiled_sampler.passes.row_filters import (
    NUM_DIGITS,
    MassUnits,
    descending,
    digit_masses,
    distance_sums,
    distance_units,
    first_steepest,
    logit_ends,
    longest_kept,
    mass_sums,
    p_less_cut,
    typical_search,
    with_digit,
)
from compiled_sampler.pipeline.schedule import row_bytes
from tests.builders.filters import filtered_by_hand, filtered_by_stages, hard_rows, same_bits
from tests.chunked import chunks_of
from tests.oracles import oracle_filters
from tests.tiers import tiers
from tests.torch_states import flushing
from tools.bench.memory import scratch_bytes
from tools.kernels.launches import for_a_gpu

FILTERS = [
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 0.25},
    {"p_less": True},
    {"p_less": True, "temperature": 3.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    {"xtc_probability": 0.5, "xtc_threshold": 0.0, "temperature": 0.6},
    {"typical_p": 0.3},
    {"typical_p": 0.9, "temperature": 2.0},
    {"top_n_sigma": 2.0, "p_less": True, "typical_p": 0.95, "xtc_probability": 1.0, "temperature": 1.5},
    {"p_less": True, "top_k": 1, "temperature": 2.0},
    {"min_k": True},
    {"min_k": True, "min_k_tau": 0.0, "temperature": 0.5},
    {"min_k": True, "min_k_tau": 100.0},
    {"top_n_sigma": 2.0, "min_k": True, "min_k_tau": 50.0, "p_less": True, "xtc_probability": 1.0},
]
BATCHES = [*([each] for each in FILTERS), [{}, {"temperature": 0.0, "p_less": True}, *FILTERS[::-1]]]
"""Each filter alone, and as many as there are hard rows beside rows that none filters."""


def of_rows(batch, count):
    """A request for each row, of each of a batch in turn."""
    return [batch[row % len(batch)] for row in range(count)]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    tiers([(129, torch.float32)], [(1, torch.float32), (2, torch.bfloat16), (127, torch.bfloat16)]),
)
@pytest.mark.parametrize("batch", range(len(BATCHES)))
def test_hard_rows_keep_what_the_slow_truth_keeps(batch, dtype, vocab_size):
    logits = hard_rows(vocab_size, dtype)
    given = of_rows(BATCHES[batch], len(logits))
    assert same_bits(filtered_by_stages(logits, given), filtered_by_hand(logits, given))


@pytest.mark.parametrize("given", FILTERS)
def test_each_filter_drops_something_and_keeps_something(given):
    logits = hard_rows(129)[:1]
    if 0.0 < given.get("xtc_probability", 0.0) < 1.0:
        given = {**given, "xtc_probability": 1.0}
    made = filtered_by_stages(logits, [given])
    assert 0 < int(made.isfinite().sum()) < 129


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    tiers([(129, torch.float32)], [(2, torch.float32), (127, torch.bfloat16)]),
)
def test_compiled_stages_drop_the_same(vocab_size, dtype):
    logits = hard_rows(vocab_size, dtype)
    given = of_rows(BATCHES[-1], len(logits))
    assert same_bits(filtered_by_stages(logits, given, CompiledStages()), filtered_by_stages(logits, given))


@pytest.mark.full
def test_long_rows_keep_the_same_in_any_chunks():
    logits = 2.0 * torch.randn(3, 20_000, generator=torch.Generator().manual_seed(1))
    given = [FILTERS[0], FILTERS[3], FILTERS[5]]
    made = filtered_by_stages(logits, given)
    assert same_bits(made[:2], filtered_by_hand(logits[:2], given[:2]))
    assert same_bits(made, filtered_by_stages(logits, given, CompiledStages()))
    alone = [filtered_by_stages(logits[row : row + 1], [{"seed": row, **each}]) for row, each in enumerate(given)]
    assert same_bits(made, torch.cat(alone))


def test_no_denormal_mode_changes_what_is_kept():
    logits = torch.cat([hard_rows(129), hard_rows(129) * 2.0**-125, hard_rows(127).repeat(1, 2)[:, :129] * 2.0**-100])
    given = of_rows(FILTERS, len(logits))
    wanted = filtered_by_stages(logits, given)
    with flushing():
        made = filtered_by_stages(logits, given)
    assert same_bits(made, wanted)


@pytest.mark.parametrize("given", [{"top_n_sigma": 1.3}, {"min_k": True, "min_k_tau": 40.0}], ids=str)
def test_no_temperature_changes_what_filters_of_logits_keep(given):
    logits = hard_rows(129)
    wanted = filtered_by_stages(logits, [given] * len(logits))
    for temperature in (1e-5, 0.3, 4.0, 1e30):
        assert same_bits(filtered_by_stages(logits, [{**given, "temperature": temperature}] * len(logits)), wanted)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("vocab_size", [2, 129, 500])
def test_the_deviation_is_that_of_the_logits(vocab_size, scale):
    """Within a unit, ``2**-30`` of the range, and ``2**-24`` of the root mean square distance; and once rounded."""
    x = scale * torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(2))
    x[3, 0], x[4], x[5, : vocab_size // 2] = -40.0 * scale, 1.0, -math.inf
    row_max, steps = distance_units(*logit_ends(x, vocab_size=vocab_size, block=64))
    sums = distance_sums(x, row_max, steps, vocab_size=vocab_size, block=64)
    given = TopNSigma(torch.ones(6, dtype=torch.float64))
    found = longest_kept(sums, row_max, steps, torch.arange(6), given).tolist()
    for row, deviation in zip(x.tolist(), found, strict=True):
        values = [Fraction(each) for each in row if each > -math.inf]
        mean = sum(values) / len(values)
        wanted = math.sqrt(sum((each - mean) ** 2 for each in values) / len(values))
        square = math.sqrt(sum((max(values) - each) ** 2 for each in values) / len(values))
        allowed = 2.0**-30 * float(max(values) - min(values)) + 2.0**-24 * (square + wanted)
        assert abs(deviation - wanted) <= allowed


@pytest.mark.parametrize("temperature", [0.5, 1.0, 8.0])
@pytest.mark.parametrize("vocab_size", [2, 129, 5000])
def test_the_bound_of_p_less_is_the_sum_of_squared_probabilities(vocab_size, temperature):
    """Within 2.5e-7 of itself for 5,000 tokens, in the law of integer masses; a thousandth of that would fail."""
    x = 3.0 * torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(3))
    units = MassUnits(x.amax(-1), torch.full((8,), math.log2(math.e) / temperature))
    sums = mass_sums(x, units, vocab_size=vocab_size, block=64, squares=True)
    cut = p_less_cut(sums, units.row_max, torch.arange(8), PLess(torch.ones(8, dtype=torch.int32)))
    errors = []
    masses = exp2_mass(scaled_logits(x, x.amax(-1, keepdim=True), units.scale[:, None]))
    for row, found in zip(masses, cut.tolist(), strict=True):
        mass, total = row.tolist(), int(row.sum())
        wanted = Fraction(sum(each * each for each in mass), total)
        errors.append(abs(found / wanted - 1))
        assert found <= 2**MASS_BITS
    assert max(errors) < 2.5e-7
    assert vocab_size < 129 or max(errors) > 2.5e-10


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100, 129])
def test_equally_likely_tokens_stay_together(count):
    """As many of 129 as ``count``: p-less compares 1 / count with itself, a deviation or a range of 0 keeps all."""
    logits = torch.full((7, 129), -math.inf)
    logits[:, :count] = 2.5
    given = [{"p_less": True}, {"top_n_sigma": 0.1}, {"p_less": True, "top_n_sigma": 0.1, "temperature": 0.01}]
    given += [{"xtc_probability": 1.0, "xtc_threshold": 1.0 / max(count, 2)}]
    given += [{"typical_p": 0.01}, {"min_k": True, "min_k_tau": 0.0}, {"min_k": True, "min_k_tau": 1e300}]
    made = filtered_by_stages(logits, given)
    assert same_bits(made[[0, 1, 2, 4, 5, 6]], logits[[0, 1, 2, 4, 5, 6]])
    assert made[3].isfinite().nonzero().flatten().tolist() == [count - 1]


@pytest.mark.parametrize("share", [1e-9, 0.3, 0.9, 0.999999, 1.0 - 2.0**-53])
def test_typical_p_of_long_rows_is_what_sorted_distances_say(share):
    """Of flat rows too, whose masses sum to more than float64 holds, and of rows in which few tokens may count."""
    count, generator = 20_000, torch.Generator().manual_seed(5)
    x = torch.randn(9, count, generator=generator) * torch.tensor([0.0, 1e-6, 1e-3, 0.1, 1, 3, 6, 10, 1])[:, None]
    x[5, 7], x[8] = 40.0, x[8].round()
    units = MassUnits(x.amax(-1), torch.full((9,), 1.5))
    sums = mass_sums(x, units, vocab_size=count, block=500, moment=True)
    given = TypicalP(torch.full((9,), share, dtype=torch.float64))
    search = typical_search(sums, units, torch.arange(9), given, vocab_size=count)
    wanted, mean = search.wanted, search.mean[:, None]
    for _ in range(NUM_DIGITS):
        search = with_digit(search, digit_masses(x, search, vocab_size=count))
    t = scaled_logits(x, units.row_max[:, None], units.scale[:, None])
    distance, order = (torch.where(t > -(2.0**-MASS_BITS), 0.0, t) - mean).abs().sort(-1)
    before = exp2_mass(t).gather(1, order).cumsum(-1)
    last = distance.gather(1, (before < wanted[:, None]).sum(-1, keepdim=True)).flatten()
    assert torch.equal(search.prefix, last.view(torch.int32))


def test_the_slow_truth_is_that_of_the_papers():
    """By hand: a deviation of 1.7; squares of probabilities that sum to 0.352; the last of two and of three choices.

    Of min-k drops of 0.5, 4.5 and 1 over ranks 1, 2 and 3, and a range of 6, of which tau 18 has three.
    """
    assert oracle_filters.near_the_largest([0.0, 1.0, 4.0], 1.0) == [2]
    assert oracle_filters.near_the_largest([0.0, 1.0, 4.0], 2.0) == [1, 2]
    halves = [math.log(8), math.log(4), math.log(3), math.log(1)]  # 1/2, 1/4, 3/16, 1/16; squares sum to 0.352
    assert oracle_filters.as_likely_as_a_repeat(halves, 1.0) == [0]
    assert oracle_filters.typical(halves, 1.0, 0.2) == [1]  # surprises of 1, 2, 2.4 and 4 bits about an entropy of 1.7
    assert oracle_filters.typical(halves, 1.0, 0.4) == [0, 1]
    assert oracle_filters.typical(halves, 1.0, 0.8) == [0, 1, 2]
    assert oracle_filters.without_top_choices(halves, 1.0, 0.1) == [2, 3]
    assert oracle_filters.without_top_choices(halves, 1.0, 0.3) == [0, 1, 2, 3]
    row = [-1.0, 5.0, 4.5, 0.0]
    assert oracle_filters.above_the_cliff(row, 0.0) == [1, 2]
    assert oracle_filters.above_the_cliff(row, 17.99) == [1, 2]
    assert oracle_filters.above_the_cliff(row, 18.0) == [1, 2, 3]
    assert oracle_filters.above_the_cliff([*row, -math.inf], 24.0) == [0, 1, 2, 3]
    assert oracle_filters.above_the_cliff([3.0, 2.0, 0.0], 0.0) == [0]  # drops of 1 and 2 are as steep: the first
    assert oracle_filters.above_the_cliff([7.0], 0.0) == [0]


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


def test_tokens_with_the_logit_of_the_last_rank_stay():
    logits = torch.tensor([[4.0, 3.0, 3.0, 3.0, 2.5, 2.5, 0.0]])
    for tau, count in ((0.0, 1), (7.9, 1), (8.0, 4), (16.0, 4), (19.9, 4), (20.0, 6), (24.0, 6), (28.0, 7)):
        assert int(filtered_by_stages(logits, [{"min_k": True, "min_k_tau": tau}]).isfinite().sum()) == count


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_chunks_and_the_sort_of_a_gpu_change_nothing_of_min_k(rows):
    logits = torch.cat([hard_rows(129), hard_rows(129).flip(1)])
    given = [{"min_k": True, "min_k_tau": 9.0 * (row % 4)} for row in range(len(logits))]
    wanted = filtered_by_stages(logits, given)

    fused = Run(fuses=True)
    with for_a_gpu():
        assert same_bits(filtered_by_stages(logits, given, fused), wanted)
    with chunks_of(rows):
        assert same_bits(filtered_by_stages(logits, given, fused), wanted)
        with for_a_gpu():
            assert same_bits(filtered_by_stages(logits, given, fused), wanted)
    keys = order_key(logits)
    assert torch.equal(descending(keys), keys.sort(-1, descending=True).values)


def test_the_scratch_of_min_k_is_below_that_of_a_row():
    vocab_size, rows = 2000, 96
    logits, given = torch.randn(rows, vocab_size), [{"min_k": True}] * rows
    allowed = row_bytes(mode_table(vocab_size, "top_k")[0], triton=False, fused=False, edited=True)
    made = 4 * vocab_size  # the filtered copies of all rows, which are results
    for most in (rows, rows // 4):
        with chunks_of(most):
            held = scratch_bytes(lambda: filtered_by_stages(logits, given), logits.device)
        assert held <= most * allowed + rows * made
    assert held > rows * made
