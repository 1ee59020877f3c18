"""The law of a row: exact reciprocals, masses of probabilities, and the probabilities that ``probs`` returns."""

import itertools
import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_sampler.core.arithmetic import reciprocal
from compiled_sampler.core.mass import MASS_BITS, exp2_mass, scaled_logits
from compiled_sampler.core.order import order_key, pack
from compiled_sampler.core.rows import RowSlots, take
from compiled_sampler.core.stage import call
from compiled_sampler.edits.masks import MaskedLogits, masked
from compiled_sampler.params import SamplingParams
from compiled_sampler.passes.kept import Cut, probability_mass, weight, weight_units
from compiled_sampler.passes.law import sum_law
from compiled_sampler.passes.logprobs import law_in_blocks, tokens_before
from compiled_sampler.passes.maxima import order_maxima, order_maxima_of
from compiled_sampler.passes.shards import law_keys_of_shard, law_sums_of_shard, words_of_shard
from compiled_sampler.pipeline.law import probability_step, unfiltered_law
from compiled_sampler.pipeline.schedule import StepRun, schedule_for
from tests.builders.edits import random_mask
from tests.builders.filters import hard_rows
from tests.builders.inputs import BASES, VOCAB_SIZES, full_mode, mode_table, sample_inputs, slot_table
from tests.oracles import oracle

FILTERS = [
    {},
    {"temperature": 0.0},
    {"top_k": 1},
    {"temperature": 0.3},
    {"top_k": 5, "temperature": 1.7},
    {"top_k": 70},
    {"top_p": 0.6},
    {"top_p": 0.99},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8},
]
REQUESTS = [SamplingParams(seed=i, **filters) for i, filters in enumerate(FILTERS)]


@given(st.floats(1.0, 2.0, exclude_max=True), st.integers(-100, 110))
def test_reciprocals_are_within_two_to_the_minus_50(mantissa, exponent):
    x = math.ldexp(mantissa, exponent)
    y = float(reciprocal(torch.tensor([x], dtype=torch.float64)))
    assert abs(Fraction(x) * Fraction(y) - 1) <= Fraction(1, 2**50)


STRANGE = torch.tensor([0.0, -0.0, -1.0, 2.0, 1e-45, 2.0**-40, 1.5 * 2.0**-40, torch.inf, -torch.inf, torch.nan])


@pytest.mark.parametrize("min_p", [None, 0.05])
@pytest.mark.parametrize("name", ["all", "threshold", "only", "probabilities"])
def test_units_are_the_weights(name, min_p):
    x = torch.cat([8.0 * torch.randn(3, 2000), STRANGE.expand(3, -1)], 1)
    x[1:, -3] = 0.0  # without a token of infinite weight
    ids = torch.arange(x.shape[1], dtype=torch.int32)
    log_min_p = None if min_p is None else torch.full((3,), math.log2(min_p))
    threshold = pack(order_key(x[:, 7]), torch.tensor(7, dtype=torch.int32)) if name == "threshold" else None
    only = torch.tensor([-1, 5, 2001]) if name == "only" else None
    cut = (
        None if name == "probabilities" else Cut(x.nan_to_num(-9.0).amax(-1), x.new_ones(3), log_min_p, threshold, only)
    )
    units = weight_units(x, ids, cut)
    assert units.dtype == torch.float32
    assert units.to(torch.int64).equal(weight(x, ids, cut))
    assert units.to(torch.int64).any()


@pytest.mark.parametrize("vocab_size", [5, 64, 100, 300])
def test_the_law_of_some_rows_is_that_of_the_rows(vocab_size):
    mode = next(mode for mode in mode_table(vocab_size, "top_k") if mode.name == "no_filter")
    params = [SamplingParams(seed=1), SamplingParams(seed=2, temperature=0.0), SamplingParams(seed=3, temperature=0.4)]
    x = 5.0 * torch.randn(12, vocab_size)
    x[2, 1:], x[5, ::2], x[6, 0], x[7], x[10] = -torch.inf, torch.nan, torch.inf, -torch.inf, torch.nan
    slots = torch.tensor([0, 1, 2] * 3 + [1, 1, -1])
    table, row_ids = slot_table(params, vocab_size), torch.tensor([11, 0, 7, 7, 5, 6, 2, 1, 10])
    first = [order_maxima(x, vocab_size=vocab_size, block=4, names=True)]
    first.append(order_maxima_of(x, row_ids, vocab_size=vocab_size, block=4))
    run = StepRun(call, schedule_for(mode, 12, x.device))
    whole, some = (
        sum_law(unfiltered_law(run, x, blocks, RowSlots(table, of, of), which))
        for blocks, of, which in zip(first, (slots, slots[row_ids]), (None, row_ids), strict=True)
    )
    assert all(a.equal(b) for a, b in zip(some[1:3], take(whole, row_ids)[1:3], strict=True))
    assert some.status[1:].equal(whole.status[row_ids][1:])  # padding has no status
    sums = [weight(row[None], torch.arange(vocab_size), take(whole.cut, torch.tensor([r]))) for r, row in enumerate(x)]
    assert whole.total.tolist() == [int(each.sum()) for each in sums]


