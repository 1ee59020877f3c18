"""What a replay costs is found by name: on a GPU, and on a simulated device where there is none."""

from unittest import mock

import pytest
import torch

from compiled_sampler.conformance import QUICK, Bench, Outcome, ask, chosen
from compiled_sampler.conformance.ours import Graph
from compiled_sampler.conformance.questions import cost
from tests.compiled_sampler.conformance.adapters.broken_paths import COSTLY, Allocates, Replays, Waits


class Simulated:
    """A device that counts the clones and reads of tensors, and is busy until one is read."""

    def __init__(self):
        self.allocated, self.is_busy = 0, False

    def settle(self):
        self.is_busy = False

    def allocations(self):
        return self.allocated

    def keep_busy(self):
        self.is_busy = True
        return lambda: self.is_busy


@pytest.fixture
def device(monkeypatch):
    """The simulated device, instead of the one that is measured."""
    made = Simulated()
    monkeypatch.setattr(cost, "device_of", lambda bench: made)
    allocates, waits = Allocates.replayed, Waits.replayed

    def counted(self, tokens):
        made.allocated += 1
        return allocates(self, tokens)

    def waited(self, tokens):
        made.is_busy = False
        return waits(self, tokens)

    with mock.patch.object(Allocates, "replayed", counted), mock.patch.object(Waits, "replayed", waited):
        yield made


def asked(target, name, where):
    (question,) = chosen([name])
    return ask(Bench(target, None, torch.device(where), QUICK), question)


@pytest.mark.parametrize("name", COSTLY)
def test_a_simulated_cost_is_found_by_its_question_alone(device, name):
    assert asked(Replays, name, "cpu").outcome is Outcome.PASSED
    found = {each for each in COSTLY if asked(COSTLY[name], each, "cpu").outcome is Outcome.FAILED}
    assert found == {name}


def test_without_cuda_costs_are_not_asked():
    results = [asked(Replays, name, "cpu") for name in COSTLY]
    assert {(each.outcome, each.detail) for each in results} == {(Outcome.NOT_ASKED, "only on CUDA")}


@pytest.mark.gpu
@pytest.mark.parametrize("name", COSTLY)
def test_a_cost_is_found_on_a_device(name):
    assert asked(Replays, name, "cuda").outcome is Outcome.PASSED
    result = asked(COSTLY[name], name, "cuda")
    assert result.outcome is Outcome.FAILED, result


@pytest.mark.gpu
@pytest.mark.parametrize("name", COSTLY)
def test_a_replay_of_ours_costs_nothing_but_a_launch(name):
    result = asked(Graph, name, "cuda")
    assert result.outcome is Outcome.PASSED, result
