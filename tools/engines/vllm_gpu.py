"""Is vLLM on a GPU faster with our sampler than with its own, and are its tokens the same in every way?

Command line, in an environment with vLLM 0.32 and this package::

    python -m tools.engines.vllm_gpu [--runners v1 v2] [--model small] [--rows 1 8 32 128 256] [--laws greedy ...]
                                     [--rounds 10] [--seconds 400] [--times] [--profile] [--tokens] [--ways ngram ...]
                                     [--drafts] [--json FILE]

An engine with vLLM's sampler and one with ours run in processes of their own on one GPU and take turns, since what a
shared host does varies by 2 within minutes; only one of them works at a time. Times are of whole rounds over their
tokens. ``--profile`` says where a step's time goes, ``--tokens`` compares tokens and hashes of logits between batches,
orders and engines, also with engines of ours that work in other ``--ways``, ``--drafts`` has engines that draft by
n-grams.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from tools.engines.vllm_process import PROMPTS, make_model
from tools.engines.vllm_serve import Server

CELLS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "k 50 p .9": {"top_p": 0.9, "top_k": 50},
    "p .9": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "logprobs 5": {"logprobs": 5},
    "no seeds k 50 p .9": {"top_p": 0.9, "top_k": 50, "seed": None},
}
SMALL_CACHE = {"max_model_len": 160, "num_gpu_blocks_override": 20}
WAYS: dict[str, dict[str, Any]] = {
    "chunked": {"engine": {"max_num_seqs": 8, "max_num_batched_tokens": 24, "enable_prefix_caching": False}},
    "preempted": {"engine": SMALL_CACHE},
    "ngram": {"drafts": "ngram"},
    "ngram_preempted": {"drafts": "ngram", "engine": SMALL_CACHE},
    "eager": {"engine": {"enforce_eager": True}},
    "invariant": {"environment": {"VLLM_BATCH_INVARIANT": "1"}},
    "two_ranks": {"engine": {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}},
    "served": {"is_server": True},
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "2",
    "PYTHONUNBUFFERED": "1",
}


class Process:
    """An engine in a process of its own."""

    def __init__(self, case: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        """Start it; it is ready when ``started`` returns."""
        module = case.get("module", "tools.engines.vllm_process")
        command = [sys.executable, "-W", "ignore", "-m", module, json.dumps(case)]
        self.name, self._log = case["name"], log.open("w")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log}
        environment = {**os.environ, **environment}
        self._process = subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)

    def started(self) -> dict[str, Any]:
        """How long it took to start."""
        return self._read()

    def ask(self, do: str, **question: Any) -> dict[str, Any]:
        """The answer to a question."""
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **question}), file=self._process.stdin, flush=True)
        return self._read()

    def stop(self) -> None:
        """End it, and the processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": f"{self.name} ended"}


Engines = Sequence[Process | Server]


def started(case: dict[str, Any], work: Path) -> Process | Server:
    """An engine or a server that begins to start, with compile caches of its own."""
    folder, log = work / "caches" / case["name"], work / f"{case['name']}.log"
    places = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    own = {name: str(folder / place) for name, place in places.items()}
    environment = {**ENVIRONMENT, **own, **case.get("environment", {})}
    return (Server if case.get("is_server") else Process)(case, environment, log)


