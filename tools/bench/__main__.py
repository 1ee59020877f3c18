"""How long does a call take on this machine, how far is it from its floor, and what would others take?

    python -m tools.bench [--cases ...] [--rows 1 8 32 128 512] [--vocab 151936] [--dtype float32]
                          [--distribution peaked] [--verify] [--baselines] [--replays] [--peers] [--device cuda]
                          [--streams N] [--json FILE [--append]]
    python -m tools.bench --memory [--rows 128 512 4096] [--vocab 151936] [--verify] [--backend eager] [--json FILE]
    python -m tools.bench --edits|--logprobs [--rows 128] [--cases ...] [--dtype float32] [--json FILE]
    python -m tools.bench --start [--cases ...] [--verify] [--rows 8] [--vocab 151936] [--json FILE]
    python -m tools.bench --host [--rows 1 8 128 256] [--requests 64 512] [--vocab 151936] [--json FILE]
    torchrun --nproc-per-node 2 -m tools.bench --sharded [--mismatches N] [--seconds N] [--json FILE]
    python -m tools.bench --host --device cpu [--rows 1 8 128 256] [--requests 64 512]

With CUDA a cell is the median time of one call inside a replayed graph of many calls, each on logits of its own that
together exceed the L2 cache several times. What the timed calls returned is compared with eager torch, every row, and
the first also with eager torch on the CPU: a wrong answer ends the run. The floor is what the passes over the row take,
by their bytes or their instructions, and one graph node for each dependent kernel besides.
``--replays`` adds what the default backend's own replay of a sampled step takes on the GPU, with bound tensors: the
kernels' time, and what such a replay on the same logits takes beyond the same kernels in a graph of many calls.
On the CPU the clock is used, and the compiled library is set against eager torch.
``--host`` measures what a step costs the host instead, and what it asks of the driver (tools/bench/host.py);
on the CPU how much of that is Python (tools/bench/python_alone.py).
``--edits`` measures what penalties, biases, masks and stops add to a step instead, and ``--logprobs`` what logprobs do
(tools/bench/additions.py).
``--start`` measures how soon the first token is there, and steps while kernels are built (tools/bench/start.py).
``--memory`` measures the peak memory of a step in every mode instead (tools/bench/memory.py).
``--sharded`` measures draws whose vocabulary is split over ranks instead (tools/bench/sharded.py).
``--trees`` measures verifications of trees beside sampling as many rows instead (tools/bench/trees.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from rich.console import Console

from compiled_sampler.lowering.compiled_stages import CompiledStages
from tools.bench import additions, host, memory, python_alone, sharded, start, trees
from tools.bench.cases import CASES, TARGET_VOCAB_SIZE
from tools.bench.cells import Cell, content_of, line_of, merged, stored, stored_peers, tables_of, with_peers
from tools.bench.runs import run
from tools.measuring import DISTRIBUTIONS, MOST_STREAMS, environment, write_json

ROWS = {"cuda": [1, 8, 32, 128, 512], "cpu": [8]}
REQUESTS = {"cuda": [8, 32, 128], "cpu": [8]}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; what depends on the device is filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), help="of sampling")
    parser.add_argument("--rows", nargs="*", type=int, help="of a sampled batch")
    parser.add_argument("--verify", action="store_true", help="measure the verification of drafts too")
    parser.add_argument("--requests", nargs="*", type=int, help="of a verified batch")
    parser.add_argument("--vocab", nargs="+", type=int, default=[TARGET_VOCAB_SIZE])
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--distribution", nargs="+", choices=DISTRIBUTIONS, help="default: what suits each case")
    parser.add_argument("--baselines", action="store_true", help="time what else a user would call")
    parser.add_argument("--replays", action="store_true", help="time the sampler's own replays on the GPU, too")
    parser.add_argument("--peers", action="store_true", help="show what engines' samplers took on an H200, too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, help="of the CPU; default: torch's own number")
    parser.add_argument("--host", action="store_true", help="measure the host's part of a step")
    parser.add_argument("--start", action="store_true", help="measure first draws, and steps while kernels are built")
    parser.add_argument("--memory", action="store_true", help="measure the peak memory of a step in every mode")
    parser.add_argument("--edits", action="store_true", help="measure what edits of logits add to a step")
    parser.add_argument("--logprobs", action="store_true", help="measure what logprobs add to a step")
    parser.add_argument("--sharded", action="store_true", help="measure draws of a split vocabulary, run by torchrun")
    parser.add_argument("--trees", action="store_true", help="measure verifications of trees of drafts")
    parser.add_argument("--mismatches", type=int, default=0, help="with --sharded: count wrong rows among so many")
    parser.add_argument("--seconds", type=float, default=0, help="with --sharded: begin no cell after so many; 0: all")
    parser.add_argument("--slow-wire", action="store_true", help="with --sharded: measure searches without logits, too")
    parser.add_argument("--leave", action="store_true", help="with --sharded: let the last rank exit")
    parser.add_argument("--streams", type=int, default=0, help="that launch a kernel first: some slow a graph down")
    parser.add_argument("--backend", default="compiled", choices=["compiled", "eager"])
    parser.add_argument("--json", help="store the cells in this file, after each of them")
    parser.add_argument("--append", action="store_true", help="keep the other cells of that file")
    options = parser.parse_args(argv)
    alone = "host", "start", "memory", "edits", "logprobs", "sharded", "trees"
    whole = [name for name in alone if getattr(options, name)]
    if options.rows is None and not (options.edits or options.logprobs):
        options.rows = host.ROWS if options.host else (memory.ROWS if options.memory else ROWS)[options.device]
    if options.start:
        options.rows = options.rows if len(options.rows) == 1 else [8]
    if options.requests is None:
        options.requests = host.REQUESTS if options.host else REQUESTS[options.device]
    if refused := _refused(options, whole):
        parser.error(refused)
    return options


def _refused(options: argparse.Namespace, whole: Sequence[str]) -> str | None:
    """What is wrong with the options, of which ``whole`` are measured by themselves; None for nothing."""
    if options.host and (refused := _refused_with_host(options)):
        return refused
    streams = f"--streams must be in [0, {MOST_STREAMS}], and come with --device cuda, got {options.streams}"
    has_no_use_of_streams = options.device == "cpu" or not 0 < options.streams <= MOST_STREAMS
    wrong = (
        (len(whole) > 1, f"--{' must come without --'.join(whole[:2])}: each is measured by itself"),
        (whole and not options.host and len(options.dtype) > 1, f"--{''.join(whole[:1])} must come with one --dtype"),
        (
            (options.mismatches or options.leave or options.seconds or options.slow_wire) and not options.sharded,
            "--mismatches, --leave, --seconds and --slow-wire must come with --sharded",
        ),
        (options.streams and has_no_use_of_streams, streams),
        (
            options.replays and options.device == "cpu",
            "--replays must come with --device cuda, as a CPU replays nothing",
        ),
        (options.append and not options.json, "--append must come with --json FILE"),
        (options.append and whole, f"--append must not come with --{''.join(whole[:1])}, which is measured whole"),
    )
    return next((reason for is_wrong, reason in wrong if is_wrong), None)


def _refused_with_host(options: argparse.Namespace) -> str | None:
    """What is wrong with the options of ``--host``, if anything is."""
    if len(options.vocab) > 1:
        return "--host must come with one --vocab"
    if options.device == "cpu" and options.json:
        return "--host must come with --device cuda to be stored, as on the CPU only Python is measured"
    return None


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, store."""
    options = parse(argv)
    CompiledStages.compiles_at_calls = True  # what is measured is compiled code
    if options.threads:
        torch.set_num_threads(options.threads)
    if _ran_whole(options):
        return
    console, facts = Console(highlight=False, soft_wrap=True), environment(options.device)
    if options.streams:
        facts["streams"] = str(options.streams)
    kept = stored(options.json, facts) if options.append else []

    def report(cell: Cell) -> None:
        console.print(line_of(cell))
        kept[:] = merged(kept, [cell])
        if options.json:
            write_json(options.json, content_of(facts, kept))

    peers = stored_peers()
    if options.peers and facts["device"] != peers.device:
        raise SystemExit(f"--peers must run on an {peers.device}, where they were measured, got {facts['device']}")
    cells = run(options, report)
    Console(width=120).print(*tables_of(with_peers(cells, peers) if options.peers else cells))


def _ran_whole(options: argparse.Namespace) -> bool:
    """Whether the options ask for what is measured by itself, which then was."""
    if options.host and options.device == "cpu":
        python_alone.run(options.rows, options.requests)
    elif options.host:
        host.run(options.rows, options.requests, options.vocab[0], options.json)
    elif options.start:
        start.run(options)
    elif options.memory:
        memory.run(options)
    elif options.sharded:
        sharded.run(options)
    elif options.trees:
        trees.run(options)
    elif options.edits or options.logprobs:
        additions.run(options)
    else:
        return False
    return True


if __name__ == "__main__":
    main()
