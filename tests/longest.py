"""Which files of tests run first."""

LONGEST = (
    "tests/compiled_sampler/exact/test_triton_threshold.py",
    "tests/compiled_sampler/pipeline/test_logprobs_compiled.py",
    "tests/test_determinism.py",
    "tests/tools/kernels/test_kernels.py",
    "tests/compiled_sampler/exact/test_triton_race.py",
    "tests/compiled_sampler/selfcheck/test_selfcheck.py",
    "tests/compiled_sampler/engine/test_sampler.py",
    "tests/compiled_sampler/engine/drafts/test_sampler_drafts.py",
    "tests/compiled_sampler/speculation/test_reference.py",
    "tests/compiled_sampler/passes/test_bounds.py",
    "tests/compiled_sampler/lowering/test_compiled_stages.py",
    "tests/compiled_sampler/exact/test_triton_compiles.py",
    "tests/compiled_sampler/lowering/inductor/test_versions.py",
    "tests/compiled_sampler/speculation/test_strange_proposals.py",
    "tests/compiled_sampler/pipeline/test_top_p_base.py",
    "tests/compiled_sampler/speculation/test_impossible_drafts.py",
)
"""Files that take the longest, which run first: at the end no worker waits for another's.

Interpreted Triton and generated code are compiled no further, and stand beside the file that compiles most: what
several files need is on disk when the next one asks for it, instead of being compiled by two workers at once.
"""


def place_of(node_id: str) -> int:
    """The place of a test's file among those that run first, or behind all of them."""
    file = node_id.partition("::")[0]
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)
