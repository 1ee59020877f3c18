"""Runs of the toy engine: the same requests decoded by every backend of a machine, in two orders, and with drafts."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from compiled_sampler import Sampler, SamplingParams
from tools.toy_engine.corpus import documents
from tools.toy_engine.decode_step import CapturedStep, DecodeStep
from tools.toy_engine.engine import Decoded, Engine, Request
from tools.toy_engine.ngram_model import NgramModel
from tools.toy_engine.speculation import MOST_RUNNING, speculate

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_k 40, top_p 0.9": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "top_p 0.9": {"temperature": 0.9, "top_p": 0.9},
    "top_k 1000": {"top_k": 1000},
    "top_k 200, top_p 0.95, min_p 0.01": {"temperature": 1.1, "top_k": 200, "top_p": 0.95, "min_p": 0.01},
    "min_p 0.05": {"min_p": 0.05},
    "temperature 0.7": {"temperature": 0.7},
}
"""They arrive one kind after the other, so that in the course of a run every mode is once the cheapest that serves."""

ORDERS: dict[str, tuple[int, int]] = {"arrival": (1, 24), "reversed": (-1, 9)}
"""Step through the queue, rows of the largest batch."""
BACKENDS = ("eager", "compiled", "graph", "captured")
_NUM_SLOTS = max(rows for _, rows in ORDERS.values())
_PRIME = 7919  # spreads prompts over the corpus and lengths over their range


@dataclass(frozen=True)
class Run:
    """One decoding of all requests."""

    backend: str
    device: str
    order: str
    decoded: Decoded
    graphs: dict[str, Any] | None
    """The sampler's own statistics where it replays graphs."""

    def numbers(self, reference: Decoded) -> dict[str, Any]:
        """What a file stores of the run, compared with another."""
        compared, mismatches = self.decoded.compare(reference)
        return {
            "backend": self.backend,
            "device": self.device,
            "order": self.order,
            "most_rows": max(map(len, self.decoded.batches)),
            "steps": len(self.decoded.batches),
            "mode_steps": dict(self.decoded.mode_steps),
            "slots_reused": len(self.decoded.slots) - len(set(self.decoded.slots)),
            "tokens": self.decoded.num_tokens,
            "tokens_per_s": round(self.decoded.num_tokens / self.decoded.seconds, 1),
            "compared": compared,
            "mismatches": mismatches,
            "sha256": self.decoded.sha256(),
            "graphs": self.graphs,
        }


def build_model(text: Path | None, bar: Progress) -> tuple[NgramModel, list[str]]:
    """Count the trigram model; returns it with the corpus it was counted from."""
    task = bar.add_task("read the corpus" if text else "read Python's standard library", total=None)
    docs = []
    for document in documents(text):
        docs.append(document)
        bar.update(task, completed=len(docs))
    bar.update(task, total=len(docs))
    task = bar.add_task("count a word trigram model", total=None)
    model = NgramModel.from_documents(docs)
    bar.update(task, total=1, completed=1)
    return model, docs


def kind_of(i: int, count: int) -> str:
    """The kind of the i-th of ``count`` requests."""
    return list(KINDS)[i * len(KINDS) // count]


def make_requests(model: NgramModel, docs: Sequence[str], count: int, steps: int) -> list[Request]:
    """Seeded requests of every kind; prompts are beginnings of lines of the corpus."""
    lines = [line.strip() for document in docs for line in document.splitlines() if line.strip()]
    requests = []
    for i in range(count):
        prompt = model.encode(lines[i * _PRIME % len(lines)])[: 2 + i % 5]
        params = SamplingParams(**KINDS[kind_of(i, count)], seed=i)
        requests.append(Request(i, tuple(prompt), params, max_tokens=max(1, steps - i * _PRIME % (steps // 2 + 1))))
    return requests


def setups(backend: str, device: str) -> list[tuple[str, str]]:
    """The backends to run, each with its device."""
    if backend == "auto":
        backend = "graph" if device.startswith("cuda") else "compiled"
    if backend != "all":
        return [(backend, device)]
    if device.startswith("cuda"):
        return [("eager", "cpu"), *((each, device) for each in BACKENDS)]
    return [(each, device) for each in ("eager", "compiled")]


def make_engine(backend: str, device: str, model: NgramModel, bar: Progress) -> tuple[Engine, Sampler]:
    """An engine ready to run: compiled, captured."""
    captured = backend == "captured"
    sampler = Sampler(model.vocab_size, _NUM_SLOTS, device, backend="compiled" if captured else backend)
    step = (CapturedStep if captured else DecodeStep)(model.to(device), sampler, _NUM_SLOTS)
    task = bar.add_task(f"{backend} on {device}: prepare", total=None)
    step.warmup(lambda done, total, label: bar.update(task, completed=done, total=total))
    return Engine(step), sampler


def decode(engine: Engine, requests: Sequence[Request], order: str, progress: Callable[[int], object]) -> Decoded:
    """Run the requests in an order."""
    direction, max_running = ORDERS[order]
    return engine.run(requests[::direction], max_running, progress)


def run_backend(backend: str, device: str, model: NgramModel, requests: Sequence[Request], bar: Progress) -> list[Run]:
    """Decode the requests in every order on one backend."""
    engine, sampler = make_engine(backend, device, model, bar)
    runs = []
    for order in ORDERS:
        most = sum(request.max_tokens for request in requests)
        task = bar.add_task(f"{backend} on {device}: decode, {order}", total=most)
        decoded = decode(engine, requests, order, lambda done, task=task: bar.update(task, completed=done))
        bar.update(task, completed=decoded.num_tokens, total=decoded.num_tokens)
        graphs = dataclasses.asdict(sampler.statistics()) if sampler.backend == "graph" else None
        runs.append(Run(backend, device, order, decoded, graphs))
    return runs


def run_drafts(
    options: argparse.Namespace, model: NgramModel, requests: Sequence[Request], reference: Decoded, bar: Progress
) -> list[dict[str, Any]]:
    """Decode some of the requests with every drafter; compiling would take a CPU longer than it saves."""
    device = options.device
    backend = "compiled" if device.startswith("cuda") and options.backend != "eager" else "eager"
    sampler = Sampler(model.vocab_size, MOST_RUNNING, device, backend=backend)
    task = bar.add_task(f"{backend} on {device}: decode with drafts", total=None)

    def report(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)

    return speculate(model.to(device), sampler, requests, reference, report)
