"""Replayed logprobs: the kept set of the sampler from eight bytes, its logprobs, their gradient, and other logits."""

import math

import pytest
import torch
from torch import Tensor

from compiled_sampler.batch import SampleInputs
from compiled_sampler.core.filters import KEEP_ALL
from compiled_sampler.core.reference import kept, row_parameters
from compiled_sampler.logprobs import Logprobs
from compiled_sampler.modes import mode_table
from compiled_sampler.params import SamplingParams
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.replay import replay
from tests.builders.inputs import BASES, full_mode, sample_inputs, slot_table
from tests.builders.logprobs import filters_of, logprobs
from tests.builders.sampler import REQUESTS
from tests.cases.hard_rows import mixed_batch, mixed_requests
from tests.oracles import oracle_logprobs as oracle

V = 129
PARAMS = [*REQUESTS.values(), SamplingParams(temperature=0.3, top_k=1, seed=6)]


def replayed(
    logits: Tensor, params: list[SamplingParams], base: str = "top_k"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens, filtered logprobs and boundaries of the sampler, then what is replayed of them."""
    inputs, mode = sample_inputs(logits, params), full_mode(logits.shape[1], base)
    tokens = sample_step(mode, inputs).token_ids
    found = logprobs(mode, inputs, tokens, Logprobs(of="filtered", boundary=True))
    return tokens, found.token, found.boundary, *replay(logits, params, tokens, found.boundary)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kept_set_of_hard_rows_is_the_sampler_s_own(base, dtype):
    requests = mixed_requests(V, 60, seed=1)
    batch = mixed_batch(requests, mode_table(V, base)[-1], 1500, dtype, seed=0)
    inputs = SampleInputs(*batch, slot_table(requests, V))
    tokens = sample_step(full_mode(V, base), inputs).token_ids
    found = logprobs(full_mode(V, base), inputs, tokens, Logprobs(of="filtered", num_kept=True, boundary=True))
    again, keep = replay(batch.logits, [requests[slot] for slot in batch.slots], tokens, found.boundary)
    assert torch.equal(keep, kept(batch.logits.float(), row_parameters(inputs), base_is_row=base == "all"))
    assert torch.equal(keep.sum(-1), torch.where(tokens >= 0, found.num_kept, 0))
    assert torch.equal(again == -math.inf, tokens < 0)
    assert (tokens < 0).any()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("scale", [0.5, 3.0, 20.0])
def test_logprobs_are_those_of_the_sampler(base, scale, generator):
    params = [PARAMS[i % len(PARAMS)] for i in range(300)]
    _, wanted, _, found, _ = replayed(scale * torch.randn(300, 5000, generator=generator), params, base)
    pairs = zip(found.tolist(), wanted.tolist(), strict=True)
    assert all(abs(a - b) <= oracle.error_bound(b) for a, b in pairs)


def test_padding_and_rows_without_tokens_have_no_law():
    logits = torch.zeros(3, 4)
    logits[1], logits[2] = -math.inf, math.nan
    logits.requires_grad_()
    found, keep = replay(logits, PARAMS[1], torch.tensor([-1, 0, 0]), torch.tensor([-1, -1, KEEP_ALL]))
    assert found.tolist() == [-math.inf] * 3
    assert not keep.any()
    torch.where(found.isfinite(), found, 0.0).sum().backward()
    assert logits.grad.tolist() == torch.zeros(3, 4).tolist()


def test_beside_an_infinite_logit_only_such_tokens_have_a_probability():
    logits = torch.tensor([[1.0, math.inf, 3.0, math.inf]])
    tokens, wanted, boundary, found, _ = replayed(logits, [PARAMS[1]])
    assert tokens.item() in (1, 3)
    assert found.item() == pytest.approx(math.log(0.5))
    assert wanted.item() == pytest.approx(math.log(0.5))
    assert replay(logits, PARAMS[1], torch.tensor([0]), boundary)[0].item() == -math.inf


@pytest.mark.parametrize("params", PARAMS)
def test_the_gradient_is_that_of_a_log_softmax_over_the_kept_set(params, generator):
    logits = torch.randn(1, V, generator=generator)
    tokens, _, boundary, _, keep = replayed(logits, [params])
    leaf = logits.clone().requires_grad_()
    replay(leaf, params, tokens, boundary)[0].sum().backward()
    law = {i: math.exp(lp) for i, lp in oracle.law("filtered", *[logits[0].tolist()] * 2, filters_of(params)).items()}
    temperature = params.temperature or 1.0
    wanted = [((i == tokens.item()) - law.get(i, 0.0)) / temperature for i in range(V)]
    assert torch.allclose(leaf.grad[0], torch.tensor(wanted), rtol=1e-5, atol=1e-7)
    assert not leaf.grad[~keep].any()


def test_without_filters_a_boundary_holds_for_any_logits(generator):
    logits, noise = 3.0 * torch.randn(1024, 1000, generator=generator), torch.randn(1024, 1000, generator=generator)
    params = [SamplingParams(temperature=0.8, seed=seed) for seed in range(1024)]
    tokens, _, boundary, _, _ = replayed(logits, params)
    for other in (logits - 1.0, logits.bfloat16().float(), logits + 3.0 * noise):
        found, keep = replay(other, params, tokens, boundary)
        assert keep.all()
        law = (other / 0.8).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert torch.allclose(found.float(), law, atol=1e-5)


def test_arguments_of_other_kinds_are_refused(generator):
    logits, tokens = torch.randn(2, 4, generator=generator), torch.zeros(2, dtype=torch.int64)
    right = {"params": PARAMS[1], "token_ids": tokens, "boundary": torch.full((2,), KEEP_ALL)}
    of_params, of_dtype = (
        "^params must be SamplingParams, or a list of them, got ",
        r"^dtype must be torch\.float64 or torch",
    )
    for changed, error, words in (
        ({"token_ids": [0, 0]}, TypeError, r"^token_ids must be a torch\.Tensor, got list; "),
        *(
            ({"token_ids": wrong}, TypeError, "^token_ids must be int64 or int32, got ")
            for wrong in (tokens.float(), tokens.bool())
        ),
        ({"token_ids": tokens[:1]}, ValueError, r"\[1\]"),
        ({"edited_logits": logits.double()}, TypeError, "float64"),
        ({"boundary": tokens.int()}, TypeError, "int32"),
        ({"params": PARAMS[:3]}, ValueError, "got 3"),
        *(({"params": wrong}, TypeError, of_params) for wrong in (None, {*PARAMS[:2]}, [{}, {}], 3)),
        *(({"dtype": wrong}, TypeError, of_dtype) for wrong in (torch.int64, torch.bfloat16, "float32")),
    ):
        with pytest.raises(error, match=words):
            replay(**{"edited_logits": logits, **right, **changed})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_logits_over_a_small_temperature_have_logprobs_and_a_gradient(dtype):
    """A row that only a mask of the least float32 fills is uniform; scaled before the maximum is taken, it is NaN."""
    least = torch.finfo(torch.float32).min
    for row, temperature, wanted in (
        ([least] * 4, 0.8, [0.25] * 4),
        ([3e34, 3e34, 0.0, 1.0], 1e-5, [0.5, 0.5, 0.0, 0.0]),
        ([math.inf, least, math.inf, 1.0], 1e-5, [0.5, 0.0, 0.5, 0.0]),
        ([3e38, least, 3e38, math.nan], 1.0, [0.5, 0.0, 0.5, 0.0]),
    ):
        logits = torch.tensor([row], requires_grad=True)
        params = SamplingParams(temperature=temperature)
        found, _ = replay(logits, params, torch.tensor([0]), torch.tensor([KEEP_ALL]), dtype=dtype)
        assert found.item() == pytest.approx(math.log(wanted[0]))
        (gradient,) = torch.autograd.grad(found.sum(), logits)
        is_finite = logits.detach().isfinite()
        slope = torch.where(
            is_finite, (torch.tensor([[1.0, 0.0, 0.0, 0.0]]) - torch.tensor([wanted])) / temperature, 0.0
        )
        assert torch.allclose(gradient, slope)
