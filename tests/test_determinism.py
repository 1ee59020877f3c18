"""The promise: a token depends on its row and its request alone, whatever computes it and whatever stands beside it."""

import contextlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from compiled_sampler import SampleOutputs, Sampler, SamplingParams
from compiled_sampler.batch import tensors_of
from compiled_sampler.modes import mode_table
from compiled_sampler.pipeline.law import probability_step
from compiled_sampler.pipeline.sample import sample_step
from tests.builders.inputs import modes_by_name, sample_inputs
from tests.builders.sampler import V, held, same, shared_sampler
from tests.cases.compared_batches import arranged, direct, num_mismatches
from tests.cases.hard_rows import Batch, mixed_batch, mixed_requests
from tests.tiers import tiers
from tests.torch_states import default_dtype

MODES = [mode.name for mode in mode_table(V, "top_k")]
ROWS = 4000
NUM_REQUESTS = 60


@pytest.fixture(scope="module")
def samplers() -> Iterator[dict[str, Sampler]]:
    """Every backend, holding the same requests in the same slots."""
    made = {backend: shared_sampler(V, backend=backend) for backend in ("eager", "compiled")}
    with held(made["eager"], requests()), held(made["compiled"], requests()):
        yield made


def requests():
    return mixed_requests(V, NUM_REQUESTS, seed=1)


def mixed(name: str, rows: int = ROWS, seed: int = 0) -> Batch:
    return mixed_batch(requests(), mode_table(V, "top_k")[MODES.index(name)], rows, torch.float32, seed)


def parts(batch: Batch, sizes: list[int]) -> list[Batch]:
    return [Batch(*each) for each in zip(*(tensor.split(sizes) for tensor in batch), strict=True)]


def joined(results: list[SampleOutputs]) -> SampleOutputs:
    return SampleOutputs(*(torch.cat(each) for each in zip(*map(tensors_of, results), strict=True)))


@pytest.mark.parametrize("mode", MODES)
def test_compiled_equals_eager_in_every_mode(samplers, mode):
    for seed in range(3):
        batch = mixed(mode, seed=seed)
        assert same(direct(samplers["compiled"])(batch, mode), direct(samplers["eager"])(batch, mode))


@pytest.mark.parametrize("backend", ["eager", "compiled"])
@pytest.mark.parametrize("mode", tiers(["full"], MODES))
def test_neither_order_nor_padding_nor_batchmates_nor_a_split_change_anything(samplers, backend, mode):
    """Padding is poisoned."""
    batch, few, run = mixed(mode), mixed(mode, 84), direct(samplers[backend])
    wanted, of_few = run(batch, mode), run(few, mode)
    for padding, seed in ((0, 1), (1, 2), (500, 3)):
        other, places = arranged(batch, padding, seed)
        assert num_mismatches(wanted, run(other, mode), places) == 0
    for sizes in ([1] * 84, [7] * 12, [83, 1], [1, 2, 3, 33, 45]):
        assert same(joined([run(part, mode) for part in parts(few, sizes)]), of_few)
    for mate in (mixed("full", 84, seed) for seed in (5, 6)):
        both = Batch(*(torch.stack(pair, 1).flatten(0, 1) for pair in zip(few, mate, strict=True)))
        assert same(SampleOutputs(*(each[::2] for each in tensors_of(run(both, "full")))), of_few)


def test_columns_beyond_the_vocabulary_and_row_strides_change_nothing_compiled(samplers):
    batch, mode, run = mixed("no_filter", 200), "no_filter", direct(samplers["compiled"])
    wanted = run(batch, mode)
    poison = torch.tensor([torch.nan, torch.inf, 3e38]).expand(200, 3)
    wide = batch._replace(logits=torch.cat([batch.logits, poison], dim=1))
    assert same(run(wide, mode), wanted)
    between = torch.full((200, 2, V), torch.nan)
    between[:, 1] = batch.logits
    assert same(run(batch._replace(logits=between[:, 1]), mode), wanted)


@pytest.mark.parametrize("poison", [math.inf, math.nan, 1e30, -math.inf])
@pytest.mark.parametrize("name", list(modes_by_name(600)))
def test_padding_columns_are_never_read(name, poison, generator):
    clean = torch.randn(3, 600, generator=generator)
    padded = torch.cat((clean, torch.full((3, 40), poison)), 1)
    params = [SamplingParams(seed=1, top_k=k) for k in (1, 5, 64)]
    mode = modes_by_name(600)[name]
    inputs = sample_inputs(clean, params)
    wide = inputs._replace(logits=padded)
    assert same(sample_step(mode, wide), sample_step(mode, inputs))
    assert torch.equal(probability_step(mode, wide).probabilities, probability_step(mode, inputs).probabilities)


STATES_OF_TORCH = {
    "as usual": contextlib.nullcontext,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
}


@pytest.mark.parametrize("state", STATES_OF_TORCH)
def test_neither_the_state_of_torch_nor_a_gradient_of_logits_changes_anything(samplers, state):
    batch = mixed("full", 300)
    wanted = direct(samplers["eager"])(batch, "full")
    with_grad = batch._replace(logits=batch.logits.clone().requires_grad_())
    with STATES_OF_TORCH[state]():
        assert same(direct(samplers["eager"])(batch, "full"), wanted)
        assert same(direct(samplers["eager"])(with_grad, "full"), wanted)


@pytest.mark.usefixtures("kept_threads")
@pytest.mark.parametrize("mode", tiers(["min_p"], ["min_p", "top_k_top_p[64]", "full"]))
def test_kernels_of_several_threads_draw_the_same(samplers, mode):
    batch, sampler = mixed(mode), Sampler(V, NUM_REQUESTS, backend="compiled")

    def drawn() -> Any:
        torch.set_num_threads(3)  # Inductor writes loops for so many
        return direct(sampler)(batch, mode)

    # In a thread of its own: those that a test of denormals left behind flush them, which min_p=1 sees.
    with held(sampler, requests()), ThreadPoolExecutor(1) as pool:
        assert same(pool.submit(drawn).result(), direct(samplers["eager"])(batch, mode))


@pytest.mark.full
def test_a_real_vocabulary_is_equal_eager_and_compiled():
    size, dtype = 151_936, torch.bfloat16
    wanted_requests = mixed_requests(size, 20, seed=3)
    batch = mixed_batch(wanted_requests, mode_table(size, "top_k")[-1], 6, dtype, seed=4)
    results = []
    for backend in ("eager", "compiled"):
        sampler = Sampler(size, 20, "cpu", dtype, backend)
        with held(sampler, wanted_requests):
            results.append(direct(sampler)(batch, "full"))
    assert same(*results)
