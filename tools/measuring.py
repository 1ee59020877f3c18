"""What measurements share: where they were taken, the clock, and logits."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

ROTATED_BYTES = 160 << 20
"""What the inputs of one replay take together: more than three times the 50 MB of an H200's L2."""
MOST_STREAMS = 32
"""Torch has no more; further ones are the same again."""
_MOST_CALLS, _FEWEST_CALLS = 1024, 16
_CAPTURES = 3
_BUDGET_US, _FEWEST_REPEATS, _MOST_REPEATS = 1e5, 3, 7
_MOST_BY_CLOCK = 51  # a machine with other users varies more than a GPU

_QUEUED, _QUEUES = 32, 7
_SPIN_CYCLES, _MOST_CYCLES = 20_000_000, 2_000_000_000  # about 10 ms and 1 s

Result = TypeVar("Result")
Call = TypeVar("Call")
DISTRIBUTIONS = ("peaked", "normal", "flat", "ties")


def environment(device: str | None = None) -> dict[str, str]:
    """Where and with what something was measured.

    Args:
        device: "cuda" or "cpu"; None is CUDA where there is one.
    """
    cuda = torch.cuda.is_available() if device is None else device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU {platform.machine()}",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def write_json(path: str, content: dict[str, Any]) -> None:
    """Store a measurement, readable by people too."""
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content, indent=1) + "\n")


def _version(module: str) -> str:
    try:
        return str(__import__(module).__version__)
    except ImportError:
        return "none"


def _commit() -> str:
    """The commit of the working tree, or ``COMMIT`` of the environment where there is only a copy of it."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def num_inputs(bytes_per_call: int, device: torch.device) -> int:
    """Inputs that a replay goes through, so that no call finds its own in the L2; on the CPU two."""
    if device.type != "cuda":
        return 2
    return max(2, min(_MOST_CALLS, -(-ROTATED_BYTES // bytes_per_call)))


def num_rounds(inputs: int, device: torch.device) -> int:
    """How often a replay goes through its inputs, so that its own launch hardly counts; on the CPU once."""
    return -(-_FEWEST_CALLS // inputs) if device.type == "cuda" else 1


def time_calls(
    function: Callable[[Call], Result], calls: Sequence[Call], device: torch.device
) -> tuple[float, list[Result]]:
    """Median microseconds of one call, and what the timed calls returned: the last round of the last repeat.

    Args:
        function: makes one call; its results are new tensors.
        calls: the inputs, which are gone through in turn.
        device: "cuda" replays a graph of all calls, "cpu" takes the clock.
    """
    rounds = num_rounds(len(calls), device)

    def step() -> list[Result]:
        results: list[Result] = []
        for _ in range(rounds):
            results = [function(call) for call in calls]
        return results

    timer = graph_time_us if device.type == "cuda" else clock_time_us
    us, results = timer(step)
    return us / (rounds * len(calls)), results


def graph_time_us(step: Callable[[], Result]) -> tuple[float, Result]:
    """Median microseconds of a replay of ``step``, of several CUDA graphs of it, and the results that the last wrote.

    All is launched on the current stream. On how many streams a process has launched kernels before decides whether
    each kernel of a graph takes up to 0.2 us more, see ``use_streams``; where a capture puts its tensors, one percent.
    """
    step()
    medians, held = [], []
    for _ in range(_CAPTURES):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step()
        _replay_us(graph)
        times = [_replay_us(graph)]
        times += [_replay_us(graph) for _ in range(repeats_for(times[0]) - 1)]
        medians.append(statistics.median(times))
        held.append(result)  # so that the next graph's tensors lie elsewhere
    return statistics.median(medians), held[-1]


def queued_time_us(step: Callable[[], object]) -> float:
    """Median microseconds that the GPU takes for a step, of steps that queue, so that the host's time is left out.

    A kernel that spins holds the stream until all steps are issued; one that ends before is not counted, and a longer
    one takes its place.

    Raises:
        RuntimeError: the host takes longer than the longest spin, as where a step waits for the device.
    """
    step()
    times, cycles = list[float](), _SPIN_CYCLES
    while len(times) < _QUEUES:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        start.record()
        for _ in range(_QUEUED):
            step()
        end.record()
        is_held = not start.query()
        end.synchronize()
        if is_held:
            times.append(float(start.elapsed_time(end)) * 1e3 / _QUEUED)
        elif cycles < _MOST_CYCLES:
            cycles *= 2
        else:
            raise RuntimeError("a step must not wait for the device, as those that queue do")
    return statistics.median(times)


def use_streams(count: int, device: torch.device) -> None:
    """Launch a kernel on so many streams more, up to ``MOST_STREAMS``, as an engine in the same process would.

    From the 7th to 13th stream on, by process, every kernel of every graph takes longer, also of those captured before:
    on an H200 with driver 580 up to 0.18 us, less with programmatic dependent launch. Neither what the streams did nor
    ``CUDA_DEVICE_MAX_CONNECTIONS`` makes a difference. Source: measured; pytorch issue 161104 is about the same.
    """
    for _ in range(count):
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            torch.ones(1, device=device)
    torch.cuda.synchronize(device)


def clock_time_us(step: Callable[[], Result]) -> tuple[float, Result]:
    """Median microseconds of ``step`` by the clock, after one call that may compile, and its last results."""
    result = step()
    times: list[float] = []
    while len(times) < (repeats_for(times[0], _MOST_BY_CLOCK) if times else 1):
        start = time.perf_counter()
        result = step()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times), result


def repeats_for(us: float, most: int = _MOST_REPEATS) -> int:
    """How often to measure a step that takes so long: as many times as fit a tenth of a second, within limits."""
    return max(_FEWEST_REPEATS, min(most, int(_BUDGET_US / max(us, 1.0))))


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def logits_like(
    distribution: str, rows: int, vocab_size: int, device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> Tensor:
    """Logits ``[rows, vocab_size]``.

    Args:
        distribution: "peaked": Zipf-shaped log-probabilities with exponent 2 in shuffled order plus N(0, 0.5) noise;
            "normal": N(0, 2); "flat": N(0, 0.01); "ties": peaked, rounded to bfloat16.
        rows: R.
        vocab_size: V.
        device: where.
        dtype: float32, bfloat16 or float16.
        seed: of torch's generator on that device.

    Raises:
        ValueError: an unknown distribution.
    """
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"distribution must be one of {DISTRIBUTIONS}, got {distribution!r}")
    generator = torch.Generator(device).manual_seed(seed)
    noise = torch.randn(rows, vocab_size, device=device, generator=generator)
    if distribution == "normal":
        return (noise * 2.0).to(dtype)
    if distribution == "flat":
        return (noise * 0.01).to(dtype)
    ranks = torch.rand(rows, vocab_size, device=device, generator=generator).argsort(-1) + 1
    logits = noise * 0.5 - 2.0 * ranks.log()
    return logits.bfloat16().to(dtype) if distribution == "ties" else logits.to(dtype)
