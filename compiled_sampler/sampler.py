"""What an engine holds: requests in slots, plans, and a step that draws one token a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from compiled_sampler.batch import SampleInputs, SampleOutputs
from compiled_sampler.lowering import CompiledStages, sampling_step
from compiled_sampler.modes import Mode, includes, mode_table, row_class
from compiled_sampler.params import SamplingParams
from compiled_sampler.plan import Plan, covering_mode, forced_mode
from compiled_sampler.state import SlotState
from compiled_sampler.validation import check_logits, check_outputs, check_positions, check_sampler
from graph_cache import BufferSpec, CacheStatistics, GraphCache

Progress = Callable[[int, int, str], object]
_MOST_PLANS = 64  # plans kept while no request comes or goes


class Sampler:
    """Turns logits into tokens: seeded, exact, the same bits on every backend and in every batch.

    Args:
        vocab_size: V, the true vocabulary; logits may have more columns, which are never read.
        max_num_requests: S, requests held at once.
        device: where logits and results live.
        logits_dtype: float32, bfloat16 or float16.
        backend: "eager" (plain torch), "compiled" (Inductor), "graph" (compiled and captured in CUDA graphs; without
            CUDA it runs the compiled stages directly) or "auto": graph on CUDA, compiled elsewhere.
        top_p_base: what top_p is a share of: "top_k", the mass after top-k, or "all", the mass of the row.
        buckets: row counts of the captured variants; None for the powers of two up to ``max_num_requests``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        vocab_size: int,
        max_num_requests: int,
        device: torch.device | str = "cpu",
        logits_dtype: torch.dtype = torch.float32,
        backend: str = "auto",
        top_p_base: str = "top_k",
        *,
        buckets: Iterable[int] | None = None,
    ) -> None:
        """Hold free slots; nothing is compiled or captured before ``warmup`` or the first call."""
        check_sampler(vocab_size, max_num_requests, logits_dtype, backend, top_p_base)
        self.vocab_size, self.logits_dtype = vocab_size, logits_dtype
        self.device = torch.empty(0, device=device).device
        if backend == "auto":
            backend = "graph" if self.device.type == "cuda" else "compiled"
        self.backend = backend
        self.modes = mode_table(vocab_size, top_p_base)
        self._state = SlotState(max_num_requests, self.modes, self.device)
        self._stages = None if backend == "eager" else CompiledStages()
        self._bound: Tensor | None = None
        self._cache = self._new_cache(_powers_of_two(max_num_requests) if buckets is None else buckets)
        self._plans: dict[tuple[str | None, tuple[int, ...]], Plan] = {}
        self._plans_epoch = self._state.epoch

    def add_request(self, params: SamplingParams) -> int:
        """Hold a request; returns its slot. A seed of None is drawn from ``os.urandom``, see ``request``.

        Raises:
            RuntimeError: no slot is free.
            TypeError: ``params`` is no ``SamplingParams``.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {type(params).__name__}; SamplingParams(**options)")
        return self._state.add(params)

    def remove_request(self, slot: int) -> None:
        """Free a slot; plans that name it are stale from now on.

        Raises:
            ValueError: no request holds the slot.
        """
        self._state.remove(slot)

    def request(self, slot: int) -> SamplingParams:
        """The parameters in a slot, with the seed that is used.

        Raises:
            ValueError: no request holds the slot.
        """
        return self._state.request(slot)

    def plan(self, slots: Sequence[int], mode: str | None = None) -> Plan:
        """Choose the mode for a batch, on the host alone; while nothing changes the same plan is returned.

        Args:
            slots: the slot of each row; a slot may stand in several rows, -1 is padding.
            mode: the name of a mode to force; None takes the cheapest that covers the batch.

        Raises:
            RuntimeError: the plan is new and the current stream is being captured.
            ValueError: a slot without a request; a mode that is unknown or does not cover a row.
        """
        if self._plans_epoch != self._state.epoch:
            self._plans.clear()
            self._plans_epoch = self._state.epoch
        key = (mode, tuple(slots))
        return self._plans.get(key) or self._new_plan(key)

    def sample(self, plan: Plan, logits: Tensor, positions: Tensor, out: SampleOutputs | None = None) -> SampleOutputs:
        """Draw one token for every row of the plan.

        Under ``torch.cuda.graph`` the compiled stages land in the engine's own graph; positions and the plan's
        ``slot_ids`` stay device inputs.

        Args:
            plan: from ``plan``; its requests must still be held.
            logits: ``[R, >= V]`` of the sampler's dtype, any row stride.
            positions: int64 ``[R]``, >= 0, the position of the token that is drawn.
            out: tensors that take the results; then a replay allocates nothing.

        Returns:
            ``out``, or new tensors that no later call overwrites.

        Raises:
            RuntimeError: an outer capture needs a variant that was never prepared.
            TypeError: a wrong dtype.
            ValueError: a wrong shape or device, or a stale plan.
        """
        self._check_current(plan)
        check_logits(logits, plan.num_rows, self.vocab_size, self.logits_dtype, self.device)
        check_positions(positions, plan.num_rows, self.device)
        if out is not None:
            check_outputs(out, plan.num_rows, self.device)
        if not plan.num_rows:
            return self._empty() if out is None else out
        tensors = {"logits": logits, "slots": plan.slot_ids, "positions": positions}
        if self.backend == "graph":
            return self._cache.run(plan.mode.name, tensors, out=out)
        result = self._step(plan.mode, **tensors)
        return result if out is None else _copied(result, out)

    def warmup(self, progress: Progress | None = None) -> None:
        """Compile and capture everything that later calls may need; they never compile.

        Args:
            progress: called as ``progress(done, total, label)`` after each compiled mode and captured variant.

        Raises:
            graph_cache.CaptureError: a capture failed; the sampler stays usable, a later warmup tries again.
        """
        if self._stages is not None:
            self._compile(progress or _silent)
        if self.backend == "graph":
            self._cache.warmup(progress=progress)

    def bind_logits(self, buffer: Tensor | None) -> None:
        """Let variants read the engine's own logits buffer in place; call ``warmup`` afterwards to capture them.

        Args:
            buffer: ``[rows, >= V]``; its first R rows are passed to ``sample``. None drops the binding.

        Raises:
            TypeError: a wrong dtype.
            ValueError: a wrong shape or device.
        """
        if buffer is not None:
            check_logits(buffer, None, self.vocab_size, self.logits_dtype, self.device)
            self._cache.bind("logits", buffer)
        elif self._bound is not None:
            self._cache.unbind("logits")
        self._bound = buffer

    def statistics(self) -> CacheStatistics:
        """What the graph manager captured, replayed and fell back to, and the memory it holds."""
        return self._cache.statistics()

    def _new_cache(self, buckets: Iterable[int]) -> GraphCache:
        cache = GraphCache(self.device, buckets)
        inputs = {
            "logits": BufferSpec((self.vocab_size,), self.logits_dtype, 0.0),
            "slots": BufferSpec((), torch.int64, -1),
            "positions": BufferSpec((), torch.int64, 0),
        }
        for i, mode in enumerate(self.modes):
            covered = [each.name for each in self.modes[:i] if includes(mode, each)]
            cache.register(mode.name, partial(self._step, mode), inputs, covers=covered)
        return cache

    def _new_plan(self, key: tuple[str | None, tuple[int, ...]]) -> Plan:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a new plan must not be made inside a capture, which would freeze it; plan before it begins"
            )
        name, slots = key
        needs = self._state.uncovered(slots)
        if name is None:
            mode = covering_mode(self.modes, needs)
        else:
            mode = forced_mode(self.modes, name, needs, slots, self._state.params)
        slot_ids = torch.tensor(slots, dtype=torch.int64).to(self.device, non_blocking=True)
        bucket = self._cache.ladder.bucket_for(len(slots)) if self.backend == "graph" and slots else None
        plan = Plan(slots, mode, slot_ids, bucket, self._state.holders(slots), self._state, self._state.epoch)
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def _check_current(self, plan: Plan) -> None:
        if plan.owner is not self._state:
            raise ValueError("plan must come from this sampler's plan(), got one of another sampler; make a new plan")
        if plan.epoch != self._state.epoch and plan.generations != self._state.holders(plan.slots):
            now = self._state.holders(plan.slots)
            row = next(i for i, pair in enumerate(zip(plan.generations, now, strict=True)) if pair[0] != pair[1])
            raise ValueError(
                f"plan must name requests that are still held; the request of row {row} (slot {plan.slots[row]}) was "
                "removed; make a new plan"
            )

    def _step(self, mode: Mode, logits: Tensor, slots: Tensor, positions: Tensor) -> SampleOutputs:
        return sampling_step(mode, SampleInputs(logits, slots, positions, self._state.table), self._stages)

    def _compile(self, progress: Progress) -> None:
        """Run each mode once for every class of row counts, on every layout of logits that is known."""
        buckets = self._cache.ladder.sizes
        classes = {row_class(rows, self.device) for rows in (*buckets, 2)}
        layouts = [torch.zeros(max(classes), self.vocab_size, dtype=self.logits_dtype, device=self.device)]
        if self._bound is not None:
            layouts.append(self._bound)
        runs = [(mode, logits[:rows]) for mode in self.modes for logits in layouts for rows in sorted(classes)]
        for done, (mode, logits) in enumerate(runs, start=1):
            slots = torch.full((logits.shape[0],), -1, device=self.device)
            self._step(mode, logits, slots, torch.zeros_like(slots))
            progress(done, len(runs), f"compiled {mode.name} for batches like {logits.shape[0]}")

    def _empty(self) -> SampleOutputs:
        token_ids = torch.empty(0, dtype=torch.int64, device=self.device)
        return SampleOutputs(token_ids, token_ids.to(torch.int32))


def _copied(result: SampleOutputs, out: SampleOutputs) -> SampleOutputs:
    for source, target in zip(result, out, strict=True):
        target.copy_(source)
    return out


def _powers_of_two(largest: int) -> list[int]:
    return sorted({1 << i for i in range(largest.bit_length()) if 1 << i <= largest} | {largest})


def _silent(done: int, total: int, label: str) -> None:
    """Take no notice of progress."""
