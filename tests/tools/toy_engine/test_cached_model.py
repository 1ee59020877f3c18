"""A model with a cache: rows in any batch, against texts that are read as a whole."""

import pytest
import torch
from torch import Tensor

from tools.model import train, transformer
from tools.model.transformer import Model
from tools.toy_engine.cached_model import CachedModel
from tools.toy_engine.runs import load_models

LENGTH = 24


@pytest.fixture(scope="module")
def model() -> Model:
    return load_models()[0].target


@pytest.fixture(scope="module")
def texts() -> Tensor:
    return torch.randint(2048, (5, LENGTH), generator=torch.Generator().manual_seed(0))


def whole(model: Model, texts: Tensor) -> Tensor:
    """The logits of texts ``[B, T]`` without a cache, float64 ``[B, T, V]``."""
    rotary = transformer.rotary_table(model.config, texts.shape[1], torch.float64)[:, :, None]
    return transformer.logits(model.config, dict(model.weights), texts, rotary, train._attend_within)


def read(cached: CachedModel, slots: Tensor, positions: Tensor, texts: Tensor) -> Tensor:
    """Logits of tokens of texts, each slot's text being the row of its number."""
    return cached.logits(slots, positions, texts[slots, positions])


def test_logits_are_those_of_the_whole_text_however_it_is_read(model: Model, texts: Tensor) -> None:
    expected = whole(model, texts).to(torch.float32)
    for width in (1, 3, LENGTH):
        cached = CachedModel(model, len(texts), LENGTH)
        for begin in range(0, LENGTH, width):
            positions = torch.arange(begin, begin + width).repeat(len(texts))
            slots = torch.arange(len(texts)).repeat_interleave(width)
            found = read(cached, slots, positions, texts).view(len(texts), width, -1)
            torch.testing.assert_close(found, expected[:, begin : begin + width], rtol=0, atol=2e-6)


@pytest.mark.gpu
def test_cuda_logits_are_those_of_the_cpu(model: Model, texts: Tensor) -> None:
    """Of 245,760 logits, one in about 1e8 differs in its last bit."""
    positions = torch.arange(LENGTH).repeat(len(texts))
    slots = torch.arange(len(texts)).repeat_interleave(LENGTH)
    on_cpu = read(CachedModel(model, len(texts), LENGTH), slots, positions, texts)
    cached = CachedModel(model.to("cuda"), len(texts), LENGTH)
    on_cuda = read(cached, slots.cuda(), positions.cuda(), texts.cuda()).cpu()
    assert (on_cpu != on_cuda).sum() <= 1
    torch.testing.assert_close(on_cpu, on_cuda, rtol=0, atol=1e-6)
