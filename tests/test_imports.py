"""Which module may import which, read from the sources with ``ast``; and what a fresh process imports.

A rule is a function from sources (``{path: text}``) to complaints.
"""

import ast
import functools
import graphlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("compiled_sampler", "graph_cache", "tests", "tools")
PACKAGES = ("compiled_sampler", "graph_cache")
ORACLES = "tests/oracles/"
_ENTRY = re.compile(r"\w+(\.\w+)+:\w+")

Sources = dict[str, str]
Rule = Callable[[Sources], list[str]]

# What a room of each folder may import besides its own folder; arrows run downwards only. The longest of these prefixes
# names a room; an unknown folder or file of compiled_sampler has none, which is a complaint of its own. Folders that do
# not exist yet stand here, so that their first file finds its rule.
DATA = (
    "scalars",
    "request_formats",
    "params",
    "modes",
    "logit_edit",
    "edits.names",
    "edits.tables",
    "logprobs",
    "batch",
)
CORE = (*DATA, "core", "core.order", "core.arithmetic", "core.mass", "core.stage")
EDIT_STAGES = ("edits.masks", "edits.custom", "edits.recording")
"""What stands above the steps' inputs and outputs; a file that declares an edit stands below ``SamplingParams``."""
EDITS = ("edits", *EDIT_STAGES)
PASSES = (*CORE, "passes")
STAGES = (*PASSES, "exact", "exact.triton", "speculation")
PIPELINE = (*STAGES, *EDITS, "pipeline", "pipeline.schedule", "shard")
LOWERING = (*PIPELINE, "lowering")
PUBLIC = (*LOWERING, "engine", "public")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "scalars": (),
    "core.arithmetic": (),
    "core.mass": ("core.arithmetic",),
    "core.order": (),
    "core.stage": (),
    "edits": ("scalars", "core.order", "core.arithmetic", "core.mass", "core.stage"),
    "request_formats": ("edits",),
    "params": ("scalars", "edits", "request_formats"),
    "modes": ("scalars", "params"),
    "logit_edit": (),
    "edits.names": ("edits",),
    "edits.tables": ("logit_edit", "edits.names", "edits"),
    "logprobs": ("scalars",),
    "batch": (*DATA, "edits"),
    "core": ("modes", "batch", "core.order", "core.arithmetic", "core.mass"),
    **dict.fromkeys(EDIT_STAGES, (*CORE, *EDITS)),
    "passes": (*CORE, *EDITS),
    "exact.triton": CORE,
    "exact": (*PASSES, "exact.triton"),
    "speculation": (*PASSES, *EDITS),
    "pipeline.schedule": (*CORE, "edits", "passes", "exact.triton"),
    "shard": ("scalars", "core.stage"),
    "pipeline": (*STAGES, *EDITS, "pipeline.schedule", "shard"),
    "lowering.tuning": (*STAGES, *EDITS, "pipeline.schedule"),
    "lowering.layouts": (*DATA, "lowering.tuning"),
    "lowering.inductor": ("exact.triton", "lowering.tuning", "lowering.layouts"),
    "lowering": (*PIPELINE, "lowering.tuning", "lowering.layouts", "lowering.inductor"),
    "engine.boundary": (*DATA, "lowering.inductor", "shard"),
    "engine": (*LOWERING, "lowering.layouts", "lowering.inductor", "graph_cache", "engine.boundary"),
    "public": (*PUBLIC, "replay"),
    "functional": (*LOWERING, "engine", "engine.boundary"),
    "replay": LOWERING,
    "selfcheck": PUBLIC,
    "conformance": ("public", "selfcheck"),
    "integrations": (*PUBLIC, "functional", "engine.boundary", "graph_cache"),
    "graph_cache": (),
}
GUARDED = "compiled_sampler/lowering/inductor/"
"""The one folder that may name ``COMPILING``: it looks at the version of torch first."""
COMPILING = ("compile", "_inductor", "_dynamo", "_subclasses", "_higher_order_ops", "_functorch", "_C._dynamo")
"""What traces and compiles in torch; all but the first are private and change between its versions."""


