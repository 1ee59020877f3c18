"""Steps: the callables that a sampler registers with its graph cache, and what they read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compiled_sampler.edit_names import GIVEN, LEAVES, MASK, reading, without_vain_leave
from compiled_sampler.engine.plans.plan import Plan
from compiled_sampler.logprobs import Logprobs
from compiled_sampler.modes import CACHE, PROCESSED, Mode, includes
from graph_cache import BufferSpec

_MOST_COPIED = {False: 400_000_000, True: 700_000_000}  # bytes, by whether top-k or top-p is compiled in
_ALSO = (torch.int32,)  # of slots, positions, counts and drafts, besides int64


@dataclass(frozen=True)
class Step:
    """One callable of the graph cache: a kind of step in a mode and for a number of drafts."""

    kind: str
    """"sample", "draft", "probabilities", "edited_logits" or "verify"."""
    mode: Mode
    """The mode that the step is compiled for."""
    width: int = 0
    """K, drafts of a request in a verification; 0 for the other kinds."""
    edits: tuple[str, ...] = ()
    """The names of the edits that it makes, the library's and then the user's; other rows are left as they are."""

    logprobs: Logprobs | None = None
    """Which logprobs it returns; None for none."""

    @property
    def name(self) -> str:
        """The name of the callable, unique among the steps of a sampler."""
        edits = "".join(f" + {name}" for name in self.edits)
        if self.logprobs is not None:
            edits += f" + {self.logprobs.label}"
        if self.kind == "sample":
            return f"{self.mode.name}{edits}"
        width = f"[{self.width}]" if self.width else ""
        return f"{self.kind}{width} {self.mode.name}{edits}"

    @property
    def most_copied(self) -> int:
        """Bytes of a batch whose copies for a replay take as long as the host launches the step: the more the kernels.

        Measured, ``docs/performance.md``.
        """
        return _MOST_COPIED[self.mode.capacity > 0 or self.mode.beyond_candidates]

    @property
    def records(self) -> bool:
        """Whether it writes its tokens into the history."""
        return self.has_tokens and bool(reading(self.edits))

    @property
    def has_tokens(self) -> bool:
        """Whether it draws tokens."""
        return self.kind not in ("probabilities", "edited_logits")

    @property
    def takes_logprobs(self) -> bool:
        """Whether such steps return logprobs if asked for some: those that draw from logits of the target."""
        return self.kind in ("sample", "verify") and not self.mode.from_probabilities

    def with_logprobs(self, wanted: Logprobs) -> Step:
        """The step of calls that ask for logprobs too, and then make no use of some leave."""
        by_row = self.kind == "sample" or self.mode.rule == "match"
        edits = without_vain_leave(self.edits, reads_raw=wanted.of == "raw", by_row=by_row)
        return replace(self, edits=edits, logprobs=wanted)

    @property
    def planned(self) -> tuple[str, ...]:
        """The names of the inputs that a plan brings."""
        return ("slots", "num_drafts") if self.kind == "verify" else ("slots",)

    def inputs(self, logits_dtype: torch.dtype) -> dict[str, BufferSpec]:
        """The inputs of the callable by name."""
        vocab_size = self.mode.vocab_size
        row_dtype = torch.float32 if self.mode.from_probabilities else logits_dtype
        inputs = {
            "logits": BufferSpec((vocab_size,), row_dtype, 0.0, self.width + 1),
            "slots": BufferSpec((), torch.int64, -1, also=_ALSO, fetched=True),
            "positions": BufferSpec((), torch.int64, 0, also=_ALSO),
        }
        if MASK in self.edits:
            inputs[MASK] = BufferSpec((-(-vocab_size // 32),), torch.int32, -1, self.width + 1)
        if self.kind == "draft":
            inputs["offsets"] = BufferSpec((), torch.int64, 0)
        if self.kind == "verify":
            inputs["num_drafts"] = BufferSpec((), torch.int64, -1, also=_ALSO, fetched=True)
            inputs["draft_token_ids"] = BufferSpec((self.width,), torch.int64, -1, also=_ALSO)
            if self.mode.drafts not in ("one_hot", CACHE):
                dtype = torch.float32 if self.mode.drafts == "probabilities" else logits_dtype
                inputs["proposals"] = BufferSpec((vocab_size,), dtype, 0.0, self.width, ragged=True)
        return inputs

    def buffer(self, name: str) -> str:
        """The name of an input in the graph cache, where inputs of one name share a buffer and so a layout."""
        if name == "logits" and self.mode.from_probabilities:
            name = "probabilities"
        by_row = name in ("logits", "probabilities", "draft_token_ids", "proposals", MASK) or name.startswith(GIVEN)
        if by_row and self.width:
            name = f"{name} x {self.width}"
        form = "logits" if self.mode.drafts == PROCESSED else self.mode.drafts
        return f"{name} of {form}" if name.startswith("proposals") else name

    def with_plan(self, plan: Plan, given: dict[str, Tensor], on_host: bool) -> dict[str, Any]:
        """The given inputs, and those of the plan that are not among them."""
        return plan.inputs(frozenset(name for name in self.planned if name not in given), on_host) | given

    def is_of(self, modes: Collection[str]) -> bool:
        """Whether it samples as one of the named modes; a step on probabilities belongs to all of them."""
        return self.mode.from_probabilities or self.mode.samples_as in modes

    def covers(self, other: Step) -> bool:
        """Whether it serves all batches of another step that verifies in the same way."""
        ways = [(each.mode.rule, each.mode.drafts, each.mode.from_probabilities) for each in (self, other)]
        results = [(each.edits, each.logprobs) for each in (self, other)]
        return results[0] == results[1] and ways[0] == ways[1] and includes(self.mode, other.mode)

    def serves(self, other: Step, with_call: Sequence[str] = ()) -> bool:
        """Whether it is another step, or has edits more, which leave the rows of such a batch as they are.

        A mask comes with the call, and so does the leave to write its logits: both steps have it, or neither. Both
        return the same logprobs.

        Args:
            other: a step.
            with_call: names of further edits, to which tensors come with the call.
        """
        kinds = [(each.kind, each.mode, each.width, each.logprobs) for each in (self, other)]
        of_call = ([name in each.edits for name in (MASK, *LEAVES, *with_call)] for each in (self, other))
        is_wider = bool(other.edits) and next(of_call) == next(of_call) and set(self.edits) >= set(other.edits)
        is_alike = kinds[0] == kinds[1]
        return is_alike and (is_wider or self.edits == other.edits)
