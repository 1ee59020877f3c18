"""The total order: logit descending, token id ascending, as integers."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_sampler.core.filters import KEEP_ALL
from compiled_sampler.core.order import (
    MASKED_KEY,
    POSITIVE_INFINITY_KEY,
    float_key,
    is_visible,
    key_float,
    last_of,
    magnitude_bits,
    order_key,
    pack,
    packed_id,
    packed_key,
    ranked,
    ranked_key,
    reaches,
    row_logits,
)
from tests.oracles import oracle

floats = st.floats(width=32, allow_nan=False)
logits = st.lists(st.floats(width=32) | st.sampled_from([0.0, -0.0, math.inf, -math.inf, 1.0]), min_size=1, max_size=40)


@given(floats, floats)
def test_keys_compare_as_their_floats_and_give_them_back(a, b):
    keys = float_key(torch.tensor([a, b]))
    key_a, key_b = keys.tolist()
    assert (key_a < key_b) == (a < b)
    assert (key_a == key_b) == (a == b)
    assert key_float(keys).tolist() == [a, b]


@given(logits, st.integers(0, 39), st.sampled_from([0, 1, -1]))
def test_a_token_reaches_a_threshold_as_its_packed_key_does(values, at, off):
    x, ids = torch.tensor([values]), torch.arange(len(values), dtype=torch.int32)
    packed = pack(order_key(x), ids)
    place = at % len(values)
    near = pack(order_key(x)[:, place], ids[place].add(off).clamp(min=0))
    for threshold in (near, torch.tensor([KEEP_ALL])):
        wanted = (packed >= threshold[:, None]) & is_visible(x)
        for by_key in (False, True):
            last = last_of(threshold[:, None], by_key=by_key)
            assert torch.equal(reaches(x, ids, last) & is_visible(x), wanted)


def test_neighbouring_floats_have_neighbouring_keys_and_positive_infinity_the_largest():
    x = torch.tensor([-3e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, torch.finfo(torch.float32).max])
    above = torch.nextafter(x, torch.tensor(math.inf))
    assert (order_key(above) - order_key(x)).tolist() == [1] * len(x)
    assert order_key(above)[-1] == POSITIVE_INFINITY_KEY


def test_masked_tokens_have_the_lowest_key():
    x = torch.tensor([-math.inf, math.nan, -math.nan, torch.finfo(torch.float32).min])
    assert order_key(x).tolist()[:3] == [MASKED_KEY] * 3
    assert order_key(x)[3] > MASKED_KEY
    assert is_visible(x).tolist() == [False, False, False, True]
    assert key_float(torch.tensor([MASKED_KEY], dtype=torch.int32)).item() == -math.inf


def test_magnitudes_tell_nans_from_numbers_whatever_the_payload():
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, 0xFF800001 - 2**32, 0x7F800000, 0xFF800000 - 2**32, 0])
    x = bits.to(torch.int32).view(torch.float32)
    assert (magnitude_bits(x) > POSITIVE_INFINITY_KEY).tolist() == [True] * 4 + [False] * 3


@given(st.integers(MASKED_KEY, POSITIVE_INFINITY_KEY + 2**23 - 1), st.integers(0, 2**31 - 1))
def test_a_packed_key_gives_its_parts_back(key, token_id):
    packed = pack(torch.tensor([key], dtype=torch.int32), torch.tensor([token_id], dtype=torch.int32))
    assert (packed_key(packed).item(), packed_id(packed).item()) == (key, token_id)


@given(logits)
def test_packed_keys_sort_as_the_oracle_does(row):
    packed = pack(order_key(torch.tensor(row)), torch.arange(len(row), dtype=torch.int32)).sort(descending=True).values
    assert packed_id(packed[packed_key(packed) != MASKED_KEY]).tolist() == oracle.order(row)


def test_columns_beyond_the_vocabulary_are_dropped():
    assert row_logits(torch.tensor([[1.0, 2.0, math.nan]]), 2).tolist() == [[1.0, 2.0]]


INT32, IDS = st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**31 - 1)
ENDS = [(True, -(2**31), 2**31 - 1), (True, 2**31 - 1, 0), (False, -(2**31), 2**31 - 1), (False, 2**31 - 1, 0)]


@given(st.lists(st.tuples(st.booleans(), INT32, IDS)))
def test_ranks_stand_in_the_order_of_kind_key_and_id(tokens):
    tokens = [*tokens, *ENDS]
    kinds, keys, ids = (torch.tensor(each) for each in zip(*tokens, strict=True))
    ranks = ranked(keys.int(), ids.int(), kinds)
    by_rank = sorted(range(len(tokens)), key=ranks.tolist().__getitem__)
    assert by_rank == sorted(range(len(tokens)), key=lambda i: (*tokens[i][:2], -tokens[i][2]))
    assert [each.tolist() for each in (*ranked_key(ranks), packed_id(ranks))] == [
        each.tolist() for each in (keys, kinds, ids)
    ]
