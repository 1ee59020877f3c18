"""The tokens of a batch in a new process: ``python -m compiled_sampler.conformance.processes.fresh_process FOLDER``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compiled_sampler.conformance.adapter import Params
from compiled_sampler.conformance.targets import find_target

if TYPE_CHECKING:
    from compiled_sampler.conformance.questions.rows.batches import Batch


def tokens_of_a_new_process(name: str, device: torch.device, batch: Batch, limit_s: float) -> Tensor:
    """What a process that does nothing else draws for a batch, int64 ``[R]``.

    Args:
        name: of the target.
        device: to draw on.
        batch: the arguments of the call.
        limit_s: seconds that the process may take.

    Raises:
        RuntimeError: the process failed, and its last line says why; or it hangs, and was ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked = {
            "target": name,
            "device": str(device),
            "params": [asdict(each) for each in batch.params],
            "seeds": batch.seeds,
            "positions": batch.positions,
        }
        Path(folder, "asked.json").write_text(json.dumps(asked), encoding="utf-8")
        torch.save(batch.logits, Path(folder, "logits.pt"))
        command = [sys.executable, "-m", __name__, folder]
        try:
            run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"a new process gave no tokens in {limit_s:g} s and was ended") from None
        if run.returncode:
            raise RuntimeError(f"a new process failed: {(run.stderr.strip().splitlines() or ['without a word'])[-1]}")
        return torch.tensor(json.loads(Path(folder, "tokens.json").read_text(encoding="utf-8")))


def main(folder: str) -> None:
    """Draw what the folder asks for, and write the tokens there."""
    asked = json.loads(Path(folder, "asked.json").read_text(encoding="utf-8"))
    device = torch.device(asked["device"])
    logits = torch.load(Path(folder, "logits.pt"), weights_only=True).to(device)
    params, positions = [Params(**each) for each in asked["params"]], torch.tensor(asked["positions"])
    adapter = find_target(asked["target"])(logits.shape[1], device)
    tokens = adapter.sample(logits, params, asked["seeds"], positions).tolist()
    Path(folder, "tokens.json").write_text(json.dumps(tokens), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
