"""The device half of the engine: one call computes logits, draws a token a row and feeds it back, without a sync.

Dims: ``R`` rows of a batch, ``S`` slots, ``B`` rows of a captured graph, ``V`` vocabulary size.

What belongs to a request lives by slot, so a batch is nothing but slot ids. The state has one entry more than there are
slots: -1, the slot of padding rows, indexes that last entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from compiled_sampler import Plan, SampleOutputs, Sampler
from compiled_sampler.batch import tensors_of
from graph_cache import BucketLadder
from tools.model.transformer import Model
from tools.toy_engine.cached_model import CachedModel

Progress = Callable[[int, int, str], object]
_FEWEST_ROWS = 2  # a single row would be compiled apart: twice the compile time for the last step of a run


class DecodeStep:
    """Steps called one after the other.

    Args:
        model: on the sampler's device.
        sampler: of the model's vocabulary.
        num_slots: S, the sampler's ``max_num_requests``.
        length: most positions of a text.

    Attributes:
        last: int64 ``[S + 1]``, the token of each slot's request that the model reads next.
        positions: int64 ``[S + 1]``, the position of the token that is drawn next.
        logits: float32 ``[S, V]`` (two rows at least), what the model writes and the sampler reads in place.
        out: tokens and status ``[S]`` of the last step.
    """

    def __init__(self, model: Model, sampler: Sampler, num_slots: int, length: int) -> None:
        """Allocate everything that a step reads and writes."""
        self.model, self.sampler = CachedModel(model, num_slots, length), sampler
        device, num_rows = sampler.device, max(num_slots, _FEWEST_ROWS)
        self.last = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.positions = torch.ones(num_slots + 1, dtype=torch.int64, device=device)
        self.logits = torch.zeros(num_rows, self.model.vocab_size, device=device)
        self.out = SampleOutputs(
            torch.zeros(num_rows, dtype=torch.int64, device=device),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
        )

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        """Start a request: the model reads its prompt but for the last token, which the first step reads."""
        self.model.read(slot, prompt[:-1])
        self.last[slot].fill_(prompt[-1])
        self.positions[slot].fill_(len(prompt))

    def padded(self, slots: Sequence[int]) -> list[int]:
        """The slots of a batch and the padding that a step needs."""
        return [*slots, *[-1] * (_FEWEST_ROWS - len(slots))]

    def warmup(self, progress: Progress) -> None:
        """Compile and capture what later steps need."""
        if self.sampler.backend == "graph":
            self.sampler.bind(logits=self.logits, out=self.out)
            return self.sampler.warmup(progress)
        for done, mode in enumerate(self.sampler.modes, start=1):
            self(self.sampler.plan([-1] * _FEWEST_ROWS, mode.name))
            progress(done, len(self.sampler.modes), mode.name)

    def __call__(self, plan: Plan) -> torch.Tensor:
        """Draw and feed back; returns int64 ``[R]`` on the device, overwritten by the next step."""
        rows, slots = plan.num_rows, plan.slot_ids
        logits, out = self.logits[:rows], SampleOutputs(*(each[:rows] for each in tensors_of(self.out)))
        positions = self.positions[slots]
        logits.copy_(self.model.logits(slots, positions - 1, self.last[slots]))
        self.sampler.sample(plan, logits, positions, out=out)
        self.last[slots] = out.token_ids
        self.positions[slots] = torch.where(slots < 0, 1, positions + 1)
        return out.token_ids


class CapturedStep(DecodeStep):
    """Whole steps, model included, replayed from one CUDA graph for each mode and number of rows.

    A graph reads its batch from ``slot_ids``, a buffer that stays where it is; what a plan chooses on the host is the
    graph.

    Attributes:
        slot_ids: int64 ``[S]``, the batch of the next replay.
    """

    def __init__(self, model: Model, sampler: Sampler, num_slots: int, length: int) -> None:
        """Nothing is captured before ``warmup``."""
        super().__init__(model, sampler, num_slots, length)
        self._ladder = BucketLadder.of({*range(8, num_slots, 8), num_slots})
        self._graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}
        self.slot_ids = torch.full((num_slots,), -1, device=sampler.device)

    def padded(self, slots: Sequence[int]) -> list[int]:
        """The slots of a batch, padded to the rows of a graph."""
        bucket = self._ladder.bucket_for(len(slots)) or 0
        return [*slots, *[-1] * (bucket - len(slots))]

    def warmup(self, progress: Progress) -> None:
        """Compile each mode and capture it for every number of rows; the graphs share one pool."""
        pool = torch.cuda.graph_pool_handle()
        keys = [(mode.name, rows) for mode in self.sampler.modes for rows in reversed(self._ladder.sizes)]
        for done, (name, rows) in enumerate(keys, start=1):
            plan = dataclasses.replace(self.sampler.plan([-1] * rows, name), slot_ids=self.slot_ids[:rows])
            self._graphs[name, rows] = self._captured(plan, pool)
            progress(done, len(keys), f"{name}[{rows}]")

    def __call__(self, plan: Plan) -> torch.Tensor:
        """Replay the graph of the plan's mode and rows on the plan's slots."""
        self.slot_ids[: plan.num_rows].copy_(plan.slot_ids)
        self._graphs[plan.mode.name, plan.num_rows].replay()
        return self.out.token_ids[: plan.num_rows]

    def _captured(self, plan: Plan, pool: tuple[int, int]) -> torch.cuda.CUDAGraph:
        """A graph of one step; all rows are padding while it is recorded, so no request notices."""
        self.slot_ids.fill_(-1)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                super().__call__(plan)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            super().__call__(plan)
        return graph
