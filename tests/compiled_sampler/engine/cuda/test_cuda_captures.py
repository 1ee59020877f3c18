"""What must not happen inside a capture on CUDA is refused there, and works afterwards."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.batch import tensors_of
from tests.builders.sampler import same

pytestmark = pytest.mark.gpu


def step_after_a_kernel(x: Tensor, step: Callable[[], object]) -> None:
    """Without a kernel before it, the end of the capture would warn of an empty graph."""
    x + 1.0
    step()


@pytest.mark.parametrize("what", ["a request", "a new plan", "warmup"])
def test_what_a_capture_would_freeze_is_refused_inside_one(what):
    samplers = [Sampler(127, 4, device, backend="eager") for device in ("cuda", "cpu")]
    for each in samplers:
        each.add_request(SamplingParams(temperature=0.7, seed=1))
    step = {
        "a request": lambda: samplers[0].add_request(SamplingParams(temperature=0.7, seed=2)),
        "a new plan": lambda: samplers[0].plan([0, 0]),
        "warmup": samplers[0].warmup,
    }[what]
    logits = torch.randn(2, 127)
    given = logits.cuda()
    with pytest.raises(RuntimeError, match=f"^{what}.* inside a capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        step_after_a_kernel(given, step)
    assert not torch.cuda.is_current_stream_capturing()
    step()
    found, wanted = (
        each.sample(each.plan([0, 0]), rows, torch.arange(2, device=each.device))
        for each, rows in zip(samplers, (given, logits), strict=True)
    )
    assert same(found, wanted)


def test_a_plan_of_ragged_drafts_is_first_used_inside_a_capture():
    """What the graph uploads, slots, counts and the places of drafts, is still there when it is replayed."""
    samplers = [Sampler(127, 4, device, backend="eager") for device in ("cuda", "cpu")]
    logits, draft_logits = torch.randn(7, 127), torch.randn(2, 3, 127)
    graph, wanted = torch.cuda.CUDAGraph(), None
    for each in reversed(samplers):
        for seed in range(3):
            each.add_request(SamplingParams(temperature=0.7, seed=seed))
        positions = torch.arange(3, device=each.device)
        single = each.plan([0, 1, 2])
        given = [row.to(each.device) for row in draft_logits]
        drafts = [each.draft(single, row, positions, coupled=False, offset=j) for j, row in enumerate(given)]
        plan, rows = each.plan([0, 1, 2], num_drafts=[2, 0, 2]), logits.to(each.device)
        if each.device.type == "cpu":
            wanted = each.verify(plan, rows, drafts, positions, "rejection")
            continue
        with torch.cuda.graph(graph):
            found = each.verify(plan, rows, drafts, positions, "rejection")
        for _ in range(2):
            for tensor in tensors_of(found):
                tensor.fill_(-7)
            junk = [torch.full((64,), -7).pin_memory().cuda(non_blocking=True) for _ in range(64)]
            graph.replay()
            assert same(found, wanted)
            del junk
