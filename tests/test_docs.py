"""README.md and docs: what they name exists, and their Python runs.

A rule is a function from a page's text to complaints. Each one is run on the pages, where it finds nothing, and on a
bad text, where it complains.
"""

import re
import string
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import compiled_sampler
import graph_cache
from compiled_sampler import conformance, functional
from tools.readme import ROOT, pages

FOLDERS = ("compiled_sampler", "graph_cache", "tests", "tools", "docs", "examples")
NAMED_PAGES = [*pages(ROOT), ROOT / "CHANGELOG.md", ROOT / "NOTICE"]
FILES = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")} | {p.name for p in ROOT.glob("*.*")}

_PATH = re.compile(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})(?:/[\w.-]+)+)")
_FILE = re.compile(r"`([\w-]+\.(?:py|json|md|toml|txt|yaml|png))`")
_MODULE = re.compile(r"python -m ((?:compiled_sampler|graph_cache|tools)[\w.]*)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PYTHON = re.compile(r"^( *)```python\n(.*?)^\1```", re.DOTALL | re.MULTILINE)

Rule = Callable[[str, Path], list[str]]


def missing_paths(text: str, page: Path) -> list[str]:
    """Paths and file names that the page gives and the repository lacks."""
    paths = [path.rstrip(".") for path in _PATH.findall(text)]
    lacking = [path for path in paths if not (ROOT / path).exists()]
    return lacking + [name for name in _FILE.findall(text) if name not in FILES]


def missing_modules(text: str, page: Path) -> list[str]:
    """Modules that the page runs by ``python -m`` and that are none, or have nothing to run."""
    found = [name.rstrip(".") for name in _MODULE.findall(text)]
    paths = {name: ROOT / name.replace(".", "/") for name in found}
    return [name for name in found if not (paths[name].with_suffix(".py").exists() or has_main(paths[name]))]


def has_main(folder: Path) -> bool:
    return (folder / "__main__.py").exists()


def broken_links(text: str, page: Path) -> list[str]:
    """Relative links to no file, or to no heading of its page."""
    complaints = []
    for link in _LINK.findall(text):
        name, _, anchor = link.partition("#")
        target = page if not name else page.parent / name
        if name.startswith("http"):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            complaints.append(link)
    return complaints


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    kept = string.ascii_lowercase + string.digits + "-_ "
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {"".join(c for c in heading.lower() if c in kept).replace(" ", "-") for heading in headings}


RULES: dict[Rule, str] = {
    missing_paths: "see `tools/nowhere.py`",
    missing_modules: "run `python -m tools.nowhere`",
    broken_links: "see [there](nowhere.md)",
}


@pytest.mark.parametrize("page", NAMED_PAGES, ids=lambda page: page.name)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_page_names_nothing_that_is_missing(rule: Rule, page: Path) -> None:
    assert rule(page.read_text(), page) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_finds_what_is_wrong(rule: Rule) -> None:
    assert rule(RULES[rule], ROOT / "README.md")


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {ROOT / link.partition("#")[0] for link in _LINK.findall((ROOT / "README.md").read_text())}
    assert set(pages(ROOT)[1:]) <= linked


@pytest.mark.parametrize("package", [compiled_sampler, functional, conformance, graph_cache], ids=lambda p: p.__name__)
def test_every_public_name_is_on_a_page(package: ModuleType) -> None:
    words = {word for page in pages(ROOT) for word in re.findall(r"\w+", page.read_text())}
    assert [name for name in package.__all__ if name not in words] == []


def examples(page: Path) -> list[str]:
    """The Python blocks of a page, in their order, without the indentation of a list."""
    return [
        "\n".join(line.removeprefix(indent) for line in block.splitlines())
        for indent, block in _PYTHON.findall(page.read_text())
    ]


def run_examples(page: Path) -> None:
    names: dict[str, object] = {}
    for block in examples(page):
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("page", [page for page in pages(ROOT)[1:] if examples(page)], ids=lambda page: page.name)
def test_the_examples_of_a_page_run_one_after_the_other(page: Path) -> None:
    run_examples(page)


def test_the_example_of_the_readme_draws_in_the_narrow_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert all('backend="eager"' in block for block in examples(ROOT / "README.md"))
    run_examples(ROOT / "README.md")
    assert capsys.readouterr().out.splitlines()[-1].startswith("top_k_top_p[64] ")
