"""Targets by name: those that are shipped, and ``package.module:adapter``."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from compiled_sampler.conformance.adapter import Target
from compiled_sampler.conformance.bench import Bench, Effort

if TYPE_CHECKING:
    from compiled_sampler.conformance.processes.crew import Crew

_HERE = "compiled_sampler.conformance.adapters"
SHIPPED = {
    "ours": f"{_HERE}.ours:Ours",
    "ours-eager": f"{_HERE}.ours:Eager",
    "ours-compiled": f"{_HERE}.ours:Compiled",
    "ours-graph": f"{_HERE}.ours:Graph",
    "plain-torch": f"{_HERE}.plain_torch:PlainTorch",
    "torch-generators": f"{_HERE}.plain_torch:RowGenerators",
    "transformers": f"{_HERE}.transformers_processors:Transformers",
    "vllm-v1": f"{_HERE}.vllm_sampler:VllmV1",
    "vllm-v2": f"{_HERE}.vllm_kernels:VllmV2",
    "flashinfer": f"{_HERE}.flashinfer_kernels:FlashInfer",
}
"""Short names of the adapters in this package."""


def find_target(name: str) -> Target:
    """The target of a name; modules of the working directory are found too.

    Args:
        name: of SHIPPED, or ``package.module:adapter``.

    Raises:
        ValueError: it is neither.
    """
    module, _, attribute = SHIPPED.get(name, name).partition(":")
    if not attribute:
        raise ValueError(f"a target is package.module:adapter, got {name!r}; shipped ones are {', '.join(SHIPPED)}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return cast("Target", getattr(importlib.import_module(module), attribute))


class Setting(NamedTuple):
    """What a bench is made of, for other processes."""

    name: str
    """Of the target."""
    device: str
    effort: Effort
    seed: int

    def bench(self, crew: Crew | None = None) -> Bench:
        """A new bench like this, with processes for the questions that deal their work."""
        return Bench(find_target(self.name), self.name, torch.device(self.device), self.effort, self.seed, crew)


def setting_of(bench: Bench) -> Setting:
    """What a bench of a target with a name is made of."""
    assert bench.name is not None
    return Setting(bench.name, str(bench.device), bench.effort, bench.seed)


@functools.cache
def bench_of(setting: Setting) -> Bench:
    """The bench that the questions of this process share, with all that it has loaded."""
    return setting.bench()
