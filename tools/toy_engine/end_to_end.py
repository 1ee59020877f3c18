"""What do drafts bring in a whole engine? Acceptance by place, tokens a step and a second for each drafter and rule.

    python -m tools.toy_engine.end_to_end [--device DEVICE] [--requests 64] [--steps 48] [--repeats 5] [--json FILE]

The target is the small transformer of ``tools.model``; drafts come from the smaller one and from a look-up in the text.
Requests run in batches of 16 with continuous batching, for K = 3 and 5. Under ``match`` every token is compared with
the tokens without drafts; the exit status is 1 if one differs.

A step is all between two batches: the passes of drafter and target, sampling, and the host. Backends: eager torch on
the CPU, CUDA graphs on a GPU. The models are not compiled, so their passes are mostly launches and Python.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any

import torch

from compiled_sampler import Sampler, SamplingParams, Verification
from compiled_sampler.modes import CACHE
from tools.measuring.environment import environment, write_json
from tools.toy_engine.decode_step import DecodeStep
from tools.toy_engine.engine import Decoded, Engine, Request, longest
from tools.toy_engine.runs import load_models, make_requests, prompt_texts
from tools.toy_engine.speculation import Models, SpeculativeEngine, pairings

ROWS = 16
WIDTHS = (3, 5)
LAWS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature .8, k 40, p .9": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
}
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, store; 1 if a token under ``match`` differs, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--steps", type=int, default=48, help="most tokens of a request")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--json", help="store the numbers in this file")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    models, tokenizer = load_models()
    models = Models(*(each.to(options.device) for each in models))
    requests = make_requests(tokenizer, prompt_texts(None), options.requests, options.steps)
    rows = [row for law in LAWS for row in measure(law, models, requests, options)]
    measured = {**environment(options.device.partition(":")[0]), "requests": options.requests, "table": rows}
    print(rendered(measured))
    if options.json:
        write_json(options.json, measured)
    return int(any(row["mismatches"] for row in rows))


def measure(law: str, models: Models, requests: Sequence[Request], options: argparse.Namespace) -> list[Row]:
    """The rows of one law: without drafts, then every drafter, rule and width."""
    of_law = [SamplingParams(**LAWS[law], seed=each.request_id) for each in requests]
    requests = [dataclasses.replace(each, params=params) for each, params in zip(requests, of_law, strict=True)]
    sampler = _prepared(models, of_law[0], options.device, 0)
    engine = Engine(DecodeStep(models.target, sampler, ROWS, longest(requests)))
    plain = [engine.run(requests, ROWS) for _ in range(options.repeats + 1)]
    nothing = {"accepted_share": [], "tokens_per_step": 1.0, "mismatches": None}
    rows = [{"law": law, "width": 0, "drafter": "none", "rule": "-", **nothing, **_times(plain[1:])}]
    for width in WIDTHS:
        sampler = _prepared(models, of_law[0], options.device, width)
        drafting = SpeculativeEngine(models, sampler, longest(requests), width=width)
        for pairing in pairings(drafting.drafter, sampler, width):
            runs = [drafting.run(pairing.draft, pairing.rule, requests, ROWS) for _ in range(options.repeats + 1)]
            numbers = runs[-1].numbers(pairing, plain[0])
            kept = {name: numbers[name] for name in ("drafter", "rule", *nothing)}
            rows.append({"law": law, "width": width, **kept, **_times([run.decoded for run in runs[1:]])})
    return rows


def _prepared(models: Models, params: SamplingParams, device: str, width: int) -> Sampler:
    """A sampler without requests: in eager torch on the CPU, on CUDA with the graphs that such requests take."""
    if not device.startswith("cuda"):
        return Sampler(models.target.config.vocab_size, ROWS, device, backend="eager")
    judged = [("match", "one_hot"), ("rejection", CACHE), ("block", CACHE)] if width else []
    ways = [Verification(rule, width, drafts) for rule, drafts in judged]
    sampler = Sampler(models.target.config.vocab_size, ROWS, device, verifications=ways, draft_cache_len=width)
    sampler.warmup(modes=[sampler.mode_for(params).name])
    return sampler


def _times(runs: Sequence[Decoded]) -> Row:
    """Tokens a second, the median of runs; milliseconds of a step, median and 95th percentile of all steps."""
    steps = [1e3 * seconds for run in runs for seconds in run.step_seconds]
    return {
        "tokens_per_s": round(median(run.num_tokens / run.seconds for run in runs), 1),
        "step_ms": round(median(steps), 3),
        "step_ms_p95": round(quantiles(steps, n=20)[-1], 3),
    }


def rendered(measured: dict[str, Any]) -> str:
    """A table for each law, and with what it was measured."""
    parts = []
    for law in dict.fromkeys(row["law"] for row in measured["table"]):
        lines = [
            "| K | drafts | rule | accepted at 1, 2, ... | tokens a step | tokens/s | ms a step, median (p95) |",
            "| ---: | --- | --- | --- | ---: | ---: | ---: |",
        ]
        for row in (row for row in measured["table"] if row["law"] == law):
            shares = ", ".join("-" if share is None else f"{share:.0%}" for share in row["accepted_share"])
            times = f"{row['tokens_per_s']:,.0f} | {row['step_ms']:.2f} ({row['step_ms_p95']:.2f})"
            lines.append(
                f"| {row['width']} | {row['drafter']} | {row['rule']} | {shares or '-'} | "
                f"{row['tokens_per_step']:.2f} | {times} |"
            )
        parts += [f"{measured['requests']} requests, {law}:", "\n".join(lines)]
    machine = f"{measured['device']}; torch {measured['torch']}, Python {measured['python']}"
    return "\n\n".join([*parts, f"{machine}."])


if __name__ == "__main__":
    sys.exit(main())
