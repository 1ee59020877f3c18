"""Modules of an engine's published source, imported without the engine: what they import beside each other is mocked.

``.engines/<engine>`` holds the source; ``bash tools/run engines --engine <engine>`` puts it there.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from compiled_sampler.integrations.engine_interface import Find, found
from tools.engines.published_source import ROOT, VERSIONS, folder, unpacked_version


class Mocked(ModuleType):
    """A module that has whatever is asked of it: an object that takes any call, for ``is_...`` one that says no."""

    def __init__(self, name: str, real: tuple[str, ...]) -> None:
        super().__init__(name)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in self._real:
            return importlib.import_module(f"{self.__name__}.{name}")
        made: Any = (lambda *_, **__: False) if name.startswith("is_") else MagicMock(name=name)
        setattr(self, name, made)
        return made


class PublishedModules(MetaPathFinder, Loader):
    """Finds some modules in the source, and mocks all others of the packages."""

    def __init__(self, source: Path, packages: tuple[str, ...], real: tuple[str, ...]) -> None:
        self._source, self._packages, self._real = source, packages, real

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The file of a real module, or this finder as the loader of a mock."""
        if name.partition(".")[0] not in self._packages:
            return None
        if name in self._real:
            file = self._source / f"{name.replace('.', '/')}.py"
            assert file.exists(), f"{name} is not in the published source"
            return importlib.util.spec_from_file_location(name, file)
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Mocked(spec.name, self._real)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do."""


def require_source(engine: str) -> Path:
    """The folder of an engine's source; the test is skipped where it is not unpacked."""
    if not unpacked_version(engine):
        pytest.skip(f"the source of {engine} {VERSIONS[engine]} is not there; bash tools/run engines --engine {engine}")
    return folder(engine)


def without(name: str) -> Find:
    """Looks into the engine that is installed, or imported from its source, which lacks what a name stands for."""

    def find(asked: str) -> Any:
        if asked == name:
            raise LookupError(asked)
        return found(asked)

    return find


def run_example(section: str) -> None:
    """Run the one example of a section of the page on engines."""
    text = (ROOT / "docs" / "engines.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```py\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    exec(compile(block, "engines.md", "exec"), {"folder": "model"})


@contextmanager
def published(engine: str, real: tuple[str, ...], others: tuple[str, ...] = ()) -> Iterator[None]:
    """Import ``real`` modules of an engine from its source within the block, where ``others`` are mocked too."""
    with isolated((engine, *others), f"compiled_sampler.integrations.{engine}"):
        finder = PublishedModules(require_source(engine), (engine, *others), real)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)


@contextmanager
def isolated(packages: tuple[str, ...], adapter: str) -> Iterator[None]:
    """Hide modules of packages and of the adapter that uses them, and have them back behind the block."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_of(name, (*packages, adapter))}
    try:
        yield
    finally:
        for name in list(sys.modules):
            if _is_of(name, (*packages, adapter)):
                del sys.modules[name]
        sys.modules.update(hidden)


def _is_of(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in packages)


def put_module(name: str, contents: dict[str, Any]) -> None:
    """Make a module, and the packages that it is in."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        path = ".".join(parts[:count])
        if path not in sys.modules:
            made: Any = ModuleType(path)
            sys.modules[path] = made
            made.__path__ = []
            if count > 1:
                setattr(sys.modules[".".join(parts[: count - 1])], parts[count - 1], made)
    vars(sys.modules[name]).update(contents)
