"""Does a request get the same tokens from every backend and in every batch? See it decode on this machine.

    python -m tools.demo [--requests 64] [--steps 48] [--text FILE] [--backend all] [--device DEVICE] [--no-drafts]
                         [--json FILE]

Nothing is downloaded: a small Llama of two layers, which ``tools.model.train`` trained on the language reference that
Python's ``help()`` shows, continues paragraphs of that text. Requests with different parameters and seeds come and go
in an engine with continuous batching, once for each backend and once more in another order with fewer rows. Some are
then decoded with speculative drafts: a smaller model guesses, or a look-up in the request's own text does, and a table
shows how many guesses each rule accepts at each place and how many tokens a step gives. Under ``match`` the text must
be the one without drafts; under ``rejection`` and ``block`` it is another text of the same law. The exit status is 1 if
any two texts that must be the same differ in a single token.

The model computes in float64 and rounds its logits to float32, so that they are the same in every batch and on every
device but for a bit in about 1e8 of them.

Backends: ``eager`` (plain torch) and ``compiled`` (Inductor); with CUDA also ``graph`` (sampling is replayed from CUDA
graphs), ``captured`` (model, sampling and feedback are replayed as one CUDA graph) and, beside them, eager on the CPU.
Drafts are verified in eager torch on the CPU, and with CUDA by compiled stages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from compiled_sampler.lowering.compiled_stages import CompiledStages
from tools.measuring import environment, write_json
from tools.toy_engine.runs import (
    BACKENDS,
    load_models,
    make_requests,
    prompt_texts,
    run_backend,
    run_drafts,
    setups,
)
from tools.toy_engine.tables import identity_table, modes_table, speculation_table, texts_table

_GRAPH_COUNTS = ("captures", "replays", "direct_runs", "fallbacks")
_BAR = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
_FEWEST_COLUMNS = 100


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="take prompts from this file instead of Python's help()")
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
    """Run, print, store; 1 if any run that must equal the first differs from it, 2 without texts, else 0."""
    options = parse(argv)
    try:
        texts = prompt_texts(options.text)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    CompiledStages.compiles_at_calls = True  # what is compared is compiled code
    console = Console(highlight=False, width=max(_FEWEST_COLUMNS, Console().width))
    with Progress(*_BAR, console=console) as bar:
        models, tokenizer = load_models()
        requests = make_requests(tokenizer, texts, options.requests, options.steps)
        runs = [
            run
            for backend, device in setups(options.backend, options.device)
            for run in run_backend(backend, device, models.target, requests, bar)
        ]
        drafts = [] if options.no_drafts else run_drafts(options, models, requests, runs[0].decoded, bar)
    numbers = [run.numbers(runs[0].decoded) for run in runs]
    console.print(texts_table(tokenizer, requests, runs[0].decoded), modes_table(numbers), identity_table(numbers))
    if drafts:
        console.print(speculation_table(drafts))
    for graphs in (run.graphs for run in runs if run.graphs):
        console.print("sampler.statistics(): " + ", ".join(f"{name} {graphs[name]}" for name in _GRAPH_COUNTS))
    identical = not any(run["mismatches"] for run in numbers + drafts)
    if options.json:
        facts = {
            "vocab_size": models.target.config.vocab_size,
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
