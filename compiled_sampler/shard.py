"""A vocabulary that is split over ranks, and the collectives between them: the one place that communicates.

Each rank holds some columns of the logits. What travels is exact in any order: maxima and sums of integers, packed
keys, and bytes. Collectives are those of ``torch.distributed``, on the current stream, so that a CUDA graph records
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compiled_sampler.core.stage import Run, call, lists
from compiled_sampler.scalars import is_int

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13


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

    Raises:
        RuntimeError: a rank did not take part within the timeout of the group.
        TypeError, ValueError: on every rank, if bounds are no ints or do not follow each other in the order of ranks;
            no process group, or one without this rank.
    """

    start: int
    stop: int
    group: dist.ProcessGroup | None = None
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
        object.__setattr__(self, "bounds", tuple(self.told((self.start, self.stop))))
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
        every = values.new_empty((len(self.bounds), *values.shape))
        if lists(run):
            return every.zero_()
        _all_gather(_bytes(every), _bytes(values), self.group)  # gloo knows few dtypes
        return every

    def whole_rows(self, columns: Tensor, vocab_size: int, run: Run = call) -> Tensor:
        """Rows ``[R, V]`` from the columns of every rank, ``[R, >= width]``."""
        widths = self.widths(vocab_size)
        part = columns.detach()[:, : widths[self.rank]]
        padded = part if min(widths) == max(widths) else part.new_zeros((part.shape[0], max(widths)))
        if padded is not part:
            padded[:, : part.shape[1]] = part
        return torch.cat([rows[:, :width] for rows, width in zip(self.collected(padded, run), widths, strict=True)], 1)

    def _reduced(self, values: Tensor, operation: Any, run: Run) -> Tensor:
        if not lists(run):
            dist.all_reduce(values, operation, self.group)
        return values


def check_shard(shard: object, vocab_size: int) -> None:
    """Raise unless ``shard`` is one of a vocabulary of this size or, with padding, of a larger one."""
    if not isinstance(shard, VocabularyShard):
        raise TypeError(f"shard must be a VocabularyShard, got {shard!r}; VocabularyShard(start, stop, group)")
    if shard.size < vocab_size:
        raise ValueError(f"shards must hold all {vocab_size} tokens, got {shard.size}; the last one stops too early")


def _bytes(values: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, uint8 ``[n]``."""
    return values.reshape(-1).view(torch.uint8)
