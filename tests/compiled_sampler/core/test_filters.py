"""Top-k, top-p and min-p keep exactly what the contract says, against the float64 oracle and at planted boundaries."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_sampler.core.filters import keep_top_p, mass_cut
from compiled_sampler.params import SamplingParams
from tests.builders.inputs import BASES, VOCAB_SIZES, covering_modes, full_mode, kept_ids, sample_inputs
from tests.oracles import oracle

BASE_2 = math.log2(math.e)
"""The temperature at which a logit is a base-2 logarithm: integer logits have exact masses."""

FILTERS = [
    {},
    *({"top_k": count} for count in (2, 50, 64, 65, 1000)),
    *({"top_p": share} for share in (0.01, 0.5, 0.9, 0.999)),
    *({"min_p": share} for share in (0.05, 1.0)),
    *({"top_k": count, "top_p": share} for count, share in ((40, 0.8), (300, 0.95))),
    {"top_k": 50, "top_p": 0.9, "min_p": 0.1},
    {"top_p": 0.97, "min_p": 0.001, "temperature": 0.7},
    {"top_k": 20, "top_p": 0.7, "temperature": 3.0},
]


def kept(logits, base="top_k", **filters):
    """The ids that one row keeps in the mode that covers everything."""
    row = torch.as_tensor(logits, dtype=torch.float32)[None]
    return kept_ids(full_mode(row.shape[1], base), sample_inputs(row, [SamplingParams(seed=1, **filters)]))[0]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_kept_sets_are_the_oracles(vocab_size, base, generator):
    """Masked tokens are never kept, and nothing beside positive infinity."""
    logits = 3.0 * torch.randn(3, len(FILTERS), vocab_size, generator=generator)
    logits[1, :, ::3], logits[1, :, 1::9] = -math.inf, math.nan
    logits[2, :, [place for place in (7, 9, 200) if place < vocab_size]] = math.inf
    params = [SamplingParams(seed=1, **filters) for filters in FILTERS] * 3
    found = kept_ids(full_mode(vocab_size, base), sample_inputs(logits.flatten(0, 1), params))
    for row, filters, ids in zip(logits.flatten(0, 1).tolist(), FILTERS * 3, found, strict=True):
        infinite = [i for i in ids if row[i] == math.inf]
        assert (infinite or ids) == sorted(oracle.reference_keep(row, **filters, top_p_base=base)), filters


@given(
    st.lists(st.integers(-12, 0), min_size=1, max_size=100),
    st.integers(0, 101),
    st.sampled_from([k / 64 for k in range(1, 65)]),
    st.sampled_from([0.0, 1.0, 0.5, 2.0**-4, 2.0**-11]),
    st.sampled_from(BASES),
)
def test_dyadic_laws_are_cut_exactly(row, top_k, top_p, min_p, base):
    filters = {"temperature": BASE_2, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    logits = [float(x) for x in row]
    if top_k != 1:
        assert kept(logits, base, **filters) == sorted(oracle.reference_keep(logits, **filters, top_p_base=base))


@pytest.mark.parametrize(
    ("logits", "filters", "wanted"),
    [
        ([-1.0, -2.0, -3.0, -3.0], {"top_p": 0.5}, [0]),
        ([-1.0, -2.0, -3.0, -3.0], {"top_p": math.nextafter(0.5, 1.0)}, [0, 1]),
        ([-1.0, -2.0, -3.0, -3.0], {"top_p": 0.75}, [0, 1]),
        ([-1.0, -2.0, -3.0, -4.0, -4.0], {"top_p": 0.75, "min_p": 0.25}, [0, 1]),
        ([-1.0, -2.0, -3.0, -4.0, -4.0], {"top_p": 0.875, "min_p": 0.5}, [0, 1]),
        ([0.0, -3.0, -4.0], {"min_p": 0.125}, [0, 1]),
    ],
)
def test_a_mass_before_the_cut_ends_the_nucleus_and_min_p_keeps_equality_and_changes_no_mass(logits, filters, wanted):
    assert kept(logits, temperature=BASE_2, **filters) == wanted


@pytest.mark.parametrize(("base", "wanted"), [("all", 4), ("top_k", 3)])
def test_the_base_of_top_p_is_what_the_option_says(base, wanted):
    logits = torch.tensor([[0.35, 0.25, 0.20, 0.05] + [0.03] * 5]).log()
    params = [SamplingParams(seed=1, top_k=4, top_p=0.82)]
    modes = covering_modes(params, 9, base)
    assert len(modes) == 2
    for mode in (full_mode(9, base), *modes):
        assert kept_ids(mode, sample_inputs(logits, params)) == [list(range(wanted))]


def test_ties_at_the_cut_go_to_the_lowest_ids():
    row = torch.zeros(600)
    row[[599, 3, 130]] = 1.0
    assert kept(row, top_k=5) == [0, 1, 3, 130, 599]
    assert kept(row.to(torch.bfloat16).float(), top_k=200) == [*range(199), 599]


@pytest.mark.parametrize("start", [-5.0, 0.0, 7.25])
def test_logits_one_ulp_apart_are_told_apart(start):
    row = torch.full((200,), start)
    row[150] = torch.nextafter(row[150], torch.tensor(math.inf))
    assert kept(row, top_k=2) == [0, 150]
    assert kept(row, top_p=1e-9) == [150]


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=30), st.floats(1e-9, 1.0), st.data())
def test_top_p_keeps_a_prefix_that_holds_the_first_token(weights, top_p, data):
    mass = torch.tensor([sorted(weights, reverse=True)])
    if mass.sum() == 0:
        mass[0, 0] = 1
    keep = keep_top_p(mass, torch.tensor([top_p], dtype=torch.float64), mass.sum(-1))[0].tolist()
    assert keep[0]
    assert keep == sorted(keep, reverse=True)
    smaller = torch.tensor([top_p * data.draw(st.floats(0.1, 1.0))], dtype=torch.float64)
    assert sum(keep_top_p(mass, smaller, mass.sum(-1))[0].tolist()) <= sum(keep)


def test_the_cut_is_the_smallest_integer_that_reaches_the_share_and_top_p_1_keeps_tokens_without_mass():
    shares = torch.tensor([0.5, 0.5, 0.1, 1.0], dtype=torch.float64)
    assert mass_cut(shares, torch.tensor([10, 11, 10, 10])).tolist() == [5, 6, 1, 2**63 - 1]
    mass = torch.tensor([[2**40, 0, 0]])
    assert keep_top_p(mass, shares[3:], mass.sum(-1)).all()