def folder(module: str) -> str | None:
    """The entry of MAY_IMPORT that a dotted module belongs to; ``public`` is ``compiled_sampler/__init__.py``."""
    if module == "compiled_sampler":
        return "public"
    room = module.removeprefix("compiled_sampler.")
    return max((name for name in MAY_IMPORT if f"{room}.".startswith(f"{name}.")), key=len, default=None)


def module_name(path: str) -> str:
    """``a/b.py`` is ``a.b``, and ``a/__init__.py`` is ``a``."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_names(path: str, text: str) -> set[str]:
    """Absolute dotted names of all that a source imports, wherever in the file: ``from a import b`` is ``a.b``."""
    package = str(Path(path).parent).replace("/", ".")
    names: set[str] = set()
    for node in ast.walk(ast.parse(text, path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names |= {f"{source}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _ENTRY.fullmatch(node.value):
            names.add(node.value.partition(":")[0])  # what import_module gets
    return names


def nearest_module(name: str, modules: Iterable[str]) -> str | None:
    """The module of ours that an imported name is, or is taken from; None for foreign names."""
    return max((m for m in modules if f"{name}.".startswith(f"{m}.")), key=len, default=None)


def import_graph(sources: Sources) -> dict[str, set[str]]:
    """Each module of the packages with the modules of the packages that it imports."""
    ours = {module_name(path): (path, text) for path, text in sources.items() if path.split("/")[0] in PACKAGES}
    graph = {}
    for module, (path, text) in ours.items():
        targets = {nearest_module(name, ours) for name in imported_names(path, text)}
        graph[module] = {target for target in targets if target is not None}
    return graph


def arrows(sources: Sources) -> list[str]:
    """A module imports only its own folder and those that MAY_IMPORT names for it."""
    return [
        f"{module} ({folder(module)}) may not import {target} ({folder(target)})"
        for module, targets in import_graph(sources).items()
        for target in sorted(targets)
        if folder(module) is not None and folder(target) not in {folder(module), *MAY_IMPORT[str(folder(module))]}
    ]


def strangers(sources: Sources) -> list[str]:
    """Every module of the packages stands in a folder that MAY_IMPORT knows."""
    ours = (path for path in sources if path.split("/")[0] in PACKAGES)
    return [f"{path} is in no folder that MAY_IMPORT names" for path in ours if folder(module_name(path)) is None]


def cycles(sources: Sources) -> list[str]:
    """No module imports itself, through whatever other modules."""
    try:
        graphlib.TopologicalSorter(import_graph(sources)).prepare()
    except graphlib.CycleError as error:
        return [f"cycle of imports: {' <- '.join(error.args[1])}"]
    return []


def torch_names(path: str, text: str) -> set[str]:
    """Dotted names of torch in a source: imported, as attributes, or whole strings, as ``import_module`` takes them."""
    names, nodes = imported_names(path, text), list(ast.walk(ast.parse(text, path)))
    imports = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    spellings = {alias.asname for alias in imports if alias.name == "torch" and alias.asname}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            names.add(f"{'torch' if first in spellings else first}.{rest}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return {name for name in names if name.startswith("torch.")}


def internals(sources: Sources) -> list[str]:
    """Of the packages, only the folder GUARDED names what traces and compiles in torch, however it is spelled.

    Environment variables such as ``TORCHINDUCTOR_CACHE_DIR`` may be named elsewhere: torch documents them for users.
    """
    return [
        f"{path} names {name}, which belongs in {GUARDED}"
        for path, text in sources.items()
        if path.split("/")[0] in PACKAGES and not path.startswith(GUARDED)
        for name in sorted(torch_names(path, text))
        if f"{name}.".startswith(tuple(f"torch.{part}." for part in COMPILING))
    ]


def oracle_imports(sources: Sources) -> list[str]:
    """The oracles share no code with what they judge."""
    return [
        f"{path} imports {name}"
        for path, text in sources.items()
        if path.startswith(ORACLES)
        for name in sorted(imported_names(path, text))
        if name.split(".")[0] in FOLDERS and not name.startswith(ORACLES.replace("/", "."))
    ]


def replacing_stages(sources: Sources) -> list[str]:
    """No stage returns what ``_replace`` makes: torch 2.11 compiles such a function, and its result lacks fields."""
    return [
        f"{path} returns a tuple that _replace made, at line {node.lineno}"
        for path, text in sources.items()
        if path.split("/")[0] in PACKAGES and folder(module_name(path)) in (*STAGES, "functional")
        for node in ast.walk(ast.parse(text, path))
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call)
        if isinstance(node.value.func, ast.Attribute) and node.value.func.attr == "_replace"
    ]


def read_sources(root: Path) -> Sources:
    """Every Python source of the repository, by its path below ``root``."""
    paths = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")))
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}


CORE_FOLDER, AN_ENTRY = "compiled_sampler/core", "compiled_sampler.core.noise:Noise"
CONTROLS: list[tuple[Rule, Sources]] = [
    (arrows, {"compiled_sampler/core/noise.py": "def late():\n    from ..engine import sampler"}),
    (strangers, {"compiled_sampler/attic/noise.py": ""}),
    (cycles, {f"{CORE_FOLDER}/noise.py": "from . import draw", f"{CORE_FOLDER}/draw.py": "from . import noise"}),
    (cycles, {f"{CORE_FOLDER}/noise.py": "from . import draw", f"{CORE_FOLDER}/draw.py": f"NAMES = ['{AN_ENTRY}']"}),
    (internals, {"compiled_sampler/engine/sampler.py": "import torch as t\nf = t.compile(g, fullgraph=True)"}),
    (internals, {"compiled_sampler/lowering/comparison.py": "import torch as t\nt._dynamo.reset()"}),
    (internals, {"compiled_sampler/engine/sampler.py": "import_module('torch._inductor.compile_fx')"}),
    (oracle_imports, {"tests/oracles/oracle.py": "import graph_cache"}),
    (replacing_stages, {"compiled_sampler/passes/law.py": "def f(law):\n    return law._replace(total=1)"}),
]
"""A bad source for each rule, which it must find."""
RULES = [*dict.fromkeys(rule for rule, _ in CONTROLS)]


@pytest.mark.parametrize("rule", RULES)
def test_the_repository_keeps(rule: Rule) -> None:
    assert rule(read_sources(ROOT)) == []


@pytest.mark.parametrize(("rule", "sources"), CONTROLS)
def test_a_rule_complains_of_a_bad_source(rule: Rule, sources: Sources) -> None:
    inits = {"compiled_sampler/__init__.py": "", "compiled_sampler/engine/sampler.py": ""}
    assert rule(inits | sources)


LATE = ("torch._dynamo", "torch._inductor", "sympy", "triton")
"""Packages of compiling, of 1 to 3 seconds, which a program that compiles nothing needs not."""
IMPORTS_OURS = "import compiled_sampler"
DRAWS = """
from compiled_sampler import Sampler, SamplingParams
sampler = Sampler(1000, 2, backend="eager", history_len=8)
params = SamplingParams(top_k=40, top_p=0.9, seed=1, repetition_penalty=1.1)
plan = sampler.plan([sampler.add_request(params, [1, 2])])
sampler.sample(plan, torch.zeros(1, 1000), torch.tensor([2])).tolist()
"""


@functools.cache
def modules_after(*lines: str) -> set[str]:
    """Modules of ``LATE`` that a fresh process has imported after torch and such lines."""
    shows = "print(*(name for name in sys.modules))"
    code = "\n".join(("import sys", "import torch", "torch.zeros(1, 1000).tolist()", *lines, shows))
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return {name for name in ran.stdout.split() if f"{name}.".startswith(tuple(f"{each}." for each in LATE))}


def test_a_program_that_compiles_nothing_imports_no_compiler():
    """After the import of the package and after a first eager draw: no more than torch itself imports."""
    assert modules_after(IMPORTS_OURS, DRAWS) <= modules_after()


def test_an_import_of_a_compiler_would_be_seen():
    assert modules_after(IMPORTS_OURS, "import torch._dynamo") > modules_after()
