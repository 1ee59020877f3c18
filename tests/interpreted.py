"""Programs under Triton's interpreter, which the environment asks for when Triton is imported: in a process apart."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_interpreted(file: str) -> Any:
    """What a file prints as JSON when it runs as a program whose Triton kernels are interpreted."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    program = [sys.executable, file]
    result = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    if "No module named 'triton'" in result.stderr:
        pytest.fail("triton must be importable for its interpreter; install the test requirements")
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)
