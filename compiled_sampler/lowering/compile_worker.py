"""Compiles the stages that its standard input names, and keeps them on disk: started by ``compile_processes``."""

from __future__ import annotations

import contextlib
import pickle
import sys

import torch

from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.lowering.inductor.patches import one_wait
from compiled_sampler.lowering.stage_call import StageCall


def main() -> None:
    """Compile them one after the other; one that fails is left to the process that asked."""
    calls: list[StageCall] = pickle.load(sys.stdin.buffer)
    stages = CompiledStages()
    for device in {spec.device for call in calls for spec in call.specs if spec.device.type == "cuda"}:
        torch.cuda.set_device(device)
    with one_wait():
        for call in calls:
            with contextlib.suppress(Exception):
                stages.compile(call)


if __name__ == "__main__":
    main()
