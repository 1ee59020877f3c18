"""A whole step: the oracle's tokens in every covering mode, whatever else is in the batch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_sampler.batch import RowStatus, SampleInputs, SampleOutputs, tensors_of
from compiled_sampler.params import SamplingParams
from compiled_sampler.pipeline.sample import sample_step
from tests.builders.inputs import (
    BASES,
    VOCAB_SIZES,
    covering_modes,
    full_mode,
    modes_by_name,
    sample_inputs,
    slot_table,
)
from tests.oracles import oracle
from tests.tiers import tiers

FILTERS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "top_p": 0.5, "min_p": 0.5},
    {"top_k": 1},
    {},
    {"temperature": 0.3},
    {"top_k": 2},
    {"top_k": 64},
    {"top_k": 65},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 500, "top_p": 0.95, "min_p": 0.001},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.1, "temperature": 2.0},
]
SEEDS = [0, 1, -1, 2**63, 2**64 - 1, -(2**63), 12345]


def request(index: int) -> SamplingParams:
    """One of the requests above with one of the seeds."""
    return SamplingParams(seed=SEEDS[index % len(SEEDS)], **FILTERS[index % len(FILTERS)])


REQUESTS = [request(i) for i in range(len(FILTERS))]


def assert_same(result: SampleOutputs, other: SampleOutputs) -> None:
    """Tokens and status are equal."""
    assert result.token_ids.tolist() == other.token_ids.tolist()
    assert result.status.tolist() == other.status.tolist()


def alone(inputs: SampleInputs, row: int, base: str = "top_k", vocab_size: int | None = None) -> SampleOutputs:
    """One row of a batch in a batch of its own."""
    one = slice(row, row + 1)
    single = SampleInputs(inputs.logits[one], inputs.slots[one], inputs.positions[one], inputs.table)
    return sample_step(full_mode(vocab_size or inputs.logits.shape[1], base), single)


def hard_row(kind: str, vocab_size: int, generator: torch.Generator) -> torch.Tensor:
    """A row of logits ``[V]`` that is easy to get wrong."""
    row = 2.0 * torch.randn(vocab_size, generator=generator)
    some = torch.randint(0, vocab_size, (max(1, vocab_size // 3),), generator=generator)
    match kind:
        case "ties":
            row = row.round()
        case "near_ties":
            row = torch.where(torch.rand(vocab_size, generator=generator) < 0.5, 1.5, math.nextafter(1.5, 2.0))
            row = torch.where(row > 1.5, torch.nextafter(torch.tensor(1.5), torch.tensor(2.0)), row)
        case "masked":
            row[some] = -math.inf
        case "nan":
            row[some] = math.nan
        case "infinite":
            row[some[:3]] = math.inf
        case "all_masked":
            row[:] = -math.inf
        case "all_nan":
            row[:] = math.nan
        case "zeros":
            row = torch.where(row > 0.0, 0.0, -0.0)
    return row


KINDS = ("plain", "ties", "near_ties", "masked", "nan", "infinite", "all_masked", "all_nan", "zeros")


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES[:-1])
def test_tokens_are_the_oracles(vocab_size, dtype, base, generator):
    logits = (3.0 * torch.randn(len(REQUESTS), vocab_size, generator=generator)).to(dtype)
    tokens = sample_step(full_mode(vocab_size, base), sample_inputs(logits, REQUESTS)).token_ids.tolist()
    for i, row in enumerate(logits.tolist()):
        filters = FILTERS[i % len(FILTERS)]
        wanted = oracle.draw(row, seed=SEEDS[i % len(SEEDS)], position=i, **filters, top_p_base=base)
        assert tokens[i] == wanted, filters


def test_a_large_row_gives_the_oracles_tokens(generator):
    logits = 3.0 * torch.randn(len(REQUESTS), 5000, generator=generator).to(torch.bfloat16)
    tokens = sample_step(full_mode(5000), sample_inputs(logits, REQUESTS)).token_ids.tolist()
    for i, row in enumerate(logits.tolist()):
        assert tokens[i] == oracle.draw(row, seed=SEEDS[i % len(SEEDS)], position=i, **FILTERS[i])


@pytest.mark.parametrize("vocab_size", tiers([129], [1, 2, 64, 129, 600]))
@pytest.mark.parametrize("kind", KINDS)
def test_hard_rows_give_the_oracles_tokens_and_status(kind, vocab_size, generator):
    logits = torch.stack([hard_row(kind, vocab_size, generator) for _ in REQUESTS])
    result = sample_step(full_mode(vocab_size), sample_inputs(logits, REQUESTS))
    for i, row in enumerate(logits.tolist()):
        assert result.token_ids[i] == oracle.draw(row, seed=SEEDS[i % len(SEEDS)], position=i, **FILTERS[i])
        assert result.status[i] == oracle.status(row)


@pytest.mark.parametrize("base", tiers(["top_k"], BASES))
@pytest.mark.parametrize("vocab_size", tiers([65], [1, 63, 64, 65, 600, 5000]))
@pytest.mark.parametrize("kind", KINDS)
def test_every_covering_mode_gives_the_same_bytes(kind, vocab_size, base, generator):
    logits = torch.stack([hard_row(kind, vocab_size, generator) for _ in range(2)]).to(torch.bfloat16)
    for filters in FILTERS:
        params = [SamplingParams(seed=seed, **filters) for seed in (7, -7)]
        inputs = sample_inputs(logits, params, [3, 2**40])
        wanted = sample_step(full_mode(vocab_size, base), inputs)
        for mode in covering_modes(params, vocab_size, base):
            assert_same(sample_step(mode, inputs), wanted)


def test_greedy_is_top_k_1_and_takes_the_lowest_of_equal_ids():
    logits = torch.zeros(2, 600)
    logits[:, [77, 300]] = 2.0
    inputs = sample_inputs(logits, [SamplingParams(temperature=0.0, seed=1), SamplingParams(top_k=1, seed=2)])
    for mode in modes_by_name(600).values():
        assert sample_step(mode, inputs).token_ids.tolist() == [77, 77]


@settings(max_examples=20)
@given(st.permutations(range(len(REQUESTS))), st.integers(1, len(REQUESTS)))
def test_batchmates_and_rows_do_not_matter(permutation, count):
    generator = torch.Generator().manual_seed(3)
    inputs = sample_inputs(torch.randn(len(REQUESTS), 600, generator=generator), REQUESTS)
    whole = sample_step(full_mode(600), inputs)
    chosen = torch.tensor(permutation[:count])
    part = SampleInputs(inputs.logits[chosen], inputs.slots[chosen], inputs.positions[chosen], inputs.table)
    assert_same(sample_step(full_mode(600), part), SampleOutputs(*(field[chosen] for field in tensors_of(whole))))


@pytest.mark.parametrize("vocab_size", [2, 129, 5000])
def test_a_row_alone_gives_the_same_bytes(vocab_size, generator):
    inputs = sample_inputs(torch.randn(len(REQUESTS), vocab_size, generator=generator), REQUESTS)
    whole = sample_step(full_mode(vocab_size), inputs)
    for row in range(len(REQUESTS)):
        assert_same(alone(inputs, row), SampleOutputs(*(field[row : row + 1] for field in tensors_of(whole))))


@pytest.mark.parametrize("poison", [math.inf, math.nan, 1e30, -math.inf])
@pytest.mark.parametrize("name", list(modes_by_name(600)))
def test_padding_columns_are_never_read(name, poison, generator):
    clean = torch.randn(3, 600, generator=generator)
    padded = torch.cat((clean, torch.full((3, 40), poison)), 1)
    params = [SamplingParams(seed=1, top_k=k) for k in (1, 5, 64)]
    mode = modes_by_name(600)[name]
    inputs = sample_inputs(clean, params)
    assert_same(sample_step(mode, inputs._replace(logits=padded)), sample_step(mode, inputs))


@pytest.mark.parametrize("name", list(modes_by_name(600)))
def test_padding_rows_give_minus_1_and_leave_the_others_alone(name, generator):
    logits = torch.randn(4, 600, generator=generator)
    inputs = sample_inputs(logits, [SamplingParams(seed=1, top_k=5)] * 4)
    poisoned = logits.clone()
    poisoned[[1, 3]] = math.nan
    mode = modes_by_name(600)[name]
    padded = inputs._replace(logits=poisoned, slots=torch.tensor([0, -1, 2, -1]))
    result, wanted = sample_step(mode, padded), sample_step(mode, inputs)
    assert result.token_ids.tolist() == [wanted.token_ids[0], -1, wanted.token_ids[2], -1]
    assert result.status.tolist() == [0, -1, 0, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [slice(7, 607), slice(0, 1200, 2)])
def test_row_strides_do_not_matter(columns, dtype, generator):
    wide = torch.randn(2 * len(REQUESTS), 1237, generator=generator).to(dtype)
    logits = wide[::2, columns]
    inputs = sample_inputs(logits, REQUESTS)
    wanted = sample_step(full_mode(600), inputs._replace(logits=logits.contiguous()))
    assert_same(sample_step(full_mode(600), inputs), wanted)


def test_logits_and_parameters_are_left_as_they_were(generator):
    inputs = sample_inputs(torch.randn(len(REQUESTS), 600, generator=generator), REQUESTS)
    copies = [inputs.logits.clone(), *(field.clone() for field in inputs.table)]
    sample_step(full_mode(600), inputs)
    assert all(map(torch.equal, copies, [inputs.logits, *inputs.table]))


def test_slots_name_the_parameters_and_positions_the_noise(generator):
    row = torch.randn(1, 600, generator=generator)
    table = slot_table([SamplingParams(seed=1), SamplingParams(seed=2)], 600)
    slots, positions = torch.tensor([0, 0, 1, 1, 0]), torch.tensor([5, 6, 5, 6, 5])
    tokens = sample_step(full_mode(600), SampleInputs(row.expand(5, -1), slots, positions, table)).token_ids.tolist()
    pairs = [(1, 5), (1, 6), (2, 5), (2, 6), (1, 5)]
    assert tokens == [oracle.draw(row[0].tolist(), seed=seed, position=position) for seed, position in pairs]


@pytest.mark.parametrize("name", list(modes_by_name(600)))
def test_flags_add_up(name):
    logits = torch.full((3, 600), -math.inf)
    logits[1, 5] = logits[2, 6] = math.nan
    logits[2, 7] = math.inf
    result = sample_step(modes_by_name(600)[name], sample_inputs(logits, [SamplingParams(seed=1, top_k=1)] * 3))
    both = RowStatus.NAN_SEEN | RowStatus.ALL_MASKED
    assert result.token_ids.tolist() == [-1, -1, 7]
    assert result.status.tolist() == [RowStatus.ALL_MASKED, both, RowStatus.NAN_SEEN | RowStatus.POSITIVE_INFINITY]
