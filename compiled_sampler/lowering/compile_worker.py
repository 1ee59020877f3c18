"""Compiles the stages that its standard input names, and keeps them on disk: started by ``compile_processes``.

It answers on its standard output, one byte for each stage that it has done with.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from compiled_sampler.lowering.compiled_stages import EXACT_OPTIONS, CompiledStages
from compiled_sampler.lowering.compiling.stage_code import StageCode
from compiled_sampler.lowering.inductor.compilation import import_compilers
from compiled_sampler.lowering.stages.stage_call import StageCall


def main() -> None:
    """Compile one after the other; one that fails is left to the process that asked."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints is no answer
    threads, device = pickle.load(requests)
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # makes the context, before the first stage is known
    import_compilers()
    for _ in compiled_one_by_one(_received(requests)):
        answers.write(b".")
        answers.flush()


def compiled_one_by_one(calls: Iterator[tuple[StageCall, Path]]) -> Iterator[StageCode]:
    """Each stage once it was compiled and is kept at the given place, or failed, or another process compiles it."""
    stages = CompiledStages()
    for call, path in calls:
        code = StageCode.of_call(call)
        if code.path(EXACT_OPTIONS) != path:  # whoever asks has settings of its own, and would not find the stages
            return
        with contextlib.suppress(Exception):
            stages.compile(code, waits=False)
        if code.device.type == "cuda":
            torch.cuda.empty_cache()
        yield code


def _received(requests: IO[bytes]) -> Iterator[Any]:
    with contextlib.suppress(EOFError):
        while True:
            yield pickle.load(requests)


if __name__ == "__main__":
    main()
