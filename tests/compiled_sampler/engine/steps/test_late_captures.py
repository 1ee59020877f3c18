"""Batches that are captured when they come, after a warm-up that did not wait; on recordings in place of graphs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_sampler import Sampler, SamplingParams
from tests.builders.sampler import replay_recordings
from tests.graph_cache.recorded import RecordingBackend

V = 130


class Late:
    """A sampler whose stages are all compiled, and what it captures."""

    def __init__(self) -> None:
        """A warm-up asked for mode ``greedy`` and did not wait."""
        self.sampler = Sampler(V, 4, backend="eager", buckets=[2, 4])
        self.backend: RecordingBackend = replay_recordings(self.sampler)
        stages: Any = SimpleNamespace(are_settled=True, status=lambda: None, compares=False, lacks_kernels=False)
        runner: Any = self.sampler._runner
        runner._compile = lambda *_, **__: None
        runner._stages = stages
        self.sampler.warmup(modes=["greedy"], wait=False)
        self.logits, self.positions = torch.randn(2, V), torch.tensor([3, 4])
        self.plan = self.sampler.plan([self.sampler.add_request(SamplingParams(temperature=0.0)) for _ in range(2)])

    def captures_after(self, steps: int) -> int:
        """How many graphs there are after some steps more."""
        for _ in range(steps):
            drawn = self.sampler.sample(self.plan, self.logits, self.positions)
            assert drawn.tolist() == self.logits.argmax(-1).tolist()
        return self.backend.num_captures


@pytest.fixture
def late() -> Late:
    """A sampler that captures when batches come."""
    return Late()


def test_a_batch_is_captured_when_it_comes(late):
    assert late.captures_after(2) == 1
    assert late.captures_after(3) == 1


def test_a_warmup_of_other_modes_that_waits_leaves_late_captures_on(late):
    late.sampler.warmup(modes=())
    assert late.captures_after(2) == 1


def test_a_warmup_captures_nothing_where_torch_stands_in_for_kernels(late):
    late.sampler._runner._stages.lacks_kernels = True
    late.sampler.warmup(modes=["greedy"])
    assert late.backend.num_captures == 0
    late.sampler._runner._stages.lacks_kernels = False
    late.sampler.warmup(modes=["greedy"])
    assert late.backend.num_captures == 2


def test_a_capture_that_fails_once_is_tried_again(late):
    late.backend.failures = [torch.OutOfMemoryError("planted")]
    assert late.captures_after(3) == 1


def test_a_capture_that_always_fails_is_given_up_until_the_next_warmup(late, caplog):
    late.backend.failures = [RuntimeError("planted") for _ in range(5)]
    assert late.captures_after(6) == 0
    assert len(late.backend.failures) == 3
    assert caplog.text.count("runs without a graph") == 1
    late.backend.failures.clear()
    late.sampler.warmup(modes=["greedy"], wait=False)
    assert late.captures_after(2) == 1


def test_a_call_that_ran_before_the_warmup_is_captured_after_it(late):
    late.sampler._runner._captures_late = False
    assert late.captures_after(2) == 0
    late.sampler.warmup(modes=["greedy"], wait=False)
    assert late.captures_after(2) == 1


def test_steps_before_a_late_capture_are_counted_too(late):
    late.sampler._runner._stages.are_settled = False
    late.captures_after(3)
    late.sampler._runner._stages.are_settled = True
    assert late.captures_after(4) == 1
    counted = late.sampler.statistics()
    assert (counted.direct_runs, counted.replays) == (4, 3)
    assert counted.fallbacks == {"greedy rows=2: no variant": 4}
