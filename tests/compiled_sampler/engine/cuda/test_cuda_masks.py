"""Masks alone on a GPU: read beside the logits, in every mode, as the CPU reads a masked copy."""

import dataclasses
import random

import pytest
import torch

from compiled_sampler import Sampler
from compiled_sampler.batch import tensors_of
from tests.builders.edits import random_mask
from tests.builders.filters import hard_rows
from tests.builders.masks import MASKED_MODES, params_of

pytestmark = pytest.mark.gpu
SIZES = (1, 2, 127, 129, 1000)


def samplers(mode: str, vocab_size: int, dtype: torch.dtype, backend: str, rows: int, *, allowed: bool):
    """A sampler on the GPU and one on the CPU, each with a plan of rows, some of padding."""
    source, found = random.Random(vocab_size), []
    params = params_of(mode)
    if allowed:
        most = max(vocab_size // 2, 1)
        params = [
            dataclasses.replace(each, allowed_token_ids=source.sample(range(vocab_size), most)) for each in params
        ]
    for device, way in (("cuda", backend), ("cpu", "eager")):
        sampler = Sampler(vocab_size, rows, device, dtype, way)
        slots = [sampler.add_request(each) for each in params]
        places = [-1 if row % 7 == 6 else slots[row % len(slots)] for row in range(rows)]
        found.append((sampler, sampler.plan(places, mode)))
    return found


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["eager", "compiled"])
@pytest.mark.parametrize("mode", MASKED_MODES)
def test_masked_rows_draw_what_the_cpu_draws(mode, backend, dtype, allowed):
    for vocab_size in SIZES:
        logits = hard_rows(vocab_size, dtype)
        rows = len(logits)
        made, wanted = samplers(mode, vocab_size, dtype, backend, rows, allowed=allowed)
        mask = random_mask(random.Random(mode), rows, vocab_size)
        mask[0] = 0
        check(made, wanted, logits, mask)


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("mode", ["greedy", "no_filter", "min_p", "full"])
def test_masked_rows_of_a_large_batch_draw_what_the_cpu_draws(mode, allowed):
    """Of as many rows as race by bounds, with min-p so flat that some rows race over all their tokens."""
    rows, vocab_size = 64, 151_936
    made, wanted = samplers(mode, vocab_size, torch.float32, "compiled", rows, allowed=allowed)
    logits = (1 if mode == "min_p" else 3) * torch.randn(rows, vocab_size)
    check(made, wanted, logits, random_mask(random.Random(mode), rows, vocab_size))


def check(made, wanted, logits, mask):
    found = []
    for sampler, plan in (made, wanted):
        given = [each.to(sampler.device) for each in (logits, torch.arange(len(logits)), mask)]
        drawn = sampler.sample(plan, *given[:2], token_bitmask=given[2])
        found.append([each.tolist() for each in tensors_of(drawn)])
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", MASKED_MODES)
def test_a_masked_step_inside_an_engines_graph_reads_the_mask_of_each_replay(mode):
    vocab_size, source = 129, random.Random(mode)
    logits = hard_rows(vocab_size)
    rows = len(logits)
    made, wanted = samplers(mode, vocab_size, torch.float32, "compiled", rows, allowed=True)
    held = [each.cuda() for each in (logits, torch.arange(rows), random_mask(source, rows, vocab_size))]
    made[0].sample(made[1], *held[:2], token_bitmask=held[2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = made[0].sample(made[1], *held[:2], token_bitmask=held[2])
    for _ in range(4):
        mask = random_mask(source, rows, vocab_size)
        held[2].copy_(mask)
        graph.replay()
        told = wanted[0].sample(wanted[1], logits, torch.arange(rows), token_bitmask=mask)
        assert [each.tolist() for each in tensors_of(out)] == [each.tolist() for each in tensors_of(told)]
