"""What questions draw with: adapters of any vocabulary, calls whose results are checked, counts of many draws."""

from __future__ import annotations

import importlib
import math
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_sampler.conformance.adapter import Adapter, Drafted, Params, Seeds, Semantics, Target, Verified

SHIPPED = {
    "ours": "compiled_sampler.conformance.ours:Ours",
    "ours-eager": "compiled_sampler.conformance.ours:Eager",
    "ours-compiled": "compiled_sampler.conformance.ours:Compiled",
    "ours-graph": "compiled_sampler.conformance.ours:Graph",
    "plain-torch": "compiled_sampler.conformance.peers:PlainTorch",
    "torch-generators": "compiled_sampler.conformance.peers:RowGenerators",
    "transformers": "compiled_sampler.conformance.peers:Transformers",
    "vllm-v1": "compiled_sampler.conformance.peers:VllmV1",
    "vllm-v2": "compiled_sampler.conformance.peers:VllmV2",
    "flashinfer": "compiled_sampler.conformance.peers:FlashInfer",
}
"""Short names of the adapters in this package, which import nothing of the bench."""

MOST_ROWS, MOST_LOGITS = 2**14, 2**23  # of one call
MOST_SECONDS = 10**6  # of a limit; ``inf`` is more likely a mistake than a wish
POSITIONS = 64  # positions that each seed draws at where a law is counted


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is drawn."""

    draws: int
    """Draws of each law."""
    kept_draws: int
    """Draws where no token outside the kept set may come."""
    pairs: int
    """Pairs of tokens where independence is judged."""
    trials: int
    """Requests of each verification."""
    batches: int
    """Random batches of each comparison."""
    tail_events: int
    """Tail tokens that the tail questions wait for."""
    tail_s: float
    """Seconds that each of them may take."""
    question_s: float
    """Seconds after which another question draws no more; what it can find with its draws by then is its power."""
    rows: int = 2000
    """Rows compared on every path of the sampler."""
    offsets: int = 0
    """Logits of one call that the largest offset must pass; 0: that is not asked."""
    limit_s: float = 1800.0
    """Seconds that the process of a question may take; one that takes longer hangs, and is ended."""


QUICK = Effort(2**18, 10**6, 2**15, 2**15, 2, 100, 4.0, 1.5)
FULL = Effort(2**22, 2**22, 2**20, 2**19, 50, 2000, 120.0, 60.0, 20_000, 2**31)


def effort_of(is_full: bool, rows: int | None = None, limit_s: float | None = None) -> Effort:
    """FULL or QUICK, with what options set instead."""
    effort = FULL if is_full else QUICK
    rows, limit_s = effort.rows if rows is None else rows, effort.limit_s if limit_s is None else limit_s
    if rows < 1:
        raise ValueError(f"--rows must be at least 1, got {rows}; leave it out for {effort.rows}")
    if not 0.0 < limit_s <= MOST_SECONDS:
        rule = f"--limit must be seconds above 0, up to {MOST_SECONDS}"
        raise ValueError(f"{rule}, got {limit_s}; leave it out for {effort.limit_s:.0f}")
    return replace(effort, rows=rows, limit_s=limit_s)


def find_target(name: str) -> Target:
    """The target of a name of SHIPPED, or of ``package.module:adapter``; the working directory has modules too."""
    module, _, attribute = SHIPPED.get(name, name).partition(":")
    if not attribute:
        raise ValueError(f"a target is package.module:adapter, got {name!r}; shipped ones are {', '.join(SHIPPED)}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return cast("Target", getattr(importlib.import_module(module), attribute))


class NotAsked(Exception):
    """A question that does not apply to what the adapter declares, with the reason."""


class AdapterError(Exception):
    """An adapter returned what cannot be tokens."""


class Bench:
    """One target on one device, with the seeds of one question at a time.

    Args:
        target: makes adapters; None imports it by its name, once it is needed.
        name: of the target, as the command line takes it; None if it cannot be imported by a name.
        device: where logits are.
        effort: how much is drawn.
        seed: of the run; another one draws other rows and other seeds.
    """

    def __init__(
        self, target: Target | None, name: str | None, device: torch.device, effort: Effort, seed: int = 0
    ) -> None:
        self.name, self.device, self.effort, self.seed = name, device, effort, seed
        self._target = target
        self._adapters: dict[int, Adapter] = {}
        self.begin("")

    def __reduce__(self) -> tuple[Any, ...]:
        """A bench in another process imports its target by name."""
        return Bench, (None, self.name, self.device, self.effort, self.seed)

    def begin(self, question: str) -> None:
        """Start a question: its rows and seeds depend on its name and on the seed of the run alone."""
        start = zlib.crc32(f"{self.seed} {question}".encode())
        self.rng = np.random.default_rng(start)
        self._next_seed = start << 20

    @property
    def target(self) -> Target:
        """Imported when it is first needed."""
        if self._target is None:
            self._target = find_target(self.name or "")
        return self._target

    @property
    def semantics(self) -> Semantics:
        """What the target declares; AdapterError where it declares none."""
        declared = getattr(self.target, "semantics", None)
        if declared is None:
            declared = getattr(self.adapter(32), "semantics", None)
        if not isinstance(declared, Semantics):
            what = "nothing" if declared is None else type(declared).__name__
            raise AdapterError(
                f"an adapter must declare `semantics = Semantics(...)`, got {what}; Semantics() has the default choices"
            )
        return declared

    def adapter(self, vocab_size: int) -> Adapter:
        """The adapter of a vocabulary size, made once."""
        if vocab_size not in self._adapters:
            self._adapters[vocab_size] = self.target(vocab_size, self.device)
        return self._adapters[vocab_size]

    def method(self, name: str, vocab_size: int) -> Any:
        """An optional method of the adapter; without it the question is not asked."""
        method = getattr(self.adapter(vocab_size), name, None)
        if method is None:
            raise NotAsked(f"the adapter has no {name}")
        return method

    def needs(self, is_promised: bool, reason: str) -> None:
        """Leave the question out where what it asks is not promised."""
        if not is_promised:
            raise NotAsked(f"declared: {reason}")

    def needs_row_seeds(self) -> None:
        """Leave the question out where a token is not promised to be a function of its own row and seed."""
        self.needs(self.semantics.seeds == "row", f"seeds={self.semantics.seeds!r}")

    def supported(self, params: Sequence[Params]) -> list[Params]:
        """Those of the parameters that the target has all features of."""
        return [row_params for row_params in params if not row_params.features & self.semantics.unsupported]

    def new_seeds(self, count: int) -> list[int]:
        """Seeds that no other draw of the question has, in the lower half of those declared, so that 2 s + 1 is one."""
        first, self._next_seed = self._next_seed, self._next_seed + count
        span = self.semantics.seed_range[1] // 2 + 1
        return [seed % span for seed in range(first, first + count)]

    def sample(
        self,
        logits: Tensor,
        params: Sequence[Params],
        seeds: Seeds,
        positions: Sequence[int] | Tensor,
        vocab_size: int | None = None,
        *,
        copies: bool = True,  # False hands these very logits over, on the device; nobody reads them afterwards
    ) -> Tensor:
        """Tokens of the adapter, int64 ``[R]`` on the CPU, for logits ``[R, V]`` that may have more columns than V."""
        adapter = self.adapter(vocab_size or logits.shape[1])
        rows = self._taken(params, seeds, positions)
        tokens = adapter.sample(copied(logits, self.device) if copies else logits, *rows)
        return checked_tokens(tokens, (len(logits),))

    def sample_with_status(
        self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Sequence[int] | Tensor
    ) -> tuple[Tensor, list[set[str]] | None]:
        """Tokens, and what is reported of each row, None where nothing is; of one draw, if they can be."""
        adapter: Any = self.adapter(logits.shape[1])
        if hasattr(adapter, "sample_with_status"):
            tokens, status = adapter.sample_with_status(
                copied(logits, self.device), *self._taken(params, seeds, positions)
            )
            tokens = checked_tokens(tokens, (len(logits),))
        else:
            tokens = self.sample(logits, params, seeds, positions)
            if not hasattr(adapter, "status"):
                return tokens, None
            status = adapter.status(copied(logits, self.device), *self._taken(params, seeds, positions))
        return tokens, [set(names) for names in status]

    def verify(self, drafted: Drafted, rule: str = "match", parents: Tensor | None = None) -> Verified:
        """What the adapter commits, on the CPU, of checked shapes; it gets copies. With ``parents`` of trees."""
        verify = self.method("verify" if parents is None else "verify_trees", drafted.logits.shape[1])
        n, width = drafted.drafts.shape
        params, seeds, last = self._taken(drafted.params, drafted.seeds, drafted.positions + width)
        logits, drafts = copied(drafted.logits, self.device), copied(drafted.drafts, self.device)
        laws = None if drafted.probs is None else copied(drafted.probs, self.device)
        copies = Drafted(logits, params, seeds, last - width, drafts, list(drafted.num_drafts), laws)
        tokens, emitted, accepted = verify(copies, rule if parents is None else parents.clone())
        return Verified(
            checked_tokens(tokens, (n, width + 1)), checked_tokens(emitted, (n,)), checked_tokens(accepted, (n,))
        )

    def _taken(
        self, params: Sequence[Params], seeds: Seeds, positions: Sequence[int] | Tensor
    ) -> tuple[list[Params], list[Any], Tensor]:
        """Copies of the arguments; the question is left out where it needs what is declared not to be taken."""
        used = {feature for row_params in set(params) for feature in row_params.features}
        lacking = sorted(used & self.semantics.unsupported)
        self.needs(not lacking, f"unsupported={lacking}")
        places = torch.as_tensor(positions, dtype=torch.int64).clone()
        refused = self.semantics.refused(seeds, places)
        self.needs(not refused, refused)
        return list(params), list(seeds), places

    def portions(self, total: int, most: int, seconds: float) -> Iterator[int]:
        """Sizes of calls that add up to ``total``, or to less where the seconds run out; there is always one."""
        # When to stop, and the size of a call, depend on the time alone, never on what was drawn, so that p-values stay
        # what they are. The clock starts behind the first call, which may compile; at an even speed it is overrun by a
        # quarter of a call at most.
        sizes = most, max(1, most // 2), max(1, most // 4)
        first = done = min(sizes[-1], total)
        yield first
        start = time.perf_counter()
        while done < total and (spent := time.perf_counter() - start) < seconds:
            known = done - first  # rows that took the seconds spent; a call fits the seconds left at that speed
            size = next((size for size in sizes if known and size * spent <= known * (seconds - spent)), sizes[-1])
            yield min(size, total - done)
            done += size

    def counts(self, row: Tensor, params: Params, n: int, seconds: float = math.inf) -> NDArray[np.int64]:
        """How often each token is drawn in ``n`` draws from one row ``[V]``, fewer where the seconds run out."""
        total = np.zeros(len(row), np.int64)
        for count in self.portions(n, max(1, min(MOST_ROWS, MOST_LOGITS // len(row))), seconds):
            # No two draws have the same seed and position.
            seeds = np.repeat(self.new_seeds(-(-count // POSITIONS)), POSITIONS)[:count].tolist()
            positions = torch.arange(count) % POSITIONS
            logits = row.to(self.device).repeat(count, 1)
            tokens = self.sample(logits, [params] * count, seeds, positions, copies=False)
            check_range(tokens, len(row), params, seeds, positions)
            total += np.bincount(tokens.numpy(), minlength=len(row))
        return total


def checked_tokens(tokens: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A copy of integers of the shape, int64 on the CPU: the next call of the adapter may overwrite them."""
    if not isinstance(tokens, Tensor) or tokens.dtype.is_floating_point or tuple(tokens.shape) != shape:
        what = (tokens.dtype, tuple(tokens.shape)) if isinstance(tokens, Tensor) else type(tokens)
        raise AdapterError(f"an adapter must return an integer tensor {shape}, got {what}; reshape or convert it there")
    return tokens.detach().to("cpu", torch.int64, copy=True)


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; on its own device with its strides, and with what lies between its rows."""
    moved = tensor.to(device)
    if moved is not tensor:
        return moved
    storage: Any = tensor.untyped_storage()  # which has no types
    return tensor.new_empty(0).set_(storage.clone(), tensor.storage_offset(), tensor.shape, tensor.stride())


def check_range(tokens: Tensor, vocab_size: int, params: Params, seeds: Seeds, positions: Tensor) -> None:
    """Raise AdapterError where a token is no id of the vocabulary."""
    wrong = ((tokens < 0) | (tokens >= vocab_size)).nonzero()[:, 0].tolist()
    if wrong:
        n = wrong[0]
        where = f"row {n}, {params}, seed {seeds[n]}, position {int(positions[n])}"
        raise AdapterError(f"token {int(tokens[n])} is no id below {vocab_size}: {where}")