def cases(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The engines to start."""
    most = max(options.rows)
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= most]
    engine = {
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_seqs": most,
        "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": 0.05,
        "compilation_config": {"cudagraph_capture_sizes": sizes},
        "seed": 0,
        "disable_log_stats": False,
    }
    named = []
    for runner, sampler in itertools.product(options.runners, options.samplers):
        case = {"runner": runner, "sampler": sampler, "folder": str(folder), "engine": engine}
        if options.drafts:
            case["drafts"] = "ngram"
        named.append({"name": f"{runner}_{sampler}", **case})
    for runner, way in itertools.product(options.runners, options.ways):
        case = {"runner": runner, "sampler": "ours", "folder": str(folder), **WAYS[way]}
        named.append({"name": f"{runner}_ours_{way}", **case, "engine": {**engine, **WAYS[way].get("engine", {})}})
    return named


def timed(engines: Engines, options: argparse.Namespace, end: float) -> dict[str, Any]:
    """Each cell in turns: medians, worst and best of each engine."""
    made: dict[str, Any] = {}
    for rows, law in itertools.product(options.rows, options.laws):
        tokens = 32 if rows > 32 else 48
        question = {"rows": rows, "tokens": tokens, "law": CELLS[law]}
        found: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
        first = {engine.name: engine.ask("time", **question) for engine in engines}
        for turn in range(options.rounds):
            for engine in engines if turn % 2 == 0 else engines[::-1]:
                found[engine.name].append(engine.ask("time", **question))
            if time.time() > end:
                break
        cell = made[f"{rows} {law}"] = {}
        for name, answers in found.items():
            good = [each for each in answers if "ms" in each]
            if not good or "ms" not in first[name]:
                cell[name] = first[name]
                continue
            keys = ("ms", "cpu_ms", "host_us", "host_max_us")
            cell[name] = {key: round(median(each[key] for each in good), 3) for key in keys}
            cell[name] |= {"first_ms": round(first[name]["ms"], 2), "turns": len(good)}
        stock, ours = (found[engine.name] for engine in engines[:2])
        pairs = [(one, two) for one, two in zip(stock, ours, strict=False) if "ms" in one and "ms" in two]
        shown = [f"{rows:4d} {law:20s}"]
        shown += [f"{name} {cell[name].get('ms')} ({cell[name].get('host_us')})" for name in found]
        for key, label in (("ms", "stock / ours"), ("cpu_ms", "stock / ours, processor")):
            ratios = [one[key] / two[key] for one, two in pairs]  # each turn's, as the host's speed drifts
            cell[label] = round(median(ratios), 3) if ratios else None
            shown.append(f"{label} {cell[label]}")
        print("  ".join(shown), flush=True)
        if time.time() > end:
            print("time is over", flush=True)
            break
    return made


def profiled(engines: Engines, options: argparse.Namespace, end: float) -> dict[str, Any]:
    """Where the time of some steps goes."""
    made: dict[str, Any] = {}
    for rows, law in itertools.product(options.rows, options.laws):
        for engine in engines:
            if time.time() > end:
                return made
            engine.ask("time", rows=rows, tokens=8, law=CELLS[law])
            answer = made[f"{engine.name} {rows} {law}"] = engine.ask("profile", rows=rows, tokens=24, law=CELLS[law])
            host, kernel = answer.get("host_us", 0), answer.get("kernel_us", 0)
            driver = {name[:24]: [round(n, 1), round(us)] for name, (n, us) in answer.get("driver", {}).items()}
            print(f"{engine.name} {rows} {law}: host {host:.0f} kernels {kernel:.0f} {driver}", flush=True)
    return made


def compared(engines: Engines, end: float) -> dict[str, Any]:
    """Tokens of eight requests alone, in a batch, reversed and again, in each engine; beside the first of its kind."""
    everyone = list(range(len(PROMPTS)))
    orders = {**{f"alone {each}": [each] for each in everyone}, "batch": everyone, "reversed": everyone[::-1]}
    orders["again"] = everyone
    made: dict[str, Any] = {}
    for engine in engines:
        for label, order in orders.items():
            if time.time() < end:
                made[f"{engine.name} {label}"] = engine.ask("tokens", order=order)
    for label, answer in made.items():
        if "error" in answer:
            print(label, answer["error"], flush=True)
            continue
        kind = next(engine.name for engine in engines if engine.name.split("_")[1] == label.split()[0].split("_")[1])
        alone = {place: made[f"{kind} alone {place}"].get(place) for place in answer}
        rows = [_same(alone[place], each, len(PROMPTS[int(place)])) for place, each in answer.items()]
        equal, other, broken, streams = (sum(column) for column in zip(*rows, strict=True))
        print(
            f"{label:24s} streams {streams}/{len(rows)}  rows {equal} other logits {other} BROKEN {broken}", flush=True
        )
    return made


def _same(one: dict[str, Any], two: dict[str, Any], prompt_len: int) -> tuple[int, int, int, bool]:
    """Rows of equal logits, rows of other logits, rows of equal logits with other tokens, and whether all are equal."""
    equal = other = broken = 0
    for place, (a, b) in enumerate(zip(one["tokens"], two["tokens"], strict=False)):
        position = str(prompt_len + place)
        is_same = one["logits"].get(position) is not None and one["logits"].get(position) == two["logits"].get(position)
        equal, other = equal + is_same, other + (not is_same)
        if a != b:
            broken += is_same
            break
    return equal, other, broken, one["tokens"] == two["tokens"]


def _late(*_: object) -> None:
    raise TimeoutError("an engine did not answer in time")


def main() -> None:
    """Start engines, ask them, print tables."""
    parser = argparse.ArgumentParser(description="vLLM on a GPU with our sampler and with its own.", allow_abbrev=False)
    parser.add_argument("--runners", nargs="+", default=["v1", "v2"], choices=["v1", "v2"])
    parser.add_argument("--samplers", nargs="+", default=["stock", "ours"], choices=["stock", "ours"])
    parser.add_argument("--ways", nargs="+", default=[], choices=[*WAYS], help="of engines whose tokens are compared")
    parser.add_argument("--model", default="small", choices=["small", "1B", "loop"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    parser.add_argument("--laws", nargs="+", default=[*CELLS], choices=[*CELLS])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=400.0, help="in all")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--tokens", action="store_true")
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--work", type=Path, default=Path("/tmp/vllm_gpu"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.time()
    end = began + options.seconds
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(int(options.seconds) + 15)
    folder = make_model(options.model, options.work / options.model)
    engines = [started(case, options.work) for case in cases(options, folder)]
    made: dict[str, Any] = {"started": {}}
    for engine in engines:
        made["started"][engine.name] = engine.started()
        print(f"{time.time() - began:5.0f} s  {engine.name} {made['started'][engine.name]}", flush=True)
    if options.times or options.profile:  # tokens are the same before, while and after stages are compiled
        made["settled"] = {engine.name: engine.ask("settle", seconds=180.0) for engine in engines}
        print(f"{time.time() - began:5.0f} s  settled {made['settled']}", flush=True)
    parts = {"times": timed, "profile": profiled}
    try:
        if options.tokens:
            made["tokens"] = compared(engines, end)
        for name, part in parts.items():
            if getattr(options, name):
                made[name] = part(engines, options, end)
        made["state"] = {engine.name: engine.ask("state") for engine in engines}
        print(json.dumps(made["state"]), flush=True)
    finally:
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(made))
        for engine in engines:
            engine.stop()


if __name__ == "__main__":
    main()
