"""What does a verification of trees take beside sampling as many rows?

A tree has two children a node, of which half the drafts are what the target draws. Each cell times both calls inside
replayed graphs on the same logits, and compares the first requests with eager torch on the CPU.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from compiled_sampler import Sampler, VerifyOutputs
from compiled_sampler.batch import tensors_of
from tools.bench.batches import WrongAnswer
from tools.bench.cases import CASES
from tools.measuring import environment, logits_like, num_inputs, time_calls, write_json

NODES = 16, 64
CASE = "k 50 + p .9"
_COMPARED = 2  # requests


@dataclass(frozen=True)
class TreeCell:
    """One measurement; times are microseconds of a call."""

    requests: int
    nodes: int
    rows: int
    verify_us: float
    sample_us: float
    """Of as many rows, without trees."""
    tokens_per_step: float

    @property
    def ratio(self) -> float:
        """Of a verification to sampling as many rows."""
        return self.verify_us / self.sample_us


def measure(options: argparse.Namespace, requests: Sequence[int]) -> Iterator[TreeCell]:
    """The cells of all numbers of requests and nodes."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype[0])
    for nodes, count in itertools.product(NODES, requests):
        yield _cell(count, nodes, options.vocab[0], device, dtype, options.backend)


def _cell(count: int, nodes: int, vocab_size: int, device: torch.device, dtype: torch.dtype, backend: str) -> TreeCell:
    rows = count * (nodes + 1)
    copies = num_inputs(vocab_size * dtype.itemsize * rows, device)
    logits = [logits_like("peaked", rows, vocab_size, device, dtype) for _ in range(copies)]
    sampler = Sampler(vocab_size, 1, device, dtype, backend)
    slot = sampler.add_request(CASES[CASE].params)
    plans = sampler.plan([slot] * rows), sampler.plan([slot] * count, num_drafts=[nodes] * count)
    parents = torch.tensor([[node // 2 - 1 for node in range(nodes)]] * count, device=device)
    positions = torch.arange(count, device=device) * nodes
    sampled = rows_positions(positions, parents)
    own = sampler.sample(plans[0], logits[-1], sampled).token_ids.view(count, nodes + 1)
    drafts = own.gather(1, parents + 1)
    drafts[:, 1::2] = 0  # of two children one carries the target's token
    sample_us, _ = time_calls(lambda each: sampler.sample(plans[0], each, sampled), logits, device)
    verify_us, made = time_calls(
        lambda each: sampler.verify(plans[1], each, drafts, positions, parents=parents), logits, device
    )
    compare(logits[-1], drafts, positions, parents, made[-1], vocab_size)
    tokens = made[-1].num_emitted.float().mean().item()
    return TreeCell(count, nodes, rows, verify_us, sample_us, tokens)


def rows_positions(positions: Tensor, parents: Tensor) -> Tensor:
    """The position of each row, int64 ``[R]``."""
    depths = [0]
    for parent in parents[0].tolist():
        depths.append(depths[parent + 1] + 1)
    return (positions[:, None] + torch.tensor(depths, device=positions.device)).flatten()


def compare(
    logits: Tensor, drafts: Tensor, positions: Tensor, parents: Tensor, made: VerifyOutputs, vocab_size: int
) -> None:
    """Raise unless the first requests have the results of eager torch on the CPU.

    Raises:
        WrongAnswer: a request differs.
    """
    count, nodes = min(_COMPARED, len(drafts)), drafts.shape[1]
    sampler = Sampler(vocab_size, 1, "cpu", logits.dtype, "eager")
    plan = sampler.plan([sampler.add_request(CASES[CASE].params)] * count, num_drafts=[nodes] * count)
    first = (each[:count].cpu() for each in (drafts, positions, parents))
    given = dict(zip(("draft_token_ids", "positions", "parents"), first, strict=True))
    wanted = sampler.verify(plan, logits[: count * (nodes + 1)].cpu(), **given)
    for found, told in zip(tensors_of(made), tensors_of(wanted), strict=True):
        if not torch.equal(found[:count].cpu(), told):
            raise WrongAnswer(f"trees of {nodes} nodes: {found[:count].tolist()}, not {told.tolist()}")


def run(options: argparse.Namespace) -> None:
    """Measure, print a table, and store the cells in a file, after each of them."""
    cells = list[TreeCell]()
    table = Table("requests", "nodes", "verify us", "sample us", "ratio", "tokens a step")
    for cell in measure(options, options.requests):
        cells.append(cell)
        numbers = f"{cell.verify_us:.1f}", f"{cell.sample_us:.1f}", f"{cell.ratio:.2f}", f"{cell.tokens_per_step:.2f}"
        table.add_row(str(cell.requests), str(cell.nodes), *numbers)
        if options.json:
            rows = [{**asdict(each), "ratio": round(each.ratio, 3)} for each in cells]
            write_json(options.json, {**environment(options.device), "dtype": options.dtype[0], "table": rows})
    Console(width=100).print(table)
