"""Noise: published vectors, golden vectors, accuracy against float64 and independence."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_sampler.core import noise
from compiled_sampler.core.noise import (
    ACCEPT,
    DRAFT,
    RESIDUAL,
    TARGET,
    XTC,
    exponential,
    gumbel,
    negative_log2,
    noise_keys,
    philox_4x32_10,
    token_bits,
)
from tests.oracles import oracle
from tests.oracles.goodness_of_fit import accept, chi_square, independence

WORD = 2**32
STREAMS = (TARGET, DRAFT, ACCEPT, RESIDUAL, XTC)
N = 2**20

# From the file kat_vectors of Random123 (Salmon et al.): counter, key, output.
PHILOX_VECTORS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD - 1,) * 4, (WORD - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def bits_of(seed, position, token_id, stream):
    """Production bits as an unsigned int."""
    keys = noise_keys(torch.tensor([(seed + 2**63) % 2**64 - 2**63]), torch.tensor([position]), stream)
    return token_bits(keys, torch.tensor(token_id, dtype=torch.int32)).item() % WORD


@pytest.mark.parametrize(("counter", "key", "wanted"), PHILOX_VECTORS)
def test_philox_gives_the_published_vectors(counter, key, wanted):
    assert oracle.philox_4x32_10(counter, key) == wanted
    tensors = [tuple(torch.tensor([word]) for word in group) for group in (counter, key)]
    assert tuple(int(word) for word in philox_4x32_10(*tensors)) == wanted


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**22 - 1), st.sampled_from(STREAMS))
def test_token_bits_equal_the_oracle(seed, position, token_id, stream):
    assert bits_of(seed, position, token_id, stream) == oracle.token_bits(seed, position, token_id, stream)


GOLDEN = [
    (0, 0, 0, TARGET, 0x0129B866),
    (0, 0, 1, TARGET, 0xDE92F9C7),
    (0, 1, 0, TARGET, 0xF76CBE29),
    (1, 0, 0, TARGET, 0xFB3BCF58),
    (42, 7, 151_935, TARGET, 0x27B64764),
    (42, 7, 151_935, DRAFT, 0xB90ABF11),
    (42, 7, 151_935, ACCEPT, 0x3FC43C4B),
    (42, 7, 151_935, RESIDUAL, 0xF5E27516),
    (-1, 0, 5, TARGET, 0x61B4E964),
    (-(2**63), 3, 128_255, TARGET, 0xEF1D1C88),
    (2**64 - 1, 0, 5, DRAFT, 0x876CFC1A),
    (2**63, 2**40, 4_194_303, TARGET, 0x98CD84A1),
    (0x0123456789ABCDEF, 2**40, 31_999, RESIDUAL, 0x89A48167),
    (-987_654_321, 2**63 - 1, 2, TARGET, 0xAAC6B2F1),
]


@pytest.mark.parametrize(("seed", "position", "token_id", "stream", "wanted"), GOLDEN)
def test_golden_vectors_fix_the_stream(seed, position, token_id, stream, wanted):
    assert noise.STREAM_VERSION == 1
    assert bits_of(seed, position, token_id, stream) == wanted


GOLDEN_DRAWS = [
    (1, [0x1BE0D283, 0xA407F37B, 0x49D2BC8A, 0xFD29F8C0]),
    (31, [0xD2901A1B, 0xC73CC9AC, 0x446E494E, 0x2D31F7B2]),
    (2**24 - 1, [0xD15A96C1, 0x96A331D2, 0x7DF1A205, 0x338C314D]),
]


@pytest.mark.parametrize(("draw_index", "wanted"), GOLDEN_DRAWS)
def test_golden_vectors_fix_the_further_draws_of_a_position(draw_index, wanted):
    keys = noise.noise_keys(torch.tensor([42]), torch.tensor([7]), TARGET, None, torch.tensor([draw_index]))
    assert [int(key) % WORD for key in keys] == wanted


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**24 - 1), st.sampled_from(STREAMS))
def test_a_draw_index_is_a_word_of_the_counter_and_0_is_a_draw_without_one(seed, position, draw_index, stream):
    seeds, positions = torch.tensor([(seed + 2**63) % 2**64 - 2**63]), torch.tensor([position])
    keys = noise.noise_keys(seeds, positions, stream, None, torch.tensor([draw_index]))
    words = oracle.row_words(seed, position, stream, draw_index)
    assert [int(key) % WORD for key in keys] == [words[0] | 1, *words[1:]]
    alone = noise.noise_keys(seeds, positions, stream)
    first = noise.noise_keys(seeds, positions, stream, None, torch.tensor([0]))
    assert all(map(torch.equal, first, alone))


@given(st.integers(0, 2**64 - 1), st.integers(64, 2**63 - 1), st.integers(0, 63), st.sampled_from((DRAFT, ACCEPT)))
def test_noise_of_a_block_is_keyed_by_its_position_and_the_offset(seed, position, offset, stream):
    seeds = torch.tensor([(seed + 2**63) % 2**64 - 2**63])
    keys = noise.noise_keys(seeds, torch.tensor([position]), stream, torch.tensor([offset]))
    words = oracle.row_words(seed, position - offset, stream + (offset << 8))
    assert [int(key) % 2**32 for key in keys] == [words[0] | 1, *words[1:]]
    assert noise.uniform(keys).item() == (2 * words[1] + 1) / 2**33


def test_streams_may_differ_by_row():
    seeds, positions = torch.tensor([3, 3]), torch.tensor([9, 9])
    both = noise.noise_keys(seeds, positions, torch.tensor([TARGET, RESIDUAL]))
    for row, stream in enumerate((TARGET, RESIDUAL)):
        alone = noise.noise_keys(seeds[:1], positions[:1], stream)
        assert [int(key[row]) for key in both] == [int(key) for key in alone]


def edge_bits():
    """Int32 bits around every power of two of u and 1 - u, and a million random ones."""
    powers = [2**k + d for k in range(33) for d in range(-40, 41)]
    edges = torch.tensor([b % WORD for b in powers] + [-b % WORD for b in powers])
    return torch.cat((edges, torch.randint(0, WORD, (N,)))).to(torch.int64)


def float64_exponential(bits):
    """``-log2(1 - u)`` in float64 for unsigned bits."""
    odd = bits.numpy() | 1
    return np.where(odd < WORD // 2, -np.log1p(-odd / WORD) / math.log(2.0), -np.log2((WORD - odd) / WORD))


def signed(bits):
    """Unsigned int64 bits as int32."""
    return ((bits ^ 2**31) - 2**31).to(torch.int32)


def test_exponential_is_within_its_stated_relative_error_and_range():
    """Also at the winning tail, where it keeps every digit."""
    tail = torch.arange(2**14)
    for bits, error in ((edge_bits(), 7.2e-6), (tail, 2e-7)):
        values = exponential(signed(bits))
        assert np.abs(values.numpy().astype(np.float64) / float64_exponential(bits) - 1.0).max() < error
        assert 3.3e-10 <= values.min() < 3.4e-10
        assert bits is tail or 31.9 < values.max() <= 32.0


def test_negative_log2_is_within_its_stated_absolute_error_and_exact_at_powers_of_two():
    x = torch.cat((torch.linspace(1.6e-10, 33.0, N), torch.exp2(torch.rand(N) * 40.0 - 33.0), 0.5 + torch.rand(N)))
    wanted = -np.log2(x.numpy().astype(np.float64))
    assert np.abs(negative_log2(x).numpy() - wanted).max() < 1.2e-4
    powers = torch.arange(-33.0, 6.0)
    assert torch.equal(negative_log2(torch.exp2(powers)), -powers)


def test_gumbel_is_in_its_stated_range_for_all_extremes_and_follows_its_law():
    extremes = negative_log2(exponential(signed(edge_bits())))
    assert (extremes.min() >= -5.0, extremes.max() <= 31.5, bool(extremes.isfinite().all())) == (True, True, True)
    keys = noise_keys(torch.tensor([1]), torch.tensor([2]), TARGET)
    values = gumbel(keys, torch.arange(N, dtype=torch.int32)).double()
    cells = torch.histc(torch.exp2(-torch.exp2(-values)), 1000, 0.0, 1.0)
    accept(chi_square(cells, np.full(1000, 1e-3)))


def worst_race(own, other):
    """Largest error of the probability that a token beats another, at ratios of weights from 2**-8 to 2**8."""
    levels = (np.arange(len(own)) + 0.5) / len(own)
    ratios = np.linspace(-8.0, 8.0, 26)
    won = [1.0 - np.interp(other - ratio, own, levels, left=0.0, right=1.0).mean() for ratio in ratios]
    return float(np.abs(won - 1.0 / (1.0 + np.exp2(-ratios))).max())


def test_errors_of_the_polynomials_cancel_in_the_law_of_a_race():
    """By quadrature over evenly spaced bits: against one other token, and against the best of 2**17 equal ones."""
    levels = (np.arange(N) + 0.5) / N
    smallest = -np.expm1(np.log1p(-levels) / 2**17)  # quantiles of the smallest of 2**17 uniform numbers
    words = torch.from_numpy(np.floor(np.stack([levels, smallest]) * WORD).astype(np.int64))
    own, best = negative_log2(exponential(signed(words))).double().numpy()
    own.sort()
    assert worst_race(own, own) < 1e-7
    assert worst_race(own, best - 17) < 1e-7
    assert worst_race(own * 1.0001, own * 1.0001) > 1e-6  # the control: noise that is off by 1e-4 is seen


@pytest.mark.parametrize("shift", [0, 12, 24])
@pytest.mark.parametrize("stream", [*STREAMS, "neighbouring seeds"])
def test_bits_are_uniform_over_positions_and_neighbouring_seeds(stream, shift):
    seeds, positions = torch.full((N,), 3), torch.arange(N)
    if stream == "neighbouring seeds":
        seeds, positions, stream = positions - N // 2, torch.zeros_like(seeds), TARGET
    bits = token_bits(noise_keys(seeds, positions, stream), torch.tensor(17, dtype=torch.int32)).to(torch.int64)
    accept(chi_square(np.bincount(bits >> shift & 255, minlength=256), np.full(256, 1 / 256)))


@functools.cache
def keys_of_positions(seed, stream=TARGET, count=N):
    """The keys of consecutive positions: Philox costs more than the bits of a token."""
    positions = torch.arange(count)
    return noise_keys(torch.tensor([seed]).expand_as(positions), positions, stream)


def high_bits(keys, token_id, count):
    bits = token_bits(keys, torch.tensor(token_id, dtype=torch.int32)) >> (32 - count)
    return bits & (2**count - 1)


PAIRS = [(0, 1), (0, 2), (0, 16), (0, 4096), (0, 2**15), (0, 2**16), (0, 2**17), (100, 100 ^ 2**15), (5, 1234)]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_bits_of_two_tokens_are_independent_over_positions(first, second):
    keys = keys_of_positions(42, count=4 * N)
    accept(independence(high_bits(keys, first, 8), high_bits(keys, second, 8), shape=(256, 256)))


@pytest.mark.parametrize("ids", [(0, 1, 2), (0, 2**15, 2**16), (0, 2**16, 2**17), (7, 99, 150_000)])
def test_bits_of_three_tokens_are_independent_over_positions(ids):
    keys = keys_of_positions(42, count=4 * N)
    first, second, third = (high_bits(keys, token_id, 5) for token_id in ids)
    accept(independence(first * 32 + second, third, shape=(1024, 32)))


@pytest.mark.parametrize("lag", [1, 2, 64])
def test_bits_of_consecutive_positions_are_independent(lag):
    bits = high_bits(keys_of_positions(42), 7, 6)
    accept(independence(bits[:-lag], bits[lag:], shape=(64, 64)))


@pytest.mark.parametrize("other", [43, 42 + 2**32, 42 - 2**63])
def test_bits_of_neighbouring_seeds_are_independent(other):
    bits = [high_bits(keys_of_positions(seed), 7, 6) for seed in (42, other)]
    accept(independence(*bits, shape=(64, 64)))


@pytest.mark.parametrize(("a", "b"), [(a, b) for a in STREAMS for b in STREAMS if a < b])
def test_streams_are_independent(a, b):
    bits = [high_bits(keys_of_positions(42, stream), 7, 6) for stream in (a, b)]
    accept(independence(*bits, shape=(64, 64)))
