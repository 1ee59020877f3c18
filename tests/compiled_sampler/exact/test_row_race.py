"""The race beyond the candidates: rows that need it win what the whole row's race wins, the others are skipped."""

import pytest
import torch

from compiled_sampler.core.noise import noise_keys
from compiled_sampler.core.order import MASKED_KEY, last_of, packed_key
from compiled_sampler.core.rows import RowParams
from compiled_sampler.exact.row_race import NO_WINNER, race_beyond_candidates, race_rows
from compiled_sampler.exact.threshold import Threshold
from compiled_sampler.params import SamplingParams
from compiled_sampler.passes.race import draw_from_blocks, race_maxima
from compiled_sampler.pipeline.sample import sample_step
from tests.builders.inputs import BASES, full_mode, sample_inputs
from tests.builders.sampler import same
from tools.kernels.launches import for_a_gpu

FILTERS = [
    SamplingParams(seed=seed, **filters)
    for seed, filters in enumerate(
        (
            {},
            {"temperature": 0.0},
            {"top_k": 5},
            {"top_k": 500},
            {"top_p": 0.3},
            {"top_p": 0.999},
            {"min_p": 0.3},
            {"min_p": 1e-4, "top_p": 0.99, "temperature": 3.0},
            {"top_k": 900, "top_p": 0.9, "temperature": 5.0},
        )
    )
]


def rows_of(count: int) -> RowParams:
    seeds = torch.arange(count)
    one = torch.ones(count)
    return RowParams(
        live=one > 0,
        idle=torch.zeros(count, dtype=torch.int32),
        keys=noise_keys(seeds, seeds + 7, 0),
        scale=one,
        noise_mask=torch.full((count,), -1, dtype=torch.int32),
        top_k=seeds + 1,
        top_p=one.double(),
        min_p_log2=one * -torch.inf,
    )


def test_only_rows_that_race_have_winners(generator):
    logits, races = torch.randn(4, 300, generator=generator), torch.tensor([True, False, True, False])
    everything = torch.full((4,), NO_WINNER)
    rows, row_max = rows_of(4), logits.amax(-1)
    known = Threshold(everything, races & ~races, races, torch.ones_like(everything))
    winners = race_beyond_candidates(logits, known, rows, row_max, torch.empty(0), vocab_size=300, base_is_row=False)
    assert torch.equal(winners, race_rows(logits, races, rows, None, None, vocab_size=300))
    assert winners.shape == (4, 1)
    assert (winners.amax(-1) > NO_WINNER).tolist() == races.tolist()
    cut = {"vocab_size": 300, "block": 64}
    blocks = race_maxima(logits, rows, row_max, last_of(everything, by_key=True), **cut)
    drawn = draw_from_blocks(logits, blocks, rows, row_max, last_of(everything, by_key=True), **cut)
    ids = torch.iinfo(torch.int32).max - (winners.amax(-1) & torch.iinfo(torch.int32).max)
    assert torch.equal(ids[races], drawn.token_ids[races])


def test_no_winner_is_masked():
    assert packed_key(torch.tensor(NO_WINNER)) == MASKED_KEY


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("vocab_size", [65, 600, 5000])
def test_a_gpus_stages_draw_what_a_cpus_do(vocab_size, base, generator, monkeypatch):
    logits = 2.0 * torch.randn(len(FILTERS), vocab_size, generator=generator)
    logits[3, ::2] = -torch.inf
    logits[5, 7] = torch.nan
    logits[6, 9:11] = torch.inf
    inputs, mode = sample_inputs(logits, FILTERS), full_mode(vocab_size, base)
    wanted = sample_step(mode, inputs)
    called: list[str] = []

    def run(stage, *tensors, **static):
        called.append(stage.__name__)
        return stage(*tensors, **static)

    assert not logits.is_cuda
    with for_a_gpu():
        assert same(sample_step(mode, inputs, run), wanted)
    assert "race_beyond_candidates" in called
    assert "race_maxima" not in called
