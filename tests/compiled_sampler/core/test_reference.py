"""The definition of sampling: what the oracle draws, and what every mode that covers a request draws."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_sampler import SampleInputs, Sampler, SamplingParams
from compiled_sampler.core import filters, reference
from compiled_sampler.core.rows import gather_rows
from compiled_sampler.engine import step_executor
from compiled_sampler.modes import uncovered
from compiled_sampler.pipeline.law import probability_step
from compiled_sampler.pipeline.sample import sample_step
from tests.builders.inputs import BASES, full_mode, mode_table, sample_inputs, slot_table
from tests.builders.sampler import V, held, same, shared_sampler
from tests.cases.hard_rows import mixed_batch, mixed_requests
from tests.oracles import oracle

SIZES = [
    (1, torch.float32, "top_k"),
    (2, torch.bfloat16, "all"),
    (63, torch.float16, "top_k"),
    (64, torch.float32, "all"),
    (65, torch.bfloat16, "top_k"),
    (127, torch.float32, "all"),
    (129, torch.float32, "top_k"),
    (600, torch.float16, "all"),
    (5000, torch.bfloat16, "top_k"),
]
"""Around the number of candidates and the size of a block; each dtype and base."""

FILTERS = [
    {},
    *({"temperature": temperature} for temperature in (0.0, 0.3)),
    *({"top_k": count} for count in (1, 2, 65)),
    *({"top_p": share} for share in (0.3, 0.95)),
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 500, "top_p": 0.95, "min_p": 0.001},
]


def by_definition(inputs, vocab_size, base="top_k"):
    return reference.sample(inputs, vocab_size=vocab_size, base_is_row=base == "all")


def differing(inputs, wanted, vocab_size, base="top_k"):
    found = by_definition(inputs, vocab_size, base)
    return int(((found.token_ids != wanted.token_ids) | (found.status != wanted.status)).sum())


def hard_inputs(vocab_size, base, dtype=torch.float32, rows=60):
    """For each mode the mode and rows of every kind, one of them padding, of requests that it covers."""
    requests = mixed_requests(vocab_size, 60, vocab_size)
    table, found = slot_table(requests, vocab_size), []
    for mode in mode_table(vocab_size, base):
        logits, slots, positions = mixed_batch(requests, mode, rows, dtype, vocab_size)
        slots[7] = -1
        found.append((mode, SampleInputs(logits, slots, positions, table)))
    return found


def special_row(kind, row):
    """A row ``[V]`` that is easy to get wrong."""
    some = torch.arange(len(row)) % 3 == 0
    rows = {
        "plain": row,
        "ties": row.round(),
        "zeros": torch.where(row > 0.0, 0.0, -0.0),
        "denormal": (row * 1e5).to(torch.int32).abs().to(torch.float32) * 2.0**-149,
        "masked": torch.where(some, -math.inf, row),
        "nan": torch.where(some, math.nan, row),
        "infinite": torch.where(some, math.inf, row),
        "all_masked": torch.full_like(row, -math.inf),
        "all_nan": torch.full_like(row, math.nan),
    }
    return rows[kind]


KINDS = ("plain", "ties", "zeros", "denormal", "masked", "nan", "infinite", "all_masked", "all_nan")


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("vocab_size", [1, 65, 600])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_status_are_the_oracles(kind, vocab_size, base, generator):
    logits = 2.0 * torch.randn(len(FILTERS), vocab_size, generator=generator)
    logits = torch.stack([special_row(kind, row) for row in logits])
    params = [SamplingParams(seed=-i, **each) for i, each in enumerate(FILTERS)]
    found = by_definition(sample_inputs(logits, params), vocab_size, base)
    for i, row in enumerate(logits.tolist()):
        assert found.token_ids[i] == oracle.draw(row, seed=-i, position=i, **FILTERS[i], top_p_base=base)
        assert found.status[i] == oracle.status(row)


@pytest.mark.parametrize(("vocab_size", "dtype", "base"), SIZES)
def test_every_covering_mode_draws_the_same_and_has_the_same_probabilities(vocab_size, dtype, base):
    for mode, inputs in hard_inputs(vocab_size, base, dtype):
        assert differing(inputs, sample_step(mode, inputs), vocab_size, base) == 0
        positions = inputs.positions.clamp(min=64)
        drafting = inputs._replace(positions=positions, offsets=torch.arange(len(positions)) % 5)
        assert differing(drafting, sample_step(mode, drafting), vocab_size, base) == 0
        found = reference.probabilities(inputs, vocab_size=vocab_size, base_is_row=base == "all").probabilities
        wanted = probability_step(mode, inputs).probabilities
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=90),
    st.sampled_from([0.0, 1e-5, 0.7, 1.0, 1e30]),
    st.integers(0, 100),
    st.floats(1e-6, 1.0),
    st.sampled_from([0.0, 1e-3, 0.4, 1.0]),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from(BASES),
)
def test_any_row_of_any_request_is_drawn_alike_in_every_covering_mode(row, temperature, k, p, min_p, seed, base):
    params = SamplingParams(temperature, k, p, min_p, seed)
    inputs = sample_inputs(torch.tensor([row]), [params], [2**40])
    for mode in mode_table(len(row), base):
        if uncovered(mode, params) is None:
            assert differing(inputs, sample_step(mode, inputs), len(row), base) == 0


WRONG = {
    "top_k_by_one": ("keep_prefix", lambda o, m, k, p, base: filters.keep_prefix(o, m, k + 1, p, base)),
    "a_prefix_one_longer": ("keep_prefix", lambda *each: filters.keep_prefix(*each).roll(1, -1)),
    "no_top_p": ("keep_prefix", lambda o, m, k, p, base: filters.keep_prefix(o, m, k, torch.ones_like(p), base)),
    "no_min_p": ("scaled", lambda x, scale: torch.zeros_like(x)),
    "other_noise": ("gather_rows", lambda slots, stream: gather_rows(slots, stream=1 - stream)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_definition_is_detected(wrong, monkeypatch):
    kinds = ({"top_k": 2}, {"top_p": 0.01}, {"min_p": 0.3})
    params = [SamplingParams(seed=i, **kinds[i % 3]) for i in range(90)]
    inputs = sample_inputs(torch.randn(90, 129), params)
    wanted = sample_step(full_mode(129), inputs)
    assert differing(inputs, wanted, 129) == 0
    monkeypatch.setattr(reference, *WRONG[wrong])
    assert differing(inputs, wanted, 129) > 0


def test_the_backend_runs_without_compiling_and_after_a_warm_up(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    sampler, logits = Sampler(90, 4, backend="reference", probabilities=True), torch.randn(2, 90)
    sampler.warmup()
    eager = Sampler(90, 4, backend="eager")
    for each in (sampler, eager):
        assert [each.add_request(SamplingParams(seed=seed, top_p=0.9)) for seed in (1, 2)] == [0, 1]
    plans, where = [each.plan([1, 0]) for each in (sampler, eager)], torch.tensor([5, 2**50])
    assert same(sampler.sample(plans[0], logits, where), eager.sample(plans[1], logits, where))
    drafts = [s.draft(plan, logits, where, coupled=False) for s, plan in zip((sampler, eager), plans, strict=True)]
    assert same(drafts[0].drawn, drafts[1].drawn)
    assert torch.equal(sampler.probs(plans[0], logits), eager.probs(plans[1], logits))


def test_a_capture_of_the_backend_is_refused_and_told_the_way_out(monkeypatch):
    def capturing(device, message):
        raise RuntimeError(message)

    sampler = shared_sampler(V, backend="reference")
    with held(sampler, [SamplingParams(seed=1)]) as slots:
        plan = sampler.plan(slots)
        monkeypatch.setattr(step_executor, "check_not_capturing", capturing)
        with pytest.raises(RuntimeError, match=r"'reference' inside a capture.*Sampler\(backend='compiled'\)"):
            sampler.sample(plan, torch.zeros(1, V), torch.zeros(1, dtype=torch.int64))


@pytest.mark.gpu
def test_on_a_gpu_the_definition_draws_the_same():
    for _, inputs in hard_inputs(600, "top_k"):
        wanted = by_definition(inputs, 600)
        table = type(inputs.table)(*(each.cuda() for each in inputs.table))
        moved = SampleInputs(inputs.logits.cuda(), inputs.slots.cuda(), inputs.positions.cuda(), table)
        assert same(by_definition(moved, 600), wanted)
