"""How an edit of a few tokens of each row is told: by what it adds to the bits of their logits, as integers.

Nothing is changed by adding 0. So entries that stand for nothing are additions of 0, wherever they point: they need no
place of their own, and a kernel need not leave them out.

Stages that add get the memory of the logits twice: as floats, to read, and as the integers of their bits, to which
edits add. An edit is one kernel then, which reads and writes a token in one thread. Were memory given once, Inductor
would write what is added to other memory first, and add it in a second kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from compiled_sampler.core.order import indices
from compiled_sampler.core.stage import holds
from compiled_sampler.edits.history import AnyHistory


class EditedTokens(NamedTuple):
    """What one edit adds to the bits of logits; of several entries with one token, all but one add 0."""

    token_ids: Tensor  # int64 [R, n]; int32 where the edit is kept to be undone
    added: Tensor  # int32 [R, n]; sums wrap


def entry_ids(token_ids: Tensor, is_entry: Tensor, vocab_size: int) -> Tensor:
    """Tokens of entries, int64 ``[R, n]``; of those that stand for nothing a different one each, while there are."""
    count = token_ids.shape[1]
    place = indices(count, token_ids.device)
    # Were it the same id for all, a GPU would add their zeros in one place, one after the other.
    return torch.where(is_entry, token_ids, place if count <= vocab_size else place % vocab_size).to(torch.int64)


def edited_tokens(token_ids: Tensor, before: Tensor, after: Tensor, is_entry: Tensor) -> EditedTokens:
    """The edit that turns the logits of entries into others; arguments ``[R, n]``, logits float32."""
    added = after.view(torch.int32) - before.view(torch.int32)
    return EditedTokens(token_ids, torch.where(is_entry, added, 0))


def add_to_bits(bits: Tensor, made: EditedTokens, tells: bool) -> EditedTokens | None:
    """What ``take_back`` undoes, None if it is not asked for; the edit is in the logits afterwards."""
    rows = torch.arange(bits.shape[0], device=bits.device)[:, None]
    told = EditedTokens(made.token_ids.to(torch.int32), made.added) if tells else None  # where memory may end
    bits.index_put_((rows, made.token_ids), made.added, accumulate=True)
    return told


@holds(position_bytes=51)  # as `write_penalties`
def take_back(bits: Tensor, made: EditedTokens) -> None:
    """Nothing; logits have the bits again that they had before an edit, if later ones were taken back already."""
    add_to_bits(bits, EditedTokens(made.token_ids.to(torch.int64), -made.added), tells=False)


def list_entries(slots: Tensor, counts: Tensor, lists: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The slot of each row ``[R]``, the entries of its list ``[R, n]``, and whether it has any, bool ``[R, 1]``."""
    slot, place = slots.clamp(min=0), torch.arange(lists.shape[1], device=slots.device)
    count = torch.where(slots >= 0, counts[slot], 0)[:, None]
    # behind the last entry stands the first one
    return slot, torch.where(place < count, place, 0), count > 0


class ListWriter(Protocol):
    """Runs the stages of lists on the logits of a step."""

    def add(self, stage: Callable[..., Any], *read: Any) -> None:
        """Run ``stage(x, bits, *read, vocab_size=, tells=)``, which adds to the bits of logits."""
        ...

    def put(self, stage: Callable[..., Any], *read: Any, smallest: bool = False) -> None:
        """Write tokens and logits ``[R, n]`` of ``stage(x, *read)``; of equal tokens one, or the ``smallest``."""
        ...


class ListTable(Protocol):
    """A table of an edit that writes a few tokens of each row."""

    def write(self, writer: ListWriter, slots: Tensor, positions: Tensor, history: AnyHistory | None) -> None:
        """Run its stage; slots and positions are int64 ``[R]``."""
        ...
