"""Steps: the callables that a sampler registers with its graph cache, and what they read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

import torch

from compiled_sampler.edits.names import GIVEN, LEAVES, MASK, reading, without_vain_leave
from compiled_sampler.logprobs import Logprobs
from compiled_sampler.modes import CACHE, PROCESSED, Mode, includes
from graph_cache import BufferSpec

_MOST_COPIED = {False: 400_000_000, True: 700_000_000}  # bytes, by whether top-k or top-p is compiled in
_ALSO = (torch.int32,)  # of slots, positions, counts and drafts, besides int64


_way_of = attrgetter(
    "mode.rule", "mode.drafts", "mode.from_probabilities", "of_trees", "num_best", "has_own_noise"
)  # what a step that serves another has in common with it, besides edits and logprobs


@dataclass(frozen=True)
class Step:
    """One callable of the graph cache: a kind of step in a mode and for a number of drafts."""

    kind: str
    """"sample", "best", "probabilities", "edited_logits" or "verify"."""
    mode: Mode
    """The mode that the step is compiled for."""
    width: int = 0
    """K, drafts of a request in a verification; 0 for the other kinds."""
    edits: tuple[str, ...] = ()
    """The names of the edits that it makes, the library's and then the user's; other rows are left as they are."""
    logprobs: Logprobs | None = None
    """Which logprobs it returns; None for none."""
    reads_draw_index: bool = False
    """Whether its rows are draws of positions that have several."""
    num_best: int = 0
    """How many of the best tokens of its race a step of the kind "best" returns."""
    has_own_noise: bool = False
    """Whether the race of a step of the kind "sample" or "best" is on the noise of drafts instead of the target's."""
    of_trees: bool = False
    """Whether it verifies trees of drafts."""

    @property
    def name(self) -> str:
        """The name of the callable, unique among the steps of a sampler."""
        edits = "".join(f" + {name}" for name in self.edits)
        if self.logprobs is not None:
            edits += f" + {self.logprobs.label}"
        if self.kind == "sample":
            kind = "draft " if self.has_own_noise else ""
            return f"{kind}{self.mode.name}{' of several draws' if self.reads_draw_index else ''}{edits}"
        count = self.width or self.num_best
        width = f"[{'tree of ' if self.of_trees else ''}{count}]" if count else ""
        kind = f"{self.kind} on its own noise" if self.has_own_noise else self.kind
        return f"{kind}{width} {self.mode.name}{edits}"

    @property
    def most_copied(self) -> int:
        """Bytes of a batch whose copies for a replay take as long as the host launches the step."""
        # measured, ``docs/performance.md``: the more, the more kernels
        return _MOST_COPIED[self.mode.capacity > 0 or self.mode.beyond_candidates]

    @cached_property
    def records(self) -> bool:
        """Whether it writes its tokens into the history."""
        return self.has_tokens and bool(reading(self.edits))

    @cached_property
    def has_tokens(self) -> bool:
        """Whether it draws tokens."""
        return self.kind not in ("best", "probabilities", "edited_logits")

    @property
    def takes_logprobs(self) -> bool:
        """Whether such steps return logprobs if asked for some: those that draw from logits of the target."""
        of_target = self.kind in ("sample", "verify") and not self.has_own_noise
        return of_target and not self.mode.from_probabilities

    def with_logprobs(self, wanted: Logprobs) -> Step:
        """The step of calls that ask for logprobs too, and then make no use of some leave."""
        by_row = self.kind == "sample" or self.mode.rule == "match"
        edits = without_vain_leave(self.edits, reads_raw=wanted.of == "raw", by_row=by_row)
        return replace(self, edits=edits, logprobs=wanted)

    @cached_property
    def reads_counts(self) -> bool:
        """Whether it reads how many drafts each request has."""
        return self.kind == "verify"

    def inputs(self, logits_dtype: torch.dtype, columns: int) -> dict[str, BufferSpec]:
        """The inputs of the callable by name; ``columns`` of logits, V or those of a shard."""
        row_dtype = torch.float32 if self.mode.from_probabilities else logits_dtype
        inputs = {
            "logits": BufferSpec((columns,), row_dtype, 0.0, self.width + 1),
            "slots": BufferSpec((), torch.int64, -1, also=_ALSO, on_host=True),
            "positions": BufferSpec((), torch.int64, 0, also=_ALSO),
        }
        if MASK in self.edits:
            inputs[MASK] = BufferSpec((-(-self.mode.vocab_size // 32),), torch.int32, -1, self.width + 1)
        if self.reads_draw_index:
            inputs["draw_index"] = BufferSpec((), torch.int64, 0, also=_ALSO)
        if self.has_own_noise:
            inputs["offsets"] = BufferSpec((), torch.int64, 0)
        if self.kind == "verify":
            inputs["num_drafts"] = BufferSpec((), torch.int64, -1, also=_ALSO, on_host=True)
            inputs["draft_token_ids"] = BufferSpec((self.width,), torch.int64, -1, also=_ALSO)
            if self.of_trees:
                inputs["parents"] = inputs["draft_token_ids"]
            if self.mode.drafts not in ("one_hot", CACHE):
                dtype = torch.float32 if self.mode.drafts == "probabilities" else logits_dtype
                inputs["proposals"] = BufferSpec((columns,), dtype, 0.0, self.width, ragged=True)
        return inputs

    def buffer(self, name: str) -> str:
        """The name of an input in the graph cache, where inputs of one name share a buffer and so a layout."""
        if name == "logits" and self.mode.from_probabilities:
            name = "probabilities"
        by_row = name in (
            "logits",
            "probabilities",
            "draft_token_ids",
            "parents",
            "proposals",
            MASK,
        ) or name.startswith(GIVEN)
        if by_row and self.width:
            name = f"{name} x {self.width}"
        form = "logits" if self.mode.drafts == PROCESSED else self.mode.drafts
        return f"{name} of {form}" if name.startswith("proposals") else name

    def is_of(self, modes: Collection[str]) -> bool:
        """Whether it samples as one of the named modes; a step on probabilities belongs to all of them."""
        return self.mode.from_probabilities or self.mode.samples_as in modes

    def covers(self, other: Step) -> bool:
        """Whether it serves all batches of another step that verifies in the same way."""
        is_alike = _way_of(self) == _way_of(other) and (self.edits, self.logprobs) == (other.edits, other.logprobs)
        return is_alike and includes(self.mode, other.mode)

    def can_replace(self, other: Step, with_call: Sequence[str] = ()) -> bool:
        """Whether it is another step, or has edits more, which leave the rows of such a batch as they are."""
        if replace(self, edits=()) != replace(other, edits=()):
            return False
        if self.edits == other.edits:
            return True
        # both have what comes with the call, or neither: a mask, leave to write logits, the tensors of ``with_call``
        by_call = (MASK, *LEAVES, *with_call)
        is_alike = all((name in self.edits) == (name in other.edits) for name in by_call)
        return bool(other.edits) and is_alike and set(self.edits) >= set(other.edits)
