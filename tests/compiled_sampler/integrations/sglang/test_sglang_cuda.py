"""SGLang's adapter on a GPU, on stand-ins for SGLang's classes: the tokens of the CPU, and no wait for the device."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.sglang_engine import LAWS, batch_info, engine, outputs_of
from tests.no_waits import no_waits

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]
BATCHES = {"all": LAWS, "narrow": [LAWS[0], LAWS[5], LAWS[6]], "greedy": [LAWS[2]] * 2, "plain": [LAWS[1], {}]}


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    with engine("stand-in"):
        yield


def draw(logits: Tensor, info: Any, positions: Tensor, backend: str) -> Tensor:
    from compiled_sampler.integrations.sglang.drawing import CompiledSampler

    rows = [None] * len(logits)
    drawn: Tensor = CompiledSampler(backend)(outputs_of(logits), info, False, rows, rows, positions)
    return drawn


def on_the_gpu(info: Any) -> Any:
    moved = {name: value.cuda() for name, value in vars(info).items() if isinstance(value, Tensor)}
    return dataclasses.replace(info, **moved)


@pytest.mark.parametrize("name", BATCHES)
def test_the_tokens_are_those_of_the_cpu_and_a_step_waits_for_nothing(name: str) -> None:
    laws = BATCHES[name]
    info = batch_info(laws, list(range(len(laws))))
    there, positions = on_the_gpu(info), torch.arange(len(laws)) * 7
    for step in range(5):
        logits = torch.randn(len(laws), 5000, generator=torch.Generator().manual_seed(step)) * 3
        given = logits.cuda(), there, (positions + step).cuda()
        drawn = draw(*given, "compiled")
        assert drawn.tolist() == draw(logits, info, positions + step, "eager").tolist()
        with no_waits():
            draw(*given, "compiled")
