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
from tools.model import corpus
from tools.model.tokenizer import Tokenizer
from tools.model.transformer import Model
from tools.toy_engine.decode_step import CapturedStep, DecodeStep
from tools.toy_engine.engine import Decoded, Engine, Request, longest
from tools.toy_engine.speculation import MOST_RUNNING, Models, speculate

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
_PRIME = 7919  # spreads prompts over the text and lengths over their range
FOLDER = Path(corpus.__file__).parent


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


def load_models(folder: Path = FOLDER) -> tuple[Models, Tokenizer]:
    """The target, the smaller model and their tokenizer, as ``tools.model.train`` stored them."""
    target, draft = (Model.load(folder / name) for name in ("target", "draft"))
    return Models(target, draft), Tokenizer(folder / "tokenizer.json")


def prompt_texts(text: Path | None) -> list[str]:
    """Paragraphs of a UTF-8 file, or of the text that the models were trained on, which every Python ships.

    Raises:
        ValueError: the file has no paragraph of some length.
    """
    texts = [text.read_text(encoding="utf-8", errors="ignore")] if text else corpus.documents()
    found = corpus.paragraphs(texts)
    if not found:
        raise ValueError(f"text must have a paragraph of {corpus.SHORTEST} characters, got none; take a longer one")
    return found


def kind_of(i: int, count: int) -> str:
    """The kind of the i-th of ``count`` requests."""
    return list(KINDS)[i * len(KINDS) // count]


def make_requests(tokenizer: Tokenizer, texts: Sequence[str], count: int, steps: int) -> list[Request]:
    """Seeded requests of every kind; prompts are beginnings of paragraphs."""
    requests = []
    for i in range(count):
        prompt = tokenizer.encode(texts[i * _PRIME % len(texts)])[: 20 + i % 9]
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


def make_engine(backend: str, device: str, model: Model, length: int, bar: Progress) -> tuple[Engine, Sampler]:
    """An engine ready to run: compiled, captured."""
    captured = backend == "captured"
    sampler = Sampler(model.config.vocab_size, _NUM_SLOTS, device, backend="compiled" if captured else backend)
    step = (CapturedStep if captured else DecodeStep)(model.to(device), sampler, _NUM_SLOTS, length)
    task = bar.add_task(f"{backend} on {device}: prepare", total=None)
    step.warmup(lambda done, total, label: bar.update(task, completed=done, total=total))
    return Engine(step), sampler


def decode(engine: Engine, requests: Sequence[Request], order: str, progress: Callable[[int], object]) -> Decoded:
    """Run the requests in an order."""
    direction, max_running = ORDERS[order]
    return engine.run(requests[::direction], max_running, progress)


def run_backend(backend: str, device: str, model: Model, requests: Sequence[Request], bar: Progress) -> list[Run]:
    """Decode the requests in every order on one backend."""
    engine, sampler = make_engine(backend, device, model, longest(requests), bar)
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
    options: argparse.Namespace, models: Models, requests: Sequence[Request], reference: Decoded, bar: Progress
) -> list[dict[str, Any]]:
    """Decode some of the requests with every drafter; compiling would take a CPU longer than it saves."""
    device = options.device
    backend = "compiled" if device.startswith("cuda") and options.backend != "eager" else "eager"
    sampler = Sampler(models.target.config.vocab_size, MOST_RUNNING, device, backend=backend)
    task = bar.add_task(f"{backend} on {device}: decode with drafts", total=None)

    def report(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)

    return speculate(Models(*(each.to(device) for each in models)), sampler, requests, reference, report)
