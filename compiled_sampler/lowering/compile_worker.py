"""Compiles the stages that its standard input names, and keeps them on disk: started by ``compile_process``.

It answers on its standard output why a stage is not there, a pickled text that is empty where it is.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from pathlib import Path

import torch

from compiled_sampler.lowering.inductor.compilation import import_compilers, set_up_triton
from compiled_sampler.lowering.layouts import StageCall
from compiled_sampler.lowering.stage_code import EXACT_OPTIONS, StageCode, fault_of


def main() -> None:
    """Compile one after the other, until there are no more."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints is no answer
    with contextlib.suppress(AttributeError, OSError):
        os.nice(int(sys.argv[1]))
    import_compilers()
    with contextlib.suppress(EOFError):
        while True:
            threads, call, path = pickle.load(requests)
            torch.set_num_threads(threads)
            answers.write(pickle.dumps(compiled(call, path)))
            answers.flush()


def compiled(call: StageCall, path: Path | None) -> str:
    """Why a stage is not at a path, after it was compiled; empty where it is, and where Triton keeps it."""
    try:
        code = StageCode.of_call(call)
        if code.device.type == "cuda":
            torch.cuda.set_device(code.device)
            set_up_triton(code.device)
        if code.path(EXACT_OPTIONS) != path:
            return (
                "the process has settings of torch that processes it starts do not have, so that warmup() compiles it"
            )
        code.found_or_compiled(EXACT_OPTIONS)
        if code.device.type == "cuda":
            torch.cuda.synchronize(code.device)
            torch.cuda.empty_cache()
    except Exception as error:
        return fault_of(error)
    return "" if path is None or path.exists() else f"it cannot be kept in {path.parents[2]}"


if __name__ == "__main__":
    main()
