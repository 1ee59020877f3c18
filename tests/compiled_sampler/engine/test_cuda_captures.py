"""What must not happen inside a capture on CUDA is refused there, and works afterwards."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams
from tests.builders_sampler import same

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
