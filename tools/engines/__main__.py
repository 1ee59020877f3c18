"""Do the adapters pass their tests inside the engines that they are for?

Command line::

    bash tools/run engines [arguments of pytest]
    bash tools/run engines --engine transformers --version 5.17.0
    bash tools/run engines --engine vllm
    bash tools/run engines --engine sglang

The engines, xgrammar for its masks, and psutil, which continuous batching needs on a CPU, are installed into
``.engines``, which is kept: transformers beside the versions of constraints.txt, the newest that pip finds or the one
named; vLLM for the CPU in ``.engines/vllm``, with the torch that it wants. SGLang does not run without a
GPU: its wheel is unpacked, 22 MB, and the adapter is tested against the published source. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

from tools.engines import published_source, vllm_environment

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".engines"
TESTS = "tests/compiled_sampler/integrations"
NAMES = ("transformers", "vllm", *published_source.VERSIONS)


def pip_arguments(version: str | None) -> list[str]:
    """What pip installs for transformers.

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
    """Make the environment of transformers, or bring the one that is there to a version; the path of its Python.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        venv.create(ENVIRONMENT, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    subprocess.run([*pip, *pip_arguments(version)], check=True)
    return python


def beside_source(engine: str, version: str | None) -> Path:
    """The path of a Python with torch and pytest, once the source of an engine is unpacked.

    Args:
        engine: one of ``published_source.VERSIONS``.
        version: of it.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    python = ENVIRONMENT / "bin" / "python"
    python = python if python.exists() else prepare(None)
    published_source.prepare(python, engine, version)
    print(f"{engine} {published_source.unpacked_version(engine)}: its source, not the engine", flush=True)
    return python


def run_tests(engine: str, version: str | None, pytest_args: list[str]) -> int:
    """The exit status of pytest inside an engine, which is installed first.

    Args:
        engine: one of ``NAMES``.
        version: of it; None for that of ``prepare``.
        pytest_args: further arguments of pytest.
    """
    if engine in published_source.VERSIONS:
        python, tests = beside_source(engine, version), published_source.TESTS[engine]
    else:
        prepared = {"transformers": (prepare, TESTS), "vllm": (vllm_environment.prepare, vllm_environment.TESTS)}
        make, tests = prepared[engine]
        python = make(version)
        shown = f"import torch, {engine}; print('torch', torch.__version__, '{engine}', {engine}.__version__)"
        subprocess.run([str(python), "-c", shown], check=True)
    both_tiers = ["-m", "pytest", "-m", "", tests]
    return subprocess.run([str(python), *both_tiers, *pytest_args], cwd=ROOT, check=False).returncode


def main() -> int:
    """The exit status of pytest, the first that is not 0."""
    parser = argparse.ArgumentParser(description="Run the tests of the adapters in their engines.", allow_abbrev=False)
    parser.add_argument("--engine", choices=NAMES, help="that one alone; all by default")
    parser.add_argument(
        "--version", help="of the engine; by default the newest transformers, and of others the tested one"
    )
    options, pytest_args = parser.parse_known_args()
    if options.version and not options.engine:
        parser.error("--version must come with --engine, whose version it is")
    engines = NAMES if options.engine is None else (options.engine,)
    return next(filter(None, [run_tests(each, options.version, pytest_args) for each in engines]), 0)


if __name__ == "__main__":
    sys.exit(main())
