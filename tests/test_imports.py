"""Which module may import which, read from the sources; and what a fresh process imports."""

import functools
import subprocess
import sys

import pytest

from tests.house_rules import (
    ROOT,
    RULES,
    Rule,
    Sources,
    arrows,
    compilers,
    cycles,
    internals,
    nounless_files,
    oracle_imports,
    read_sources,
    replacing_stages,
    strangers,
)

CONTROLS: list[tuple[Rule, Sources]] = [
    (arrows, {"compiled_sampler/core/noise.py": "def late():\n    from ..engine import sampler"}),
    (strangers, {"compiled_sampler/attic/noise.py": ""}),
    (
        cycles,
        {
            "compiled_sampler/core/noise.py": "from . import draw",
            "compiled_sampler/core/draw.py": "from . import noise",
        },
    ),
    (
        cycles,
        {
            "compiled_sampler/core/noise.py": "from . import draw",
            "compiled_sampler/core/draw.py": "NAMES = {'noise': 'compiled_sampler.core.noise:Noise'}",
        },
    ),
    (compilers, {"compiled_sampler/engine/sampler.py": "import torch as t\nf = t.compile(g, fullgraph=True)"}),
    (internals, {"compiled_sampler/lowering/comparison.py": "import torch._inductor.config"}),
    (internals, {"compiled_sampler/lowering/comparison.py": "import torch as t\nt._dynamo.reset()"}),
    (internals, {"compiled_sampler/engine/sampler.py": "import_module('torch._inductor.compile_fx')"}),
    (internals, {"graph_cache/cache.py": "from torch._C._dynamo import guards"}),
    (oracle_imports, {"tests/oracles/oracle.py": "import graph_cache"}),
    (nounless_files, {"tests/graph_cache/helpers.py": ""}),
    (replacing_stages, {"compiled_sampler/passes/law.py": "def f(law):\n    return law._replace(total=1)"}),
]
"""A bad source for each rule, which it must find."""


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
