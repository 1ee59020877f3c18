"""Do the adapters pass their tests inside the engines that they are for?

Command line::

    bash tools/run engines [arguments of pytest]
    bash tools/run engines --version 5.17.0

The engines, xgrammar for its masks, and psutil, which continuous batching needs on a CPU, are installed into
``.engines``, which is kept, beside the versions of constraints.txt; a call takes the newest transformers that pip
finds, or the one named. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".engines"
TESTS = "tests/compiled_sampler/integrations"


def pip_arguments(version: str | None) -> list[str]:
    """What pip installs.

    Args:
        version: of transformers; None for the newest.
    """
    engine = f"transformers=={version}" if version else "transformers>=5.17"
    return [
        "--upgrade",
        engine,
        "xgrammar",
        "psutil",
        "--constraint",
        str(ROOT / "constraints.txt"),
        "--editable",
        f"{ROOT}[test]",
    ]


def prepare(version: str | None) -> Path:
    """Make the environment, or bring the one that is there to a version; the path of its Python.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        venv.create(ENVIRONMENT, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    subprocess.run([*pip, *pip_arguments(version)], check=True)
    return python


def main() -> int:
    """The exit status of pytest."""
    parser = argparse.ArgumentParser(description="Run the tests of the adapters in their engines.", allow_abbrev=False)
    parser.add_argument("--version", help="of transformers; the newest by default")
    options, pytest_args = parser.parse_known_args()
    python = prepare(options.version)
    shown = "import torch, transformers; print('torch', torch.__version__, 'transformers', transformers.__version__)"
    subprocess.run([str(python), "-c", shown], check=True)
    return subprocess.run([str(python), "-m", "pytest", TESTS, *pytest_args], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
