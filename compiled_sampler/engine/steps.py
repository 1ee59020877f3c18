"""Steps: what a sampler registers in its graph cache, with the inputs of each and the batches that it serves."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compiled_sampler.engine.plan import Plan
from compiled_sampler.modes import CACHE, Mode, includes
from graph_cache import BufferSpec

_ALSO = (torch.int32,)  # of slots, positions, counts and drafts, besides int64


@dataclass(frozen=True)
class Step:
    """One callable of the graph cache: a kind of step in a mode and for a number of drafts."""

    kind: str
    """"sample", "draft", "probabilities" or "verify"."""
    mode: Mode
    """The mode that the step is compiled for."""
    width: int = 0
    """K, drafts of a request in a verification; 0 for the other kinds."""

    @property
    def name(self) -> str:
        """The name of the callable, unique among the steps of a sampler."""
        if self.kind == "sample":
            return self.mode.name
        return f"{self.kind}[{self.width}] {self.mode.name}" if self.width else f"{self.kind} {self.mode.name}"

    @property
    def planned(self) -> tuple[str, ...]:
        """The names of the inputs that a plan brings."""
        return ("slots", "num_drafts") if self.kind == "verify" else ("slots",)


def input_specs(step: Step, logits_dtype: torch.dtype) -> dict[str, BufferSpec]:
    """The inputs of a step in the graph cache, by name."""
    vocab_size = step.mode.vocab_size
    row_dtype = torch.float32 if step.mode.from_probabilities else logits_dtype
    inputs = {
        "logits": BufferSpec((vocab_size,), row_dtype, 0.0, step.width + 1),
        "slots": BufferSpec((), torch.int64, -1, also=_ALSO),
        "positions": BufferSpec((), torch.int64, 0, also=_ALSO),
    }
    if step.kind == "draft":
        inputs["offsets"] = BufferSpec((), torch.int64, 0)
    if step.kind == "verify":
        inputs["num_drafts"] = BufferSpec((), torch.int64, -1, also=_ALSO)
        inputs["draft_token_ids"] = BufferSpec((step.width,), torch.int64, -1, also=_ALSO)
        if step.mode.drafts not in ("one_hot", CACHE):
            dtype = torch.float32 if step.mode.drafts == "probabilities" else logits_dtype
            inputs["proposals"] = BufferSpec((vocab_size,), dtype, 0.0, step.width, ragged=True)
    return inputs


def with_plan(step: Step, plan: Plan, given: dict[str, Tensor], on_host: bool) -> dict[str, Any]:
    """The given inputs of a step, and those of the plan that are not among them."""
    return {**plan.inputs([name for name in step.planned if name not in given], on_host), **given}


def buffer_name(name: str, step: Step) -> str:
    """The name of an input in the graph cache, where inputs of one name share a buffer and so must share a layout."""
    if name == "logits" and step.mode.from_probabilities:
        name = "probabilities"
    if name in ("logits", "probabilities", "draft_token_ids", "proposals") and step.width:
        name = f"{name} x {step.width}"
    return f"{name} of {step.mode.drafts}" if name.startswith("proposals") else name


def is_of(mode: Mode, names: Collection[str]) -> bool:
    """Whether a step's mode samples as one of the named modes; a mode of probabilities belongs to all of them."""
    return mode.from_probabilities or mode.samples_as in names


def covers(mode: Mode, other: Mode) -> bool:
    """Whether steps of a mode serve all batches of another that verifies in the same way."""
    ways = [(each.rule, each.drafts, each.from_probabilities) for each in (mode, other)]
    return ways[0] == ways[1] and includes(mode, other)
