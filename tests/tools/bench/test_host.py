"""The host's part of a step: the table, and on a GPU what a step asks of the driver."""

import pytest
import torch
from rich.console import Console

from compiled_sampler import Sampler
from tools.bench import __main__ as bench
from tools.bench.host import MIXES, HostCell, Steps, asked_of_the_driver, table_of

ASKED = {
    "kept plan, out=": {"graphs": 1, "launches": 0, "copies": 0, "allocations": 0},
    "kept plan": {"graphs": 1, "launches": 1, "copies": 0, "allocations": 2},
    "another batch": {"graphs": 1, "launches": 0, "copies": 1, "allocations": 0},
    "one request leaves, another comes": {"graphs": 1, "launches": 0, "copies": 1, "allocations": 0},
}
"""What a step of tensors that came back asks for: a copy for new slots or parameters, a launch for new ``out``."""


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize("step", ASKED)
def test_a_step_asks_the_driver_for_no_more_than_it_must(step):
    logits = torch.randn(8, 3000, device="cuda")
    sampler = Sampler(3000, 256, "cuda", buckets=[8])
    sampler.bind_logits(logits)
    sampler.warmup(modes=["full"])
    call = dict(Steps(sampler, logits, MIXES["mixed modes"], 8).named())[step]
    for _ in range(5):
        call()
    found = asked_of_the_driver(call)
    assert {kind: found[kind] for kind in ASKED[step]} == ASKED[step]
    assert found["waits"] < 0.5  # the profiler itself waits once or twice in all


def test_a_cell_is_a_line():
    asked = {"launches": 2.0, "graphs": 1.0, "copies": 0.0, "waits": 0.0, "allocations": 0.0}
    console = Console(width=130, record=True, file=None)
    with console.capture() as captured:
        console.print(table_of([HostCell("kept plan", "mixed modes", 8, 31.26, 5.9, asked)]))
    assert [part in captured.get() for part in ("kept plan", "31.3", "5.9")] == [True] * 3


@pytest.mark.parametrize("arguments", [["--host", "--device", "cpu"], ["--host", "--vocab", "10", "20"]])
def test_the_host_is_measured_beside_a_gpu_alone(arguments, capsys):
    with pytest.raises(SystemExit):
        bench.parse(arguments)
    assert "--host must come with --device cuda" in capsys.readouterr().err
