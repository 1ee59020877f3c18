"""Which kernels does a step launch, what does each move, and is anything left to ATen?

    python -m tools.kernels --mode no_filter --rows 8 [--vocab 151936] [--dtype float32] [--json FILE]
    python -m tools.kernels --mode full --rule match --width 3 [--drafts one_hot]
    python -m tools.kernels --mode full --generate triton      a GPU's stages, without one: nothing is compiled

The step is compiled and run on the GPU, or on the CPU in C++ where there is none. Bytes are estimated from the shapes
of a kernel's arguments: each counts once, a gathered one in Triton at most once a load. Registers and spills are the
binary's. Microseconds are those of a launch among many in a replayed CUDA graph, about one of them the node's; the L2
holds what fits, so a kernel that reads less than 50 MB is faster than cold. "hand-written" is a stage of kernels that
Inductor does not see, in one line: those of ``compiled_sampler/exact/triton``, on the CPU numpy's.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from functools import partial

import torch
from rich.console import Console

from compiled_sampler.modes import CACHE, PROCESSED, PROPOSALS, RULES, Verification
from compiled_sampler.pipeline.schedule import row_class
from tools.kernels.launches import BACKENDS, for_a_gpu, generated, listed, recorded, table_of
from tools.kernels.steps import REQUESTS, step_of
from tools.measuring import environment, write_json


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="no_filter", choices=list(REQUESTS))
    parser.add_argument("--rows", type=int, default=8, help="rows of logits; with --rule requests")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rule", choices=RULES, help="verify drafts instead of sampling")
    parser.add_argument("--drafts", default="one_hot", choices=[*PROPOSALS, CACHE, PROCESSED])
    parser.add_argument("--trees", action="store_true", help="drafts are trees of two children a node")
    parser.add_argument("--width", type=int, default=3, help="drafts a request")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--generate", choices=list(BACKENDS), help="only generate code: of a GPU's stages or the CPU's")
    parser.add_argument("--json", help="store the kernels in this file, with their whole names")
    return parser.parse_args()


def main() -> None:
    """Compile, run, print, store."""
    arguments = _arguments()
    device = "cpu" if arguments.generate else arguments.device
    verification = arguments.rule and Verification(
        arguments.rule, arguments.width, arguments.drafts, trees=arguments.trees
    )
    make = partial(
        step_of,
        arguments.mode,
        vocab_size=arguments.vocab,
        dtype=getattr(torch, arguments.dtype),
        device=device,
        verification=verification,
    )
    step = make(rows=arguments.rows)
    if arguments.generate:
        with for_a_gpu() if arguments.generate == "triton" else nullcontext():
            found = listed(generated(step, arguments.generate))
    else:
        found = recorded(make(rows=row_class(arguments.rows, torch.device(device))), step)
    where = f"{arguments.generate or device}, torch {torch.__version__}"
    drafts = f"trees of {arguments.width} drafts" if arguments.trees else f"{arguments.width} drafts"
    variant = f"{arguments.rule} of {drafts}, {arguments.mode}" if verification else arguments.mode
    title = (
        f"{variant} of {REQUESTS[arguments.mode]!r}, [{arguments.rows}, {arguments.vocab}] {arguments.dtype}, {where}"
    )
    Console(width=150).print(table_of(found, title))
    if arguments.json:
        kernels = [each._asdict() for each in found]
        write_json(
            arguments.json, {"environment": environment(device), "arguments": vars(arguments), "kernels": kernels}
        )


if __name__ == "__main__":
    main()
