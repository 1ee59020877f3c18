"""Where and with what a measurement was taken, and how it is stored."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import platform
import subprocess
from typing import Any

import torch


def environment(device: str | None = None) -> dict[str, str]:
    """Where and with what something was measured.

    Args:
        device: "cuda" or "cpu"; None is CUDA where there is one.
    """
    cuda = torch.cuda.is_available() if device is None else device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU {platform.machine()}",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def write_json(path: str, content: dict[str, Any]) -> None:
    """Store a measurement, readable by people too."""
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content, indent=1) + "\n")


def _version(module: str) -> str:
    try:
        return str(__import__(module).__version__)
    except ImportError:
        return "none"


def _commit() -> str:
    """The commit of the working tree, or ``COMMIT`` of the environment where there is only a copy of it."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()