def test_the_reciprocal_of_nothing_is_nothing():
    assert reciprocal(torch.zeros(3, dtype=torch.float64)).tolist() == [0.0] * 3


@given(st.floats(0.0, 1.0, width=32))
def test_masses_of_probabilities_are_cut_towards_zero(p):
    assert int(probability_mass(torch.tensor([p]))) == math.floor(Fraction(p) * 2**MASS_BITS)


def test_strange_probabilities_weigh_nothing_and_large_ones_one():
    p = torch.tensor([math.nan, -0.5, -math.inf, -0.0, 1.5, math.inf])
    assert probability_mass(p).tolist() == [0, 0, 0, 0, 2**MASS_BITS, 2**MASS_BITS]


def rows(vocab_size: int, generator: torch.Generator) -> torch.Tensor:
    return (2.0 * torch.randn(len(REQUESTS), vocab_size, generator=generator) * 16).round() / 16


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES[:-1])
def test_probabilities_are_the_exact_law_rounded_and_zero_where_a_filter_drops(vocab_size, base, generator):
    inputs = sample_inputs(rows(vocab_size, generator), REQUESTS)
    found = probability_step(full_mode(vocab_size, base), inputs).probabilities
    for logits, filters, p in zip(inputs.logits, FILTERS, found, strict=True):
        keep = oracle.reference_keep(logits.tolist(), top_p_base=base, **filters)
        scale = torch.tensor(math.log2(math.e) / (filters.get("temperature") or 1.0))
        masses = exp2_mass(scaled_logits(logits, logits.max(), scale)).tolist()
        law = oracle.exact_law(masses, keep)
        assert p.nonzero().flatten().tolist() == sorted(i for i in keep if masses[i])
        assert all(abs(Fraction(a) - b) <= b * Fraction(1, 2**23) for a, b in zip(p.tolist(), law, strict=True))
        assert abs(p.double().sum() - 1.0) <= 1e-6


@pytest.mark.parametrize("bounds", [(0, 1300), (0, 1, 700, 1300), (0, 512, 513, 1300)])
def test_shards_tell_the_law_of_whole_rows_with_masks_beside_them(bounds):
    rows, slots = hard_rows(1300), torch.arange(12)
    mask = random_mask(random.Random(1), len(rows), 1300)
    whole, tokens = masked(rows, mask, slots, None, vocab_size=1300), rows.nan_to_num().argmin(1)
    law = law_in_blocks(whole, None, vocab_size=1300, moment=True, by_bits=False)
    shards = []
    for start, stop in itertools.pairwise(bounds):
        width = stop - start
        words = words_of_shard(mask, slots, None, vocab_size=1300, start=start, width=width)
        static = {"vocab_size": width, "start": start, "num_blocks": 3}
        shards.append((MaskedLogits(rows[:, start:stop], words, slots, None), static))
    told = [law_keys_of_shard(logits, (tokens[:, None],), **static) for logits, static in shards]
    keys = torch.stack(told).amax(0)
    sums = sum(
        law_sums_of_shard(logits, keys, None, tokens, **static, moment=True, rank=True) for logits, static in shards
    )
    assert isinstance(sums, torch.Tensor)
    assert torch.equal(keys[:, :3], law.keys)
    assert torch.equal(sums[:, :3], law.masses)
    assert torch.equal(sums[:, 3:6], law.moments)
    before = tokens_before(whole, tokens, vocab_size=1300, block=1300).sum(1)
    is_visible = whole.gather(1, tokens[:, None])[:, 0] > -torch.inf
    assert is_visible.any()
    assert torch.equal(sums[is_visible, 6], before[is_visible])
