"""Which module may import which, and the shape of the files, read from the sources with ``ast``.

A rule is a function from sources (``{path: text}``) to complaints. Each one is run on the repository, where it finds
nothing, and on a small bad source, where it complains. What is imported when a program runs is seen in a fresh process.
"""

import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house_rules import (
    FOLDERS,
    GUARDED,
    MAX_LINES,
    MAX_MODULES,
    ROOT,
    RULES,
    Rule,
    Sources,
    arrows,
    compilers,
    crowded_folders,
    cycles,
    internals,
    long_files,
    nounless_files,
    oracle_imports,
    read_sources,
    replacing_stages,
    strangers,
)

# Empty modules for the sources below to import.
HOUSE: Sources = {
    f"compiled_sampler/{name}.py": ""
    for name in (
        "__init__",
        "params",
        "batch",
        "engine/boundary/tensors",
        "core/noise",
        "core/arithmetic/mass",
        "passes/narrowing",
        "passes/laws/law",
        "passes/draws/bounds",
        "exact/threshold",
        "exact/triton/race",
        "speculation/acceptance",
        "pipeline/sample",
        "pipeline/scheduling/schedule",
        "pipeline/verification/verify",
        "lowering/status",
        "lowering/stages/layouts",
        "lowering/inductor/caches",
        "engine/sampler",
        "integrations/engine",
    )
} | {f"graph_cache/{name}.py": "" for name in ("__init__", "cache", "batches/routing", "memory/buffers")}

FLOORS = (
    "params",
    "batch",
    "engine/boundary/tensors",
    "core/noise",
    "passes/narrowing",
    "exact/threshold",
    "pipeline/sample",
    "lowering/status",
    "engine/sampler",
    "__init__",
)
"""Rooms of HOUSE from the ground up: none may import one above it."""

ROOMS = (
    ("compiled_sampler/core/arithmetic/mass", "compiled_sampler/core/noise"),
    ("compiled_sampler/passes/narrowing", "compiled_sampler/passes/laws/law"),
    ("compiled_sampler/passes/laws/law", "compiled_sampler/passes/draws/bounds"),
    ("compiled_sampler/pipeline/scheduling/schedule", "compiled_sampler/pipeline/sample"),
    ("compiled_sampler/pipeline/sample", "compiled_sampler/pipeline/verification/verify"),
    ("compiled_sampler/lowering/stages/layouts", "compiled_sampler/lowering/inductor/caches"),
    ("compiled_sampler/lowering/inductor/caches", "compiled_sampler/lowering/status"),
    ("graph_cache/batches/routing", "graph_cache/memory/buffers"),
    ("graph_cache/memory/buffers", "graph_cache/cache"),
)
"""Rooms of one folder, each with one above it, which it may not import."""


def forbidden_arrows() -> Iterator[tuple[str, str]]:
    """Sources of modules, each with one import that the house forbids."""
    for floor, lower in enumerate(FLOORS):
        for upper in FLOORS[floor + 1 :]:
            source = f"compiled_sampler.{upper.replace('/', '.')}".removesuffix(".__init__")
            yield f"compiled_sampler/{lower}.py", f"from {source} import anything"
    for module in ("params", "core/noise", "pipeline/sample", "lowering/status", "__init__", "integrations/engine"):
        yield f"compiled_sampler/{module}.py", "from graph_cache import GraphCache"
    yield "graph_cache/cache.py", "from compiled_sampler.params import Params"
    yield "graph_cache/cache.py", "import compiled_sampler"
    yield "compiled_sampler/exact/threshold.py", "from compiled_sampler.speculation.acceptance import settle"
    yield "compiled_sampler/speculation/acceptance.py", "from compiled_sampler.exact.threshold import search"
    yield "compiled_sampler/exact/triton/race.py", "from compiled_sampler.passes.narrowing import race"
    yield "compiled_sampler/core/noise.py", "from ..engine import sampler"
    yield "compiled_sampler/core/noise.py", "import compiled_sampler.engine.sampler as s"
    yield "compiled_sampler/core/noise.py", "def late():\n    from compiled_sampler.passes import race"
    yield "compiled_sampler/passes/deep/noise.py", "from ...engine.sampler import State"
    for lower, upper in ROOMS:
        yield f"{lower}.py", f"from {upper.replace('/', '.')} import anything"


