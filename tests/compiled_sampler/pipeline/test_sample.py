"""A whole step: the oracle's tokens, whatever else is in the batch.

That every mode draws them, of hard rows too, is in ``core/test_reference.py``.
"""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.batch import RowStatus, SampleInputs, SampleOutputs, tensors_of
from compiled_sampler.pipeline.law import probability_step
from compiled_sampler.pipeline.sample import sample_step
from tests.builders.inputs import (
    BASES,
    full_mode,
    modes_by_name,
    sample_inputs,
    slot_table,
)
from tests.builders.sampler import SHARED_SLOTS, V, same
from tests.oracles import oracle

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
    return SamplingParams(seed=SEEDS[index % len(SEEDS)], **FILTERS[index % len(FILTERS)])


REQUESTS = [request(i) for i in range(len(FILTERS))]


def assert_same(result: SampleOutputs, other: SampleOutputs) -> None:
    assert result.token_ids.tolist() == other.token_ids.tolist()
    assert result.status.tolist() == other.status.tolist()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("vocab_size", "dtype"), [(1, torch.float32), (129, torch.bfloat16), (5000, torch.float32)])
def test_tokens_are_the_oracles(vocab_size, dtype, base, generator):
    logits = (3.0 * torch.randn(len(REQUESTS), vocab_size, generator=generator)).to(dtype)
    tokens = sample_step(full_mode(vocab_size, base), sample_inputs(logits, REQUESTS)).token_ids.tolist()
    for i, row in enumerate(logits.tolist()):
        filters = FILTERS[i % len(FILTERS)]
        wanted = oracle.draw(row, seed=SEEDS[i % len(SEEDS)], position=i, **filters, top_p_base=base)
        assert tokens[i] == wanted, filters


@settings(max_examples=20)
@given(st.permutations(range(len(REQUESTS))), st.integers(1, len(REQUESTS)))
def test_batchmates_and_rows_do_not_matter(permutation, count):
    generator = torch.Generator().manual_seed(3)
    inputs = sample_inputs(torch.randn(len(REQUESTS), 600, generator=generator), REQUESTS)
    whole = sample_step(full_mode(600), inputs)
    chosen = torch.tensor(permutation[:count])
    part = SampleInputs(inputs.logits[chosen], inputs.slots[chosen], inputs.positions[chosen], inputs.table)
    assert_same(sample_step(full_mode(600), part), SampleOutputs(*(field[chosen] for field in tensors_of(whole))))


@pytest.mark.parametrize("poison", [math.inf, math.nan, 1e30, -math.inf])
@pytest.mark.parametrize("name", list(modes_by_name(600)))
def test_padding_columns_are_never_read(name, poison, generator):
    clean = torch.randn(3, 600, generator=generator)
    padded = torch.cat((clean, torch.full((3, 40), poison)), 1)
    params = [SamplingParams(seed=1, top_k=k) for k in (1, 5, 64)]
    mode = modes_by_name(600)[name]
    inputs = sample_inputs(clean, params)
    wide = inputs._replace(logits=padded)
    assert_same(sample_step(mode, wide), sample_step(mode, inputs))
    assert torch.equal(probability_step(mode, wide).probabilities, probability_step(mode, inputs).probabilities)


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


@pytest.mark.parametrize(("columns", "dtype"), [(slice(7, 607), torch.bfloat16), (slice(0, 1200, 2), torch.float32)])
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


TOP_P = {
    "narrow": SamplingParams(temperature=1.1, top_k=20, top_p=0.6, seed=1),
    "wide": SamplingParams(temperature=1.3, top_k=90, top_p=0.7, seed=2),
    "top_p": SamplingParams(temperature=1.5, top_p=0.8, min_p=1e-3, seed=3),
}
ONE_OF_EACH = {
    base: (("eager", base, "cpu"), ("eager", base, "cuda"), ("compiled", base, "cuda")) for base in ("all", "top_k")
}


@functools.cache
def sampler_of(backend: str, base: str = "all", device: str = "cpu", vocab_size: int = V) -> Sampler:
    """Requests in the order of ``TOP_P``, in the first slots."""
    made = Sampler(vocab_size, SHARED_SLOTS, device, backend=backend, top_p_base=base)
    for params in TOP_P.values():
        made.add_request(params)
    return made


def logits_of(rows: int, vocab_size: int = V) -> Tensor:
    return 2.0 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1))


def test_compiled_draws_by_the_base_of_whole_rows_are_those_of_eager_torch():
    slots, positions = [0, 1, 2] * 4, torch.arange(12)
    eager, compiled = (
        each.sample(each.plan(slots, "full"), logits_of(12), positions)
        for each in map(sampler_of, ("eager", "compiled"))
    )
    assert same(eager, compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("base", ["all", "top_k"])
@pytest.mark.parametrize("vocab_size", [5000, 70_000])
@pytest.mark.parametrize("rows", [1, 16, 40, 300])
def test_by_either_base_few_rows_and_many_are_on_cuda_those_of_the_cpu(rows, vocab_size, base):
    logits, positions = logits_of(rows, vocab_size), torch.arange(rows)
    slots = [row % len(TOP_P) for row in range(rows)]
    cpu, *others = (sampler_of(*kind, vocab_size) for kind in ONE_OF_EACH[base])
    for picked, mode in ((slots, "full"), ([0] * rows, "top_k_top_p[64]")):
        wanted = cpu.sample(cpu.plan(picked, mode), logits, positions)
        for each in others:
            made = each.sample(each.plan(picked, mode), logits.cuda(), positions.cuda())
            assert same(made, wanted)
