"""The toy engine: a model with a cache, and drafts that save steps. That they change no token the demo looks at."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from compiled_sampler import Sampler
from tools.model import train, transformer
from tools.model.transformer import Model
from tools.toy_engine.cached_model import CachedModel
from tools.toy_engine.decode_step import DecodeStep
from tools.toy_engine.drafters import Batch, Drafts, drawn, look_up
from tools.toy_engine.engine import Engine, Request, longest
from tools.toy_engine.runs import load_models, make_requests, prompt_texts
from tools.toy_engine.speculation import WIDTH, Models, Pairing, SpeculativeEngine, pairings

LENGTH = 24


@pytest.fixture(scope="module")
def model():
    return load_models()[0].target


@pytest.fixture(scope="module")
def texts():
    return torch.randint(2048, (5, LENGTH), generator=torch.Generator().manual_seed(0))


def whole(model: Model, texts: Tensor) -> Tensor:
    """The logits of texts ``[B, T]`` without a cache, float64 ``[B, T, V]``."""
    rotary = transformer.rotary_table(model.config, texts.shape[1], torch.float64)[:, :, None]
    return transformer.logits(model.config, dict(model.weights), texts, rotary, train._attend_within)


def read(cached: CachedModel, slots: Tensor, positions: Tensor, texts: Tensor) -> Tensor:
    """Logits of tokens of texts, each slot's text being the row of its number."""
    return cached.logits(slots, positions, texts[slots, positions])


def test_logits_are_those_of_the_whole_text_however_it_is_read(model, texts):
    expected = whole(model, texts).to(torch.float32)
    for width in (1, 3, LENGTH):
        cached = CachedModel(model, len(texts), LENGTH)
        for begin in range(0, LENGTH, width):
            positions = torch.arange(begin, begin + width).repeat(len(texts))
            slots = torch.arange(len(texts)).repeat_interleave(width)
            found = read(cached, slots, positions, texts).view(len(texts), width, -1)
            torch.testing.assert_close(found, expected[:, begin : begin + width], rtol=0, atol=2e-6)


@pytest.mark.gpu
def test_cuda_logits_are_those_of_the_cpu(model, texts):
    """Of 245,760 logits, one in about 1e8 differs in its last bit."""
    positions = torch.arange(LENGTH).repeat(len(texts))
    slots = torch.arange(len(texts)).repeat_interleave(LENGTH)
    on_cpu = read(CachedModel(model, len(texts), LENGTH), slots, positions, texts)
    cached = CachedModel(model.to("cuda"), len(texts), LENGTH)
    on_cuda = read(cached, slots.cuda(), positions.cuda(), texts.cuda()).cpu()
    assert (on_cpu != on_cuda).sum() <= 1
    torch.testing.assert_close(on_cpu, on_cuda, rtol=0, atol=1e-6)


NUM_SLOTS = 32


@pytest.fixture(scope="module")
def models():
    return load_models()[0]


@pytest.fixture(scope="module")
def requests():
    return make_requests(load_models()[1], prompt_texts(None), count=14, steps=16)


@pytest.fixture(scope="module")
def reference(models, requests):
    sampler = Sampler(models.target.config.vocab_size, 8, backend="eager")
    return Engine(DecodeStep(models.target, sampler, 8, longest(requests))).run(requests, 8)


@pytest.fixture
def sampler(models):
    return Sampler(models.target.config.vocab_size, NUM_SLOTS, backend="eager")


def engine_of(
    models: Models, sampler: Sampler, requests: Sequence[Request], uniform: bool = False
) -> SpeculativeEngine:
    return SpeculativeEngine(models, sampler, longest(requests), uniform)


def test_steps_are_saved_where_drafts_are_accepted(models, sampler, requests, reference):
    engine = engine_of(models, sampler, requests)
    coupled = partial(drawn, model=engine.drafter, width=WIDTH, sampler=sampler, coupled=True)

    def never(batch: Batch) -> Drafts:
        return coupled(batch)._replace(counts=(0,) * len(batch.histories))

    result = engine.run(never, "match", requests, 5)
    assert (result.verifications, result.tokens_per_step) == (reference.num_tokens, 1.0)
    assert result.numbers(Pairing("never", "match", never), reference)["accepted_share"] == [None] * WIDTH
    result = engine.run(coupled, "match", requests, 5)
    assert result.decoded.streams == reference.streams
    assert result.verifications < reference.num_tokens * 0.8


@pytest.mark.parametrize(
    ("history", "drafts"),
    [
        ([], []),
        ([1, 2, 3, 1], []),
        ([1, 2, 3, 1, 2], [3, 1, 2]),
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5]),
        ([1, 2, 8, 9, 1, 2, 3, 1, 2], [3, 1, 2]),
        ([5, 5, 5, 5], [5]),
    ],
)
def test_look_up_drafts_what_followed_the_latest_place(history, drafts):
    assert look_up(history, WIDTH) == drafts


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "compiled", "graph"])
def test_cuda_streams_are_the_cpu_ones(models, requests, reference, backend):
    vocab_size = models.target.config.vocab_size
    sampler, on_cpu = (
        Sampler(vocab_size, NUM_SLOTS, "cuda", backend=backend),
        Sampler(vocab_size, NUM_SLOTS, backend="eager"),
    )
    engine = engine_of(Models(*(each.to("cuda") for each in models)), sampler, requests, uniform=True)
    same_engine = engine_of(models, on_cpu, requests)
    for pairing, same in zip(pairings(engine.drafter, sampler), pairings(same_engine.drafter, on_cpu), strict=True):
        result = engine.run(pairing.draft, pairing.rule, requests, 5)
        assert not result.numbers(pairing, reference)["mismatches"]
        expected = same_engine.run(same.draft, same.rule, requests, 5)
        assert result.decoded.streams == expected.decoded.streams
