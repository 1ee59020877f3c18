"""The published source of engines that cannot be installed without a GPU: their wheels, unpacked, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = {"sglang": "0.5.17"}
"""Of each package, which the tests passed with."""
TESTS = {name: f"tests/compiled_sampler/integrations/{name}" for name in VERSIONS}
_ANY_WHEEL = ("--no-deps", "--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_34_x86_64")


def folder(name: str) -> Path:
    """Where the source of a package is kept."""
    return ROOT / ".engines" / name


def unpacked_version(name: str) -> str:
    """The version that is unpacked; nothing if none is."""
    found = sorted(folder(name).glob(f"{name}-*.dist-info"))
    return found[0].name.removesuffix(".dist-info").partition("-")[2] if found else ""


def prepare(python: Path, name: str, version: str | None) -> None:
    """Download the wheel of a package without its dependencies and unpack its Python files, unless they are there.

    Args:
        python: whose pip downloads.
        name: of the package.
        version: of it; None for the one that the tests passed with.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    wanted = version or VERSIONS[name]
    if unpacked_version(name) != wanted:
        with tempfile.TemporaryDirectory() as place:
            pip = [str(python), "-m", "pip", "download", "--disable-pip-version-check", *_ANY_WHEEL]
            subprocess.run([*pip, "--dest", place, f"{name}=={wanted}"], check=True)
            shutil.rmtree(folder(name), ignore_errors=True)
            _unpack(next(Path(place).glob("*.whl")), folder(name))


def _unpack(wheel: Path, where: Path) -> None:
    """Unpack the Python files and the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        wanted = [name for name in archive.namelist() if name.endswith((".py", "METADATA", "entry_points.txt"))]
        archive.extractall(where, wanted)
