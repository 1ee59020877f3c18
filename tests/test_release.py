"""The release: wheel and sdist are built from the sources, hold what users need and nothing else, and draw a token."""

import configparser
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import compiled_sampler
from tools import check

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("compiled_sampler", "graph_cache")
SOURCES = (
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "CHANGELOG.md",
    "NOTICE",
    "constraints.txt",
    "tests",
    "tools",
    *PACKAGES,
)

TEN_LINES = """
import sys, torch, compiled_sampler
from compiled_sampler import Sampler, SamplingParams
assert compiled_sampler.__file__.startswith(sys.path[0]), compiled_sampler.__file__
sampler = Sampler(100, 2, backend="eager")
slot = sampler.add_request(SamplingParams(top_k=5, seed=1))
print(sampler.sample(sampler.plan([slot]), torch.arange(100.0)[None], torch.tensor([3])).token_ids.item())
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it; tests and tools stood beside the packages."""
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(copy)]
    done = subprocess.run(build, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


def wheel(folder: Path) -> zipfile.ZipFile:
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def metadata(folder: Path, name: str) -> str:
    """A file of the wheel's .dist-info."""
    with wheel(folder) as archive:
        (path,) = [path for path in archive.namelist() if path.endswith(f".dist-info/{name}")]
        return archive.read(path).decode()


def packaged() -> set[str]:
    """What of the packages belongs into a release."""
    files = {path for package in PACKAGES for path in (ROOT / package).rglob("*") if "__pycache__" not in path.parts}
    return {path.relative_to(ROOT).as_posix() for path in files if path.suffix in (".py", ".json", ".typed")}


def test_the_wheel_holds_the_packages_and_nothing_else(built: Path) -> None:
    with wheel(built) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == packaged()
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


def test_the_sdist_holds_the_packages_and_no_tests_or_tools(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert packaged() | {"pyproject.toml", "README.md", "CHANGELOG.md", "NOTICE"} <= names
    assert not [name for name in names if name.startswith(("tests/", "tools/"))]


def test_every_command_of_the_wheel_is_a_function_in_it(built: Path) -> None:
    entries = configparser.ConfigParser()
    entries.read_string(metadata(built, "entry_points.txt"))
    with wheel(built) as archive:
        assert list(entries["console_scripts"]) == ["compiled-sampler-conformance", "compiled-sampler-selfcheck"]
        for target in entries["console_scripts"].values():
            module, _, function = target.partition(":")
            assert f"{module.replace('.', '/')}.py" in archive.namelist()
            assert f"\ndef {function}(" in archive.read(f"{module.replace('.', '/')}.py").decode()


def test_the_wheel_draws_a_token_away_from_the_sources(built: Path, tmp_path: Path) -> None:
    with wheel(built) as archive:
        archive.extractall(tmp_path / "target")
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'target')!r})\n{TEN_LINES}"
    drawn = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert drawn.returncode == 0, drawn.stderr
    assert 95 <= int(drawn.stdout) < 100


def test_the_changes_name_the_version_that_the_package_says() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert compiled_sampler.__version__ in versions
    assert versions[0] in ("Unreleased", compiled_sampler.__version__)


def test_the_hooks_before_a_commit_run_what_the_checks_run() -> None:
    entries = re.findall(r"entry: python -m (.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    for step, (module, *arguments) in check.steps(fix=False, full=False, pytest_args=[]).items():
        if step != "tests":  # minutes: before a push, by the whole of tools.check
            command = " ".join([module, *(argument for argument in arguments if argument.isalpha())])
            assert any(entry.startswith(command) for entry in entries), f"no hook runs {command}"
    assert "tools.check" in entries
