"""The examples of docs/vllm.md run; ``folder`` in them is a model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.engines.vllm_engine import ENVIRONMENT, ROOT, make_model

pytestmark = pytest.mark.full


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", 64, seed=0)
    blocks = re.findall(r"^```py\n(.*?)^```", (ROOT / "docs" / "vllm.md").read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    script = f"folder = {str(folder)!r}\n" + "\n".join(blocks)
    command = [sys.executable, "-W", "ignore", "-c", script]
    made = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert made.returncode == 0, made.stderr[-4000:]
    lists = [line for line in made.stdout.splitlines() if line.startswith("[")]
    assert len(lists) == 2
    assert "{'batches': 8, 'stock_batches': 0}" in made.stdout
