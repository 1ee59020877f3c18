"""A vocabulary that is split over ranks, and the collectives between them: the one place that communicates.

Each rank holds some columns of the logits. What travels is exact in any order: maxima and sums of integers, packed
keys, and bytes. Collectives are those of ``torch.distributed``, on the current stream, so that a CUDA graph records
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from compiled_sampler.core.stage import Run, call
from compiled_sampler.scalars import is_int

Results = TypeVar("Results")
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
"""The first name from torch 2.13 on; none in a build without collectives."""


@dataclass(frozen=True, eq=False)
class VocabularyShard:
    """The columns of the logits that this rank has, of a vocabulary that is split over the ranks of a group.

    It is made on every rank of the group at once, which tell each other their columns. From then on a ``Sampler`` or
    ``functional.sample`` with it takes logits ``[R, >= stop - start]`` and must be called alike on every rank: the same
    requests, plans and calls in the same order, and logits of one layout. Every rank gets the same results.

    Args:
        start: the first token id of this rank; that of rank 0 is 0, of any other rank the ``stop`` of the rank before.
        stop: the id behind the last one. Ids of ``vocab_size`` and above are padding, also where a whole shard is.
        group: the process group, None for the default one. Nothing here starts or connects processes.
        slow_wire: whether draws with top-p, or a top-k beyond 64, move counts and masses instead of logits, in 11 or 20
            small collectives, and logprobs of few rows sums too: for ranks without NVLink. The results are the same.

    Raises:
        RuntimeError: a rank did not take part within the timeout of the group.
        TypeError, ValueError: on every rank, if bounds are no ints or do not follow each other in the order of ranks;
            no process group, or one without this rank.
    """

    start: int
    stop: int
    group: dist.ProcessGroup | None = None
    slow_wire: bool = False
    bounds: tuple[tuple[int, int], ...] = field(init=False, repr=False)
    """``start`` and ``stop`` of every rank."""
    rank: int = field(init=False)
    """Of this process in the group."""

    def __post_init__(self) -> None:
        """Learn the bounds of the other ranks, and check all."""
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "group must be a process group, got none in this process; torch.distributed.init_process_group() first"
            )
        rank = dist.get_rank(self.group)
        if rank < 0:
            raise ValueError("group must have this process as a rank, got one without; make the shard on its ranks")
        object.__setattr__(self, "rank", rank)
        told = self.told((self.start, self.stop, self.slow_wire))
        if any(wire is not told[0][2] or not isinstance(wire, bool) for *_, wire in told):
            raise ValueError(f"slow_wire must be one bool on all ranks, got {[wire for *_, wire in told]}")
        object.__setattr__(self, "bounds", tuple((start, stop) for start, stop, _ in told))
        before = 0
        for rank, (start, stop) in enumerate(self.bounds):
            if not (is_int(start) and is_int(stop)):
                raise TypeError(f"start and stop must be ints, got {start!r} and {stop!r} on rank {rank}")
            if start != before or stop < start:
                raise ValueError(
                    f"shards must follow each other in the order of ranks, from 0: rank {rank} must start at {before} "
                    f"and stop there or later, got [{start}, {stop}); divide the ids so"
                )
            before = stop

    @property
    def size(self) -> int:
        """The ids of all shards together."""
        return self.bounds[-1][1]

    @property
    def count(self) -> int:
        """T, the number of ranks."""
        return len(self.bounds)

    def widths(self, vocab_size: int) -> list[int]:
        """The columns of each rank that are tokens of a vocabulary of this size."""
        return [max(min(stop, vocab_size) - start, 0) for start, stop in self.bounds]

    def width(self, vocab_size: int) -> int:
        """The columns of this rank that are tokens of a vocabulary of this size."""
        return self.widths(vocab_size)[self.rank]

    def own(self, rows: Tensor, vocab_size: int) -> Tensor:
        """The columns of this rank, of whole rows ``[R, V]``."""
        return rows[:, self.start : self.start + self.width(vocab_size)]

    def told(self, value: object) -> list[Any]:
        """What every rank told, in the order of ranks; it waits for the ranks, and is for what is made once."""
        values: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, self.group)
        return values

    def maximum(self, values: Tensor, run: Run = call) -> Tensor:
        """The largest of each number over the ranks, in place."""
        return self._reduced(values, dist.ReduceOp.MAX, run)

    def total(self, values: Tensor, run: Run = call) -> Tensor:
        """The sum of each number over the ranks, in place."""
        return self._reduced(values, dist.ReduceOp.SUM, run)

    def collected(self, values: Tensor, run: Run = call) -> Tensor:
        """The tensors of all ranks, ``[T, ...]``, each of one shape."""
        values = values.contiguous()
        every = values.new_empty((self.count, *values.shape))
        if run.lists:
            return every.zero_()
        _all_gather(_bytes(every), _bytes(values), self.group)  # gloo knows few dtypes
        return every

    def whole_rows(self, columns: Tensor, vocab_size: int, run: Run = call) -> Tensor:
        """Rows ``[R, V]`` on every rank, from the columns of each, ``[R, >= width]``."""
        return self._joined(self.collected(self._padded(columns, vocab_size), run), vocab_size)

    def whole_mask(self, mask: Tensor, vocab_size: int) -> Tensor:
        """A packed mask ``[R, ceil(V / 32)]`` on every rank, from those of each rank's columns; another as it is."""
        # Its words alone tell which of the two it is, and must tell it on all ranks: where a shard takes as many words
        # as V tokens, every mask is one of V tokens.
        num_words, width = mask_words(vocab_size), self.width(vocab_size)
        is_known = max(mask_words(stop - start) for start, stop in self.bounds) < num_words
        is_mask = mask.dim() == 2 and mask.dtype is torch.int32
        if not (is_known and is_mask and mask_words(width) <= mask.shape[1] <= mask_words(self.stop - self.start)):
            return mask
        whole = mask.new_zeros(mask.shape[0], num_words + 1)
        if width:
            (first, shift), count = divmod(self.start, 32), mask_words(width)
            own = mask[:, :count].clone()
            if rest := width % 32:
                own[:, -1] &= (1 << rest) - 1  # bits of padding may be anything
            whole[:, first : first + count] = own << shift
            if shift:
                whole[:, first + 1 : first + 1 + count] |= (own >> (32 - shift)) & ((1 << shift) - 1)
        return self.total(whole)[:, :num_words]  # the bit of a token is that of one rank, so no sum carries

    def own_part(self, num_rows: int) -> tuple[int, int]:
        """The first row of this rank's part of the rows, and the row behind its last."""
        firsts, count = self._row_parts(num_rows)
        return firsts[self.rank], firsts[self.rank] + count

    def _row_parts(self, num_rows: int) -> tuple[list[int], int]:
        """The first row of each rank's part, and the number of rows of each; the last parts may overlap."""
        count = -(-num_rows // self.count)
        return [min(rank * count, num_rows - count) for rank in range(self.count)], count

    def exchanged_rows(self, columns: Tensor, vocab_size: int, run: Run = call) -> Tensor:
        """The rows of this rank's part, ``[n, V]``, from the columns of each rank, ``[R, >= width]``."""
        num_rows, padded = columns.shape[0], self._padded(columns, vocab_size)
        firsts, count = self._row_parts(num_rows)
        if num_rows == count * self.count:  # a copy less
            parts = padded.contiguous().view(self.count, count, -1)
        else:
            parts = torch.stack([padded[first : first + count] for first in firsts])
        received = torch.zeros_like(parts) if run.lists else torch.empty_like(parts)
        if not run.lists:
            dist.all_to_all_single(_bytes(received), _bytes(parts), group=self.group)
        return self._joined(received, vocab_size)

    def told_rows(self, results: Results, num_rows: int, run: Run = call) -> Results:
        """The results of all rows ``[R, ...]``, from those of each rank's part ``[n, ...]``, in nested tuples."""
        firsts, count = self._row_parts(num_rows)
        leaves, spec = tree_flatten(results)
        fields = [leaf for leaf in leaves if leaf is not None]
        told = self.collected(torch.cat([_row_bytes(field) for field in fields], 1), run)
        ends = [min(first + count, num_rows) for first in firsts]
        starts = [min(rank * count, num_rows) for rank in range(self.count)]
        rows = torch.cat(
            [told[rank, start - firsts[rank] : ends[rank] - firsts[rank]] for rank, start in enumerate(starts)]
        )
        pieces = iter(torch.split(rows, [_row_bytes(field).shape[1] for field in fields], 1))
        whole = [
            None if leaf is None else next(pieces).contiguous().view(leaf.dtype).view(num_rows, *leaf.shape[1:])
            for leaf in leaves
        ]
        told_results: Results = tree_unflatten(whole, spec)
        return told_results

    def _padded(self, columns: Tensor, vocab_size: int) -> Tensor:
        """The columns of this rank ``[R, n]``, padded to as many as the widest rank has."""
        widths = self.widths(vocab_size)
        own = columns.detach()[:, : widths[self.rank]]
        return F.pad(own, (0, max(widths) - own.shape[1])) if min(widths) < max(widths) else own

    def _joined(self, parts: Tensor, vocab_size: int) -> Tensor:
        """Rows ``[n, V]`` from the columns of each rank, padded, ``[T, n, columns]``."""
        return torch.cat([part[:, :width] for part, width in zip(parts, self.widths(vocab_size), strict=True)], 1)

    def _reduced(self, values: Tensor, operation: Any, run: Run) -> Tensor:
        if not run.lists:
            dist.all_reduce(values, operation, self.group)
        return values


def mask_words(num_tokens: int) -> int:
    """The words of a packed mask, 32 tokens each."""
    return -(-num_tokens // 32)


def _row_bytes(values: Tensor) -> Tensor:
    """The bytes of each row, uint8 ``[n, m]``."""
    return values.contiguous().view(values.shape[0], -1).view(torch.uint8)


def check_shard(shard: object, vocab_size: int) -> None:
    """Raise unless ``shard`` is one of a vocabulary of this size or, with padding, of a larger one."""
    if not isinstance(shard, VocabularyShard):
        raise TypeError(f"shard must be a VocabularyShard, got {shard!r}; VocabularyShard(start, stop, group)")
    if shard.size < vocab_size:
        raise ValueError(f"shards must hold all {vocab_size} tokens, got {shard.size}; the last one stops too early")


def _bytes(values: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, uint8 ``[n]``."""
    return values.reshape(-1).view(torch.uint8)
