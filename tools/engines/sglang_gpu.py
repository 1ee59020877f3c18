"""Are SGLang's tokens with our sampler the same in every way on a GPU, and how fast is it beside its own samplers?

Command line, in an environment with SGLang 0.5.17 and this package::

    python -m tools.engines.sglang_gpu [--engines ours stock ...] [--rows 8 128] [--laws greedy ...] [--rounds 4]
                                       [--seconds 230] [--json FILE]

Each engine runs in processes of its own on one GPU; while one is timed the others sleep. A plugin hashes each row of
logits that a sampler sees. The promise is about rows of one request, position and hash: they have one token, in all
batches, orders and engines.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from statistics import median
from typing import Any

from tools.engines.sglang_process import ENGINES, REQUESTS, make_plugin, started
from tools.engines.vllm_gpu import CELLS, Process
from tools.engines.vllm_process import make_model

TIMED = ("stock", "ours", "stock_seeded")


def asked(engine: Process) -> dict[str, Any]:
    """Requests alone, in a batch, in another order, with cached prefixes; ours also with stages that are compiled."""
    everyone = list(range(len(REQUESTS)))
    made = {f"alone {each}": engine.ask("tokens", order=[each], is_cold=True) for each in everyone}
    made["batch"] = engine.ask("tokens", order=everyone, is_cold=True)
    made["shuffled"] = engine.ask("tokens", order=[(7 * each) % 16 for each in everyone], is_cold=True)
    made["cached"] = engine.ask("tokens", order=everyone, is_cold=False)
    if engine.name == "ours":
        print("ours settled in", engine.ask("settle"), flush=True)
        made["settled"] = engine.ask("tokens", order=everyone, is_cold=True)
    return made


def compared(answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """For each kind of sampler: rows of logits seen twice and more, those with two tokens, and streams as alone."""
    made: dict[str, Any] = {}
    seen: dict[str, dict[tuple[str, int, str], list[int]]] = defaultdict(lambda: defaultdict(list))
    for name, runs in answers.items():
        if "error" in runs:
            made[name] = runs["error"]
            continue
        alone = {
            place: run["rows"][place]["tokens"]
            for run in runs.values()
            if len(run.get("rows", ())) == 1
            for place in run["rows"]
        }
        for label, run in runs.items():
            if "error" in run:
                made[f"{name} {label}"] = run["error"]
                continue
            for place, row in run["rows"].items():
                first = len(REQUESTS[int(place)][0])
                for at, token in enumerate(row["tokens"], first):
                    if str(at) in row["logits"]:
                        seen[name.split("_")[0]][place, at, row["logits"][str(at)]].append(token)
            if len(run["rows"]) > 1:
                equal = sum(row["tokens"] == alone.get(place) for place, row in run["rows"].items())
                made[f"{name} {label}"] = {"streams as alone": f"{equal}/{len(run['rows'])}", "cached": run["cached"]}
    for kind, rows in seen.items():
        repeated = [tokens for tokens in rows.values() if len(tokens) > 1]
        broken = sum(len(set(tokens)) > 1 for tokens in repeated)
        made[kind] = {"rows": len(rows), "seen again": len(repeated), "with the same logits and another token": broken}
    return made


def timed(engines: list[Process], options: argparse.Namespace, end: float) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Tokens a second of each cell, engines in turns; and microseconds of the host in a call of the sampler."""
    cells = list(itertools.product(options.rows, options.laws))
    for engine, (rows, law) in itertools.product(engines, cells):
        engine.ask("time", rows=rows, tokens=4, law=CELLS[law])
    yield "tokens_per_s", "settled", {engine.name: engine.ask("settle") for engine in engines}
    for rows, law in cells:
        for engine in engines:
            engine.ask("host")  # from now on calls are of this cell
        question = {"rows": rows, "tokens": 32, "law": CELLS[law]}
        found: dict[str, list[float]] = {engine.name: [] for engine in engines}
        for turn in range(-1, options.rounds):
            for engine in engines if turn % 2 == 0 else engines[::-1]:
                answer = engine.ask("time", **question)
                if turn >= 0 and "ms" in answer:
                    found[engine.name].append(1e3 * rows / answer["ms"])
            if time.time() > end:
                break
        shown = {
            name: [round(median(each)), round(min(each)), round(max(each))] for name, each in found.items() if each
        }
        yield "tokens_per_s", f"{rows} {law}", shown
        yield "host", f"{rows} {law}", {engine.name: engine.ask("host").get("us") for engine in engines}
        if time.time() > end:
            return


