"""Drafts like one that was checked run without a check: the same tokens, and still every wrong argument is refused."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from compiled_sampler import Sampler, SamplingParams, Verification
from tests.builders.sampler import REQUESTS, replay_recordings, same

V, N, K = 300, 4, 3
PARAMS = [REQUESTS[mode] for mode in ("min_p", "top_k_top_p[64]", "no_filter", "full")]


def sampler_of(
    backend: str,
    cached: bool = False,
    requests: Sequence[SamplingParams] = PARAMS,
    modes: Sequence[str] | None = ("full",),
) -> Sampler:
    """Holds the requests; with the backend "graph" it replays recorded variants without a device."""
    ways = [Verification("rejection", K, "cache" if cached else "logits")]
    given = {"draft_cache_len": K if cached else 0, "history_len": 16}
    made = Sampler(V, 8, backend="eager", buckets=[2, 5], verifications=ways, **given)
    if backend == "graph":
        replay_recordings(made)
        made.warmup(modes=modes)
    for params in requests:
        made.add_request(params, [1, 2])
    return made


@pytest.fixture(params=[("eager", False), ("eager", True), ("graph", False), ("graph", True)], ids=str)
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return sampler_of(*request.param)


@pytest.mark.parametrize("backend", ["eager", "graph"])
def test_modes_and_edits_of_other_batches_are_told_apart(backend):
    """With the same tensors: requests that are greedy, that draw, that are biased, in turns."""
    given = {"temperature": 0.0}, {}, {"logit_bias": {7: 100.0}}
    requests = [SamplingParams(seed=seed, **each) for each in given for seed in range(2)]
    sampler, logits, where = sampler_of(backend, False, requests, None), torch.randn(2, V), torch.arange(2)
    for coupled in (False, True):
        for slots in ([0, 1], [2, 3], [4, 5], [2, 3], [0, 1], [4, 5]) * 2:
            found, fresh = (
                sampler.draft(sampler.plan(slots), logits, where, coupled).drawn,
                sampler_of("eager", False, requests),
            )
            assert found.token_ids.tolist() == fresh.draft(fresh.plan(slots), logits, where, coupled).token_ids.tolist()
            assert (slots != [4, 5]) or found.token_ids.tolist() == [7, 7]


@pytest.mark.parametrize("field", ["draft_counts", "cumulative_drafts"])
def test_plans_whose_counts_are_buffers_draft_too(sampler, field, monkeypatch):
    counts = torch.tensor([3, 2, 0, 1]) if field == "draft_counts" else torch.tensor([3, 5, 5, 6])
    logits, where = torch.randn(N, V), torch.arange(N)
    fresh = sampler_of("eager")
    wanted = [fresh.draft(fresh.plan([0, 1, 2, 3], "full"), logits, where, c).drawn for c in (True, False)]
    for repeat in range(3):
        planned = sampler.plan([0, 1, 2, 3], "full", num_drafts=[K, K - repeat, K, K])
        plan = replace(planned, **{field: counts})
        assert same(sampler.draft(plan, logits, where, True).drawn, wanted[0])
        assert same(sampler.draft(plan, logits, where, False).drawn, wanted[1])
        monkeypatch.setattr("compiled_sampler.engine.sampler.check_logits", lambda *_: 1 / 0)  # not asked again