BAD: list[tuple[Rule, Sources]] = [
    *((arrows, {path: text}) for path, text in forbidden_arrows()),
    (strangers, {"compiled_sampler/attic/noise.py": ""}),
    (strangers, {"compiled_sampler/noise.py": ""}),
    (
        cycles,
        {
            "compiled_sampler/core/noise.py": "from . import draw",
            "compiled_sampler/core/draw.py": "from . import noise",
        },
    ),
    (cycles, {"graph_cache/__init__.py": "from .cache import C", "graph_cache/cache.py": "from graph_cache import C"}),
    (cycles, {"graph_cache/cache.py": "import graph_cache.cache"}),
    (compilers, {"compiled_sampler/passes/narrowing.py": "import torch\n@torch.compile\ndef draw(): ..."}),
    (compilers, {"compiled_sampler/engine/sampler.py": "import torch as t\nf = t.compile(g, fullgraph=True)"}),
    (compilers, {"compiled_sampler/passes/narrowing.py": "import torch._inductor\nf = torch.compile(g)"}),
    (compilers, {"graph_cache/capture.py": "from torch import compile as c"}),
    (internals, {"compiled_sampler/engine/sampler.py": "import torch._inductor.config"}),
    (internals, {"compiled_sampler/passes/narrowing.py": "from torch._dynamo import mark_dynamic"}),
    (internals, {"compiled_sampler/lowering/status.py": "import torch._inductor.config"}),
    (oracle_imports, {"tests/oracles/oracle.py": "from compiled_sampler.core.noise import gumbel"}),
    (oracle_imports, {"tests/oracles/oracle.py": "import graph_cache"}),
    (oracle_imports, {"tests/oracles/oracle.py": "from .. import hard_rows"}),
    (long_files, {"tools/bench.py": "x = 1\n" * (MAX_LINES + 1)}),
    (crowded_folders, {f"tools/noise/bits_{n}.py": "" for n in range(MAX_MODULES + 1)}),
    (replacing_stages, {"compiled_sampler/passes/laws/law.py": "def f(law):\n    return law._replace(total=1)"}),
    (nounless_files, {"compiled_sampler/utils.py": ""}),
    (nounless_files, {"tests/graph_cache/helpers.py": ""}),
    (nounless_files, {"graph_cache/common/key.py": ""}),
    (nounless_files, {"tools/misc.py": ""}),
    (nounless_files, {"compiled_sampler/filters_v2.py": ""}),
]

GOOD: list[tuple[Rule, Sources]] = [
    (
        arrows,
        {"compiled_sampler/engine/sampler.py": "from graph_cache import GraphCache\nfrom ..lowering import status"},
    ),
    (arrows, {"compiled_sampler/lowering/status.py": "from ..pipeline import sample\nfrom ..core import noise"}),
    (arrows, {"compiled_sampler/exact/threshold.py": "from compiled_sampler.exact.triton import race"}),
    (arrows, {"compiled_sampler/__init__.py": "from compiled_sampler.engine.sampler import Sampler"}),
    (arrows, {"compiled_sampler/integrations/engine.py": "from compiled_sampler import Sampler"}),
    (strangers, {"compiled_sampler/edits.py": "", "compiled_sampler/edits/penalties.py": "", "tools/attic/x.py": ""}),
    (
        cycles,
        {
            "compiled_sampler/passes/narrowing.py": "from ..core import noise",
            "compiled_sampler/core/noise.py": "import torch",
        },
    ),
    (compilers, {"compiled_sampler/lowering/status.py": "import torch\nf = torch.compile(g)"}),
    (
        compilers,
        {"compiled_sampler/core/mass.py": '"""torch.compile"""\nimport re, torch\np = re.compile("torch.compile")'},
    ),
    (
        internals,
        {f"{GUARDED}patches.py": "import torch._inductor.config", "tools/x.py": "import torch._dynamo"},
    ),
    (oracle_imports, {"tests/oracles/oracle.py": "import math\nfrom fractions import Fraction"}),
    (oracle_imports, {"tests/oracles/oracle_edits.py": "from tests.oracles import oracle"}),
    (long_files, {"tools/bench.py": "x = 1\n" * MAX_LINES}),
    (crowded_folders, {f"tools/noise/{n}.py": "" for n in ("__init__", *range(MAX_MODULES))}),
    (nounless_files, {"compiled_sampler/common_prefix.py": ""}),
    (
        replacing_stages,
        {"compiled_sampler/passes/law.py": "def f(law):\n    law = law._replace(total=1)\n    return law.total"},
    ),
    (replacing_stages, {"compiled_sampler/pipeline/verify.py": "def f(law):\n    return law._replace(total=1)"}),
]


@pytest.mark.parametrize("rule", RULES)
def test_the_repository_keeps(rule: Rule) -> None:
    assert rule(read_sources(ROOT)) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_is_read(folder: str) -> None:
    assert any(path.startswith(f"{folder}/") for path in read_sources(ROOT))


def test_sources_are_read_at_any_depth(tmp_path: Path) -> None:
    nested = tmp_path / "compiled_sampler" / "integrations" / "engine.py"
    nested.parent.mkdir(parents=True)
    nested.write_text("import graph_cache", encoding="utf-8")
    assert read_sources(tmp_path) == {"compiled_sampler/integrations/engine.py": "import graph_cache"}


@pytest.mark.parametrize(("rule", "sources"), BAD)
def test_a_rule_complains_once_of_a_bad_source(rule: Rule, sources: Sources) -> None:
    assert len(rule(HOUSE | sources)) == 1


@pytest.mark.parametrize(("rule", "sources"), GOOD)
def test_a_rule_accepts_a_good_source(rule: Rule, sources: Sources) -> None:
    assert rule(HOUSE | sources) == []


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
