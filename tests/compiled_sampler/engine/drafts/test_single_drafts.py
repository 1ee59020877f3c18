"""One draft a request, the width of ``Verification`` by default: requests with and without it share a batch."""

import pytest
import torch

from compiled_sampler import Sampler, SamplingParams, Verification
from tests.builders.sampler import SHARED_SLOTS, V, nothing_compiles, same, stages_stay_eager

N = 3
COUNTS = [[1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 0], [0, 0, 1]]


def held(backend: str, verifications: list[Verification]) -> Sampler:
    """Requests in the first slots."""
    made = Sampler(V, SHARED_SLOTS, backend=backend, verifications=verifications)
    for n in range(N):
        made.add_request(SamplingParams(seed=n + 1, top_k=7 if n % 2 else 0))
    return made


@pytest.mark.parametrize("kind", ["probabilities", "logits"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_ragged_batch_is_served_by_the_graph_backend_as_in_eager(rule, kind):
    eager, graph = held("eager", []), held("graph", [Verification(rule, drafts=kind)])
    generator = torch.Generator().manual_seed(0)
    for counts in COUNTS:
        logits = 2.0 * torch.randn(sum(counts) + N, V, generator=generator)
        given = torch.randn(sum(counts), V, generator=generator)
        more = {"draft_probs": given.softmax(-1)} if kind == "probabilities" else {"draft_logits": given}
        tokens = torch.randint(0, V, (N, 1), generator=generator)
        with stages_stay_eager():  # the graph manager is tested, not the kernels, which take a minute to compile
            made = [
                each.verify(each.plan(range(N), "full", counts), logits, tokens, torch.arange(N), rule, **more)
                for each in (eager, graph)
            ]
        assert same(*made)


def test_probabilities_are_prepared_whatever_modes_the_warm_up_names():
    sampler = held("compiled", [Verification("match")])
    with stages_stay_eager():
        sampler.warmup(modes=["greedy"])
    with nothing_compiles():
        probs, tokens = torch.rand(2 * N, V).softmax(-1), torch.zeros(N, 1, dtype=torch.int64)
        sampler.verify_from_probs(sampler.plan(range(N), num_drafts=[1] * N), probs, tokens, torch.arange(N))