def answers_of(engines: dict[str, Process], do: Callable[[Process], Any], seconds: float) -> dict[str, Any]:
    """What each engine answers, all at once; one that is late is ended."""
    pool = ThreadPoolExecutor(len(engines) or 1)
    futures = {name: pool.submit(do, engine) for name, engine in engines.items()}
    wait(futures.values(), timeout=max(1.0, seconds))
    pool.shutdown(wait=False)
    for name, future in futures.items():
        if not future.done():
            engines[name].stop()
    return {name: future.result() if future.done() else {"error": "late"} for name, future in futures.items()}


def run_parts(options: argparse.Namespace, engines: dict[str, Process], made: dict[str, Any]) -> None:
    """Start the engines, compare tokens of those that take seeds, and time those of the table."""
    began = time.time()

    def show(part: str, label: str, row: Any) -> None:
        made[part][label] = row
        print(f"{time.time() - began:4.0f} s  {part}  {label} {row}", flush=True)

    make_plugin(options.work / "plugin")
    folder = make_model(options.model, options.work / options.model)
    engines |= {name: started(name, options.work, folder) for name in options.engines}
    for name, answer in answers_of(engines, Process.started, 0.45 * options.seconds).items():
        show("started", name, answer)
    ready = {name: engine for name, engine in engines.items() if "start_s" in made["started"][name]}
    seeded = {name: engine for name, engine in ready.items() if name != "stock"}
    made["answers"] = answers_of(seeded, asked, began + 0.75 * options.seconds - time.time())
    for label, row in compared(made["answers"]).items():
        show("tokens", label, row)
    table = [ready[name] for name in TIMED if name in ready and "error" not in made["answers"].get(name, {})]
    end = began + options.seconds - 5
    for engine in ready.values():
        if engine not in table:
            engine.stop()
    clock = threading.Timer(options.seconds - (time.time() - began), lambda: [engine.stop() for engine in table])
    clock.daemon = True
    clock.start()
    for part, label, cell in timed(table, options, end):
        show(part, label, cell)
    clock.cancel()


def main() -> None:
    """Run the parts, print tables, and the ends of the logs of engines that did not answer."""
    parser = argparse.ArgumentParser(description="SGLang on a GPU with our sampler and its own.", allow_abbrev=False)
    parser.add_argument("--engines", nargs="+", default=[*ENGINES], choices=[*ENGINES])
    parser.add_argument("--model", default="small", choices=["small", "1B", "loop"])
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 128])
    parser.add_argument("--laws", nargs="+", default=["plain", "k 50 p .9", "p .9", "greedy"], choices=[*CELLS])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=230.0, help="in all")
    parser.add_argument("--work", type=Path, default=Path("/tmp/sglang_gpu"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engines: dict[str, Process] = {}
    made: dict[str, Any] = {"started": {}, "answers": {}, "tokens": {}, "tokens_per_s": {}, "host": {}}
    try:
        run_parts(options, engines, made)
    finally:
        for engine in engines.values():
            engine.stop()
        for name in engines:
            if "start_s" not in made["started"].get(name, {}) or "error" in str(made["answers"].get(name)):
                lines = (options.work / f"{name}.log").read_text(errors="replace").splitlines()
                print(f"== {name}", *(line[:300] for line in lines[-40:]), sep="\n", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(made))


if __name__ == "__main__":
    main()
