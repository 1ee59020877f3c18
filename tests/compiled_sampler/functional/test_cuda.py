"""On CUDA: compiled, and captured in a graph of the caller, the functions give the bits of eager torch on the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler import SampleOutputs
from compiled_sampler.batch import tensors_of
from compiled_sampler.core.arithmetic import log2_of_tensor
from compiled_sampler.functional import probs, sample, verify
from compiled_sampler.lowering.compiled_stages import CompiledStages
from tests.builders.sampler import REQUESTS, V, same
from tests.compiled_sampler.core.test_arithmetic import shares
from tests.compiled_sampler.functional.test_functions import (
    COUNTS,
    NAMES,
    PARAMS,
    PARAMS_HERE,
    batch,
    columns,
    noise,
    rows,
)
from tests.torch_states import no_waits

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]


def on_gpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cuda() for name, tensor in tensors.items()}


@pytest.mark.parametrize("backend", ["eager", "compiled"])
@pytest.mark.parametrize("count", [1, 5, len(PARAMS)])
def test_rows_of_all_kinds_have_the_bits_of_the_cpu(count, backend):
    params, logits = PARAMS[:count], rows(count)
    filters, drawn_by = columns(params), noise(params)
    wanted = sample(logits, **filters, **drawn_by, vocab_size=V, backend="eager")
    options: dict[str, Any] = {**on_gpu(filters), "vocab_size": V, "backend": backend}
    assert same(sample(logits.cuda(), **on_gpu(drawn_by), **options), wanted)
    law = probs(logits, **filters, vocab_size=V, backend="eager")
    assert torch.equal(probs(logits.cuda(), **options).cpu(), law)


def test_calls_of_the_cpu_and_of_a_gpu_with_the_same_shapes_have_code_of_their_own():
    logits, drawn_by = rows(4), noise(PARAMS[:4])
    wanted = sample(logits, **drawn_by, vocab_size=V, backend="compiled")
    for _ in range(2):
        assert same(sample(logits.cuda(), **on_gpu(drawn_by), vocab_size=V, backend="compiled"), wanted)
    assert same(sample(logits, **drawn_by, vocab_size=V, backend="compiled"), wanted)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_captured_call_waits_for_nothing_and_reads_its_tensors_at_each_replay(name):
    count = 6
    numbers_of_all = {field: getattr(REQUESTS[name], field) for field in NAMES}
    logits, drawn_by = rows(count).cuda(), on_gpu(noise(PARAMS[:count]))
    sample(logits, **numbers_of_all, **drawn_by, vocab_size=V)  # compiles, which may wait
    with no_waits():
        sample(logits, **numbers_of_all, **drawn_by, vocab_size=V)
        sample(logits, **numbers_of_all, **drawn_by, vocab_size=V)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sample(logits, **numbers_of_all, **drawn_by, vocab_size=V)
    for step in range(3):
        fresh = rows(count).roll(step, 0)
        logits.copy_(fresh)
        drawn_by["positions"].fill_(step)
        graph.replay()
        seeds = noise(PARAMS[:count])["seeds"]
        wanted = sample(fresh, **numbers_of_all, seeds=seeds, positions=step, vocab_size=V, backend="eager")
        assert same(SampleOutputs(*(each.clone() for each in tensors_of(out))), wanted)


def test_a_captured_call_reads_parameters_by_row_at_each_replay():
    count = 8
    logits, drawn_by = rows(count).cuda(), on_gpu(noise(PARAMS[:count]))
    filters = on_gpu(columns(PARAMS[:count]))
    sample(logits, **filters, **drawn_by, vocab_size=V)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample(logits, **filters, **drawn_by, vocab_size=V)
    for first in (8, 16, 24):
        params = PARAMS[first : first + count]
        for name, column in columns(params).items():
            filters[name].copy_(column)
        filters["top_p"][3] = 1.5
        graph.replay()
        held = {name: column.cpu() for name, column in filters.items()}
        wanted = sample(rows(count), **held, **noise(PARAMS[:count]), vocab_size=V, backend="eager")
        assert same(out, wanted)


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_verifications_have_the_bits_of_the_cpu(rule):
    logits, drafts, draft_logits = batch(COUNTS)
    proposals = {} if rule == "match" else {"draft_logits": draft_logits}
    given = {**columns(PARAMS_HERE), **noise(PARAMS_HERE), "num_drafts": torch.tensor(COUNTS), **proposals}
    wanted = verify(logits, drafts, **given, rule=rule, backend="eager")
    for backend in ("eager", "compiled"):
        assert same(verify(logits.cuda(), drafts.cuda(), **on_gpu(given), rule=rule, backend=backend), wanted)


def test_the_logarithm_has_the_bits_of_the_cpu(generator):
    x = shares(generator, 500_000)
    assert torch.equal(log2_of_tensor(x.cuda()).cpu(), log2_of_tensor(x))
    assert torch.equal(CompiledStages()(log2_of_tensor, x.cuda()).cpu(), log2_of_tensor(x))
