"""Compiles the stages that its standard input names, and keeps them on disk: started by ``compile_processes``."""

from __future__ import annotations

import contextlib
import pickle
import sys
from pathlib import Path

import torch

from compiled_sampler.lowering.compiled_stages import EXACT_OPTIONS, CompiledStages
from compiled_sampler.lowering.inductor.patches import one_wait
from compiled_sampler.lowering.stage_call import StageCall
from compiled_sampler.lowering.stage_code import StageCode


def main() -> None:
    """Compile them one after the other; one that fails is left to the process that asked.

    Where that process has settings of its own, on which the code depends, none is compiled: it would not be found.
    """
    threads, calls = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    compile_all(calls)


def compile_all(calls: list[tuple[StageCall, Path]]) -> None:
    """Compile stages, each of which is to be kept at the given place."""
    stages = CompiledStages()
    devices = {spec.device for call, _ in calls for spec in call.specs if spec.device.type == "cuda"}
    for device in devices:
        torch.cuda.set_device(device)
    with one_wait():
        for call, path in calls:
            code = StageCode.of_call(call)
            if code.path(EXACT_OPTIONS) != path:
                return
            with contextlib.suppress(Exception):
                stages.compile(code)
            if devices:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
