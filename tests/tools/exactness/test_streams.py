"""The tool that compares verified streams: it finds nothing where nothing is wrong, and what is wrong where it is."""

import pytest
import torch

from compiled_sampler import Sampler
from compiled_sampler.batch import tensors_of
from tools.exactness import streams
from tools.exactness.drafted_batches import job, stream
from tools.exactness.hard_rows import mixed_requests
from tools.exactness.streams import STREAM, compare, num_mismatches
from tools.exactness.verification_paths import BATCH, NUM_REQUESTS, RULES, WIDTH, Path, V, direct

REQUESTS = mixed_requests(V, NUM_REQUESTS, seed=V)


def eager_alone(requests: object, rules: object) -> dict[str, Path]:
    return {"eager CPU, mode full": direct(holding(), "full")}


def holding() -> Sampler:
    """Eager on the CPU."""
    sampler = Sampler(V, len(REQUESTS), backend="eager")
    for request in REQUESTS:
        sampler.add_request(request)
    return sampler


def test_streams_are_those_of_the_plain_sampler_in_every_mode(monkeypatch):
    monkeypatch.setattr(streams, "paths_of", eager_alone)
    counts = list(compare(10 * BATCH, control=False))
    assert sum(wrong for *_, wrong in counts) == 0
    assert {rule for rule, *_ in counts} == {each.rule for each in RULES}
    assert sum(count for _, path, count, _ in counts if path == STREAM) == 10 * BATCH


def test_other_drafts_are_noticed_on_every_path(monkeypatch):
    monkeypatch.setattr(streams, "paths_of", eager_alone)
    wrong: dict[tuple[str, str], int] = {}
    for rule, path, _, count in compare(10 * BATCH, control=True):
        wrong[rule, path] = wrong.get((rule, path), 0) + count
    assert len(wrong) == 2 + len(RULES) - 1
    assert min(wrong.values()) > BATCH // 4


@pytest.mark.parametrize("mode", ["greedy", "full"])
def test_drafts_of_every_drafter_are_mixed_in(mode):
    sampler = holding()
    work = job(sampler, REQUESTS, next(each for each in sampler.modes if each.name == mode), seed=3)
    out = stream(sampler, work)
    assert len(set(work.num_drafts.tolist())) == WIDTH + 1
    assert work.logits.shape == (int((work.num_drafts + 1).sum()), V)
    assert work.proposals.shape == (int(work.num_drafts.sum()), V)
    share = (out.num_accepted == work.num_drafts)[work.num_drafts > 3].float().mean()
    assert 0.2 < share < 0.9  # the perfect drafter, a quarter of the requests, and not all of them
    assert (work.drafts >= V).any()


def test_every_field_counts(monkeypatch):
    sampler = holding()
    out = stream(sampler, job(sampler, REQUESTS, sampler.modes[1], seed=0))
    for name in out._fields[: len(tensors_of(out))]:
        changed = getattr(out, name).clone()
        changed.view(BATCH, -1)[7, 0] += 1
        assert num_mismatches(out, out._replace(**{name: changed})) == 1
    assert num_mismatches(out, out._replace(status=torch.ones_like(out.status))) == BATCH
