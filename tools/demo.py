"""Does a request get the same tokens from every backend and in every batch? See it decode on this machine.

    python -m tools.demo [--requests 64] [--steps 48] [--text FILE] [--backend all] [--device DEVICE] [--no-drafts]
                         [--json FILE]

Nothing is downloaded: a word trigram model is counted from the sources of Python's standard library. Requests with
different parameters and seeds then come and go in an engine with continuous batching, once for each backend and once
more in another order with fewer rows. Some are then decoded with speculative drafts: the bigrams of the same model
guess, or a look-up in the request's own text does, and a table shows how many guesses each rule accepts at each place
and how many tokens a step gives. Under ``match`` the text must be the one without drafts; under ``rejection`` and
``block`` it is another text of the same law. The exit status is 1 if any two texts that must be the same differ in a
single token.

Backends: ``eager`` (plain torch) and ``compiled`` (Inductor); with CUDA also ``graph`` (sampling is replayed from CUDA
graphs), ``captured`` (lookup, sampling and feedback are replayed as one CUDA graph) and, beside them, eager on the CPU.
Drafts are verified in eager torch on the CPU, and with CUDA by compiled stages.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from compiled_sampler import Sampler, SamplingParams
from tools.corpus import documents
from tools.decode_step import CapturedStep, DecodeStep
from tools.engine import Decoded, Engine, Request
from tools.measurement import environment, write_json
from tools.ngram_model import NgramModel
from tools.speculation import MOST_RUNNING, speculate, speculation_table

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
_GRAPH_COUNTS = ("captures", "replays", "direct_runs", "fallbacks")
_NUM_SLOTS = max(rows for _, rows in ORDERS.values())
_BAR = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
_FEWEST_COLUMNS = 100
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


def texts_table(model: NgramModel, requests: Sequence[Request], decoded: Decoded) -> Table:
    """What the first request of each kind reads like."""
    table = Table("parameters", "prompt and continuation", title="Some of the texts", box=SIMPLE, show_lines=True)
    first = {kind_of(i, len(requests)): request for i, request in reversed(list(enumerate(requests)))}
    for kind in (kind for kind in KINDS if kind in first):
        text = Text(model.decode(first[kind].prompt), style="bold")
        continuation = model.decode(decoded.streams[first[kind].request_id])
        table.add_row(kind, text.append(continuation, style="not bold"))
    return table


def modes_table(numbers: Sequence[dict[str, Any]]) -> Table:
    """How many steps each mode served."""
    modes = list(dict.fromkeys(mode for run in numbers for mode in run["mode_steps"]))
    table = Table("backend", "device", "order", *modes, "reused", title="Steps by mode", box=SIMPLE)
    for run in numbers:
        steps = (str(run["mode_steps"].get(mode, 0)) for mode in modes)
        table.add_row(run["backend"], run["device"], run["order"], *steps, str(run["slots_reused"]))
    return table


def identity_table(numbers: Sequence[dict[str, Any]]) -> Table:
    """The point of it all: every run against the first."""
    columns = ("backend", "device", "order", "most_rows", "steps", "tokens_per_s", "compared", "mismatches", "sha256")
    table = Table(
        *(name.replace("_per_", "/").replace("_", " ") for name in columns),
        title="Every run against the first",
        box=SIMPLE,
    )
    for run in numbers:
        cells = (f"{run[name]:,}" if isinstance(run[name], int | float) else run[name][:10] for name in columns)
        table.add_row(*cells, style="red" if run["mismatches"] else None)
    return table


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="learn from this file instead of the standard library")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--steps", type=int, default=48, help="most tokens a request")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU; threads that wait for each other cost more")
    parser.add_argument("--backend", default="all", choices=("all", "auto", *BACKENDS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-drafts", action="store_true", help="leave out the runs with speculative drafts")
    parser.add_argument("--json", help="store the numbers in this file")
    options = parser.parse_args(argv)
    if options.backend == "captured" and not options.device.startswith("cuda"):
        parser.error("--backend captured needs --device cuda; on a CPU there are eager and compiled")
    if min(options.requests, options.steps, options.threads) < 1:
        parser.error("--requests, --steps and --threads must be at least 1")
    if options.text and not options.text.is_file():
        parser.error(f"--text must name a file, got {options.text}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, store; 1 if any run that must equal the first differs from it, else 0."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    console = Console(highlight=False, width=max(_FEWEST_COLUMNS, Console().width))
    with Progress(*_BAR, console=console) as bar:
        model, docs = build_model(options.text, bar)
        requests = make_requests(model, docs, options.requests, options.steps)
        runs = [
            run
            for backend, device in setups(options.backend, options.device)
            for run in run_backend(backend, device, model, requests, bar)
        ]
        drafts = [] if options.no_drafts else run_drafts(options, model, requests, runs[0].decoded, bar)
    numbers = [run.numbers(runs[0].decoded) for run in runs]
    console.print(texts_table(model, requests, runs[0].decoded), modes_table(numbers), identity_table(numbers))
    if drafts:
        console.print(speculation_table(drafts))
    for graphs in (run.graphs for run in runs if run.graphs):
        console.print("sampler.statistics(): " + ", ".join(f"{name} {graphs[name]}" for name in _GRAPH_COUNTS))
    identical = not any(run["mismatches"] for run in numbers + drafts)
    if options.json:
        facts = {
            "vocab_size": model.vocab_size,
            "requests": options.requests,
            "max_tokens": options.steps,
            "threads": options.threads,
        }
        content = {
            "environment": environment(options.device.partition(":")[0]),
            **facts,
            "identical": identical,
            "runs": numbers,
        }
        write_json(options.json, {**content, "speculation": drafts})
    compared = sum(run["compared"] or 0 for run in numbers[1:] + drafts)
    console.print(f"[green]{compared:,} tokens compared, all identical[/]" if identical else "[red]runs differ[/]")
    return int(not identical)


if __name__ == "__main__":
    sys.exit(main())
