"""Trees under the rule ``rejection``: the definition's bits on every path, and the target's law from draft to token."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler import RowStatus, Sampler, SamplingParams, Verification, VerifyOutputs
from compiled_sampler import functional as F
from tests.builders.edits import EDITS, V, edited_sampler, hard_logits, random_mask, random_request
from tests.builders.sampler import nothing_compiles, planned, recorded, replay_recordings, same
from tests.builders.trees import KINDS, NODES, TreeBatch, random_parents
from tests.tiers import tiers

WAY = Verification("rejection", NODES, drafts="logits", trees=True)
LAW_EDITS = tuple(each for each in EDITS if each != "watermark")


@dataclass
class Batch(TreeBatch):
    """With logits of the drafter, ``[D, V]``."""

    draft_logits: Tensor


def batch_of(seed: int, kind: str = "", edits: Any = (), of_mode: dict[str, Any] | None = None) -> Batch:
    """A random batch; some drafts are no tokens, some come twice, and garbage trees have any parents."""
    source = random.Random(f"{seed} {kind} {edits}")
    requests = [random_request(source, V, edits) for _ in range(6)]
    for request in requests:
        request.given.pop("watermark_tokens", None)
        request.given.update(of_mode or {})
    parents = [random_parents(source, source.randrange(1, NODES + 1), kind or source.choice(KINDS)) for _ in requests]
    count = sum(map(len, parents))
    logits = hard_logits(source, count + len(requests))
    noise = torch.randn(count, V, generator=torch.Generator().manual_seed(seed))
    rows, draft_logits, start = list[int](), list[Tensor](), 0
    for tree in parents:  # siblings are of one law, close to the target's at their parent
        rows += [start + 1 + parent if -1 <= parent < node else start for node, parent in enumerate(tree)]
        start += len(tree) + 1
    draft_logits = [logits[row] + noise[rows.index(row)] for row in rows]
    drafts = []
    for each in draft_logits:
        likely = each.nan_to_num().topk(3).indices.tolist()
        drafts.append(source.choice(likely) if source.random() < 0.8 else source.randrange(-1, V + 1))
    flat = iter(drafts)
    of_trees = [[next(flat) for _ in tree] for tree in parents]
    masks = random_mask(source, count + len(requests), V) if edits and seed % 2 else None
    return Batch(requests, parents, of_trees, logits, masks, torch.stack(draft_logits))


def verified(sampler: Sampler, batch: Batch, **options: Any) -> VerifyOutputs:
    return batch.verified(sampler, rule="rejection", draft_logits=batch.draft_logits, **options)


@pytest.mark.parametrize("edits", [(), LAW_EDITS], ids=["plain", "edits"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_definition_has_every_bit_of_the_stages(kind, edits):
    eager, reference = (edited_sampler(each, 64) for each in ("eager", "reference"))
    accepted = 0
    for seed in range(4):
        batch = batch_of(seed, kind, edits)
        made = verified(eager, batch)
        assert same(made, verified(reference, batch))
        accepted += int(made.num_accepted.sum())
    assert accepted or kind == "garbage"


@pytest.mark.parametrize("edits", [(), LAW_EDITS], ids=["plain", "edits"])
def test_a_chain_with_parents_is_the_chain(edits):
    sampler = edited_sampler("eager", 64)
    for seed in range(4):
        batch = batch_of(seed, "chain", edits)
        made = verified(sampler, batch)
        assert same(made._replace(node_ids=None), verified(sampler, batch, parents=None))


@pytest.mark.parametrize("params", [{}, {"min_p": 0.05}, {"top_k": 5, "top_p": 0.9}])
def test_batchmates_that_need_a_wider_mode_change_nothing(params):
    """Rows with and without candidates have the same bits, and greedy requests beside others too."""
    sampler = edited_sampler("eager", 64)
    of_mode = {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    for seed in range(3):
        batch = batch_of(seed, "", (), of_mode)
        batch.requests[0].given.update(temperature=0.0)
        alone = verified(sampler, batch)
        batch.requests[-1].given.update(top_k=100, top_p=0.7, min_p=0.01)
        among = verified(sampler, batch)
        for one, other in zip(alone, among, strict=True):
            assert (one is None and other is None) or torch.equal(one[:-1], other[:-1])


def test_narrow_trees_are_replayed_in_a_wide_variant_and_slots_are_used_again():
    eager, graph = edited_sampler("eager", 64), recorded(edited_sampler("eager", 8, verifications=[WAY], buckets=[8]))
    for seed in range(3):
        batch = batch_of(seed, "", (), {"temperature": 0.9, "top_k": 5, "top_p": 0.9})
        assert same(verified(graph, batch), verified(eager, batch))
    assert graph.statistics().replays > 0


@pytest.mark.parametrize("mode", tiers(["top_k_top_p[64]"], ["full", "no_filter"]))
def test_compiled_stages_have_the_bits_of_eager_ones(mode):
    eager = edited_sampler("eager", 64)
    compiled = edited_sampler("compiled", 8, verifications=[WAY], buckets=[8])
    compiled.warmup(modes=[mode])
    laws = {"no_filter": {"top_k": 0, "top_p": 1.0, "min_p": 0.0}, "top_k_top_p[64]": {"top_k": 9, "top_p": 0.9}}
    of_mode = {"temperature": 0.9, **laws[mode]} if mode in laws else {}
    with nothing_compiles():
        for seed, kind in enumerate(KINDS):
            batch = batch_of(seed, kind, (), of_mode)
            assert same(verified(compiled, batch), verified(eager, batch))
    lowering = compiled.statistics().lowering
    assert lowering is not None
    assert not lowering.eager_stages


def test_a_sibling_that_comes_again_is_told_and_passed_over():
    sampler, plan = planned(SamplingParams(seed=1), num_drafts=[3])
    logits, draft_logits = torch.zeros(4, V), torch.zeros(3, V)
    logits[0, 5] = 99.0
    call = plan, logits, torch.tensor([[3, 3, 5]]), torch.zeros(1).long(), "rejection"
    made = sampler.verify(*call, parents=[[-1, -1, -1]], draft_logits=draft_logits)
    assert made.status.tolist() == [RowStatus.DRAFT_IMPOSSIBLE]
    assert made.node_ids is not None
    assert made.node_ids.tolist() == [[2, -1, -1]]


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_greedy_request_accepts_no_wrong_draft_however_often_it_comes(count, backend):
    params = [SamplingParams(temperature=temperature, seed=1) for temperature in (0.0, 1.0)]
    sampler, plan = planned(*params, num_drafts=[count] * 2, vocab_size=8, backend=backend)
    logits, draft_logits = torch.zeros(2 * (count + 1), 8), torch.zeros(2 * count, 8)
    logits[:, 0], draft_logits[:, 3] = 9.0, 9.0
    given = {"parents": [[-1] * count] * 2, "draft_logits": draft_logits}
    made = sampler.verify(plan, logits, torch.full((2, count), 3), torch.zeros(2).long(), "rejection", **given)
    assert made.tolist()[0] == [0]


def test_requests_that_emit_nothing_have_no_path():
    logits, temperature = torch.zeros(4, V).index_fill(1, torch.tensor([3]), 99.0), torch.tensor([1.0, -1.0]).double()
    made = F.verify(
        logits, torch.tensor([[3], [3]]), temperature=temperature, seeds=torch.arange(2), positions=2,
        rule="rejection", parents=torch.tensor([[-1], [-1]]), draft_logits=logits[:2], mode="full",
        backend="eager",
    )  # fmt: skip
    assert made.status.tolist() == [0, RowStatus.PARAMETER_OUT_OF_RANGE]
    assert made.node_ids is not None
    assert made.node_ids.tolist() == [[0], [-1]]


@pytest.mark.parametrize(("count", "rounds"), tiers([(4000, 1)], [(4000, 10)]))
def test_tokens_of_drawn_trees_have_the_law_of_the_target(count, rounds):
    """Pearson's test of pairs of tokens against the target's law: a false alarm in a million; without it a control."""
    size, width = 5, 2
    table = 1.5 * torch.randn(2, 1 + size, size, generator=torch.Generator().manual_seed(3))  # by the token before
    target, drafter = table
    pairs, wrong = torch.zeros(size, size), torch.zeros(size, size)
    for number in range(rounds):
        params, slots = [SamplingParams(seed=number * count + n) for n in range(count)], range(count)
        sampler, plan = planned(*params, vocab_size=size, slots=count)
        zero = torch.zeros(count, dtype=torch.int64)
        first = sampler.draft(plan, drafter[:1].expand(count, size).contiguous(), zero, False, width=width).token_ids
        below = [
            sampler.draft(plan, drafter[1 + first[:, each]], zero + 1, False, 1, width=width).token_ids
            for each in range(width)
        ]
        drafts = torch.cat([first, *below], 1)
        parents = [[-1, -1, 0, 0, 1, 1]] * count
        before = torch.cat([zero[:, None], 1 + drafts], 1)
        of_parent = before.gather(1, torch.tensor(parents) + 1)
        of_parent[:, :2] = 0
        plan = sampler.plan(slots, num_drafts=[drafts.shape[1]] * count)
        for counts, given in ((pairs, drafts), (wrong, drafts.flip(1)[:, [5, 4, 3, 2, 1, 0]].clone())):
            if counts is wrong:
                given[:, 0] = drafts[:, 1]  # siblings out of their order
                given[:, 1] = drafts[:, 0]
            made = sampler.verify(
                plan, target[before.flatten()], given, zero, "rejection",
                parents=parents, draft_logits=drafter[of_parent.flatten()],
            )  # fmt: skip
            tokens = made.token_ids[:, :2]
            short = tokens[:, 1] < 0  # the second is drawn in the next step
            again = sampler.sample(sampler.plan(slots), target[1 + tokens[:, 0]], zero + 1).token_ids
            seconds = torch.where(short, again, tokens[:, 1])
            counts.index_put_((tokens[:, 0], seconds), torch.ones(count), accumulate=True)
    p = target[0].double().softmax(-1)[:, None] * target[1:].double().softmax(-1)
    wanted = p * count * rounds
    limits = [float((((each - wanted) ** 2) / wanted).sum()) for each in (pairs, wrong)]
    assert limits[0] < 73.0 < limits[1]  # chi-square of 24 degrees of freedom is beyond it once in 700,000


def test_handles_of_trees_are_refused():
    (sampler, plan), logits = planned(SamplingParams(seed=1), num_drafts=[2]), torch.randn(1, V)
    handles = [sampler.draft(plan, logits, torch.tensor([3]), False, offset) for offset in range(2)]
    call = plan, torch.randn(3, V), handles, torch.tensor([3])
    with pytest.raises(ValueError, match="siblings are drawn without replacement"):
        sampler.verify(*call, "rejection", parents=[[-1, -1]])
    assert sampler.verify(*call, "match", parents=[[-1, -1]]).num_emitted.item() >= 1


LAWS = {"no_filter": {"temperature": 0.9}, "top_k_top_p[64]": {"top_k": 50, "top_p": 0.9}, "full": {"top_p": 0.8}}


@pytest.mark.parametrize("mode", LAWS)
def test_captured_trees_of_both_rules_and_their_drafts_are_those_of_eager_torch(mode, device):
    """On the CPU they are replayed from recordings."""
    replayed, eager = captured_sampler(device, "graph"), captured_sampler(torch.device("cpu"), "eager")
    replayed.warmup(modes=[mode])
    for seed in range(4):
        for rule in ("match", "rejection"):
            assert of_captured_trees(replayed, rule, seed, mode) == of_captured_trees(eager, rule, seed, mode)
    found = replayed.statistics()
    assert (found.replays, found.direct_runs) == (32, 0)
    assert found.lowering is None or not found.lowering.eager_stages


def captured_sampler(device: torch.device, backend: str) -> Sampler:
    ways = [Verification("match", 6, trees=True, siblings=2), Verification("rejection", 6, "logits", True, siblings=2)]
    is_recorded = backend == "graph" and device.type == "cpu"
    made = Sampler(1009, 4, device, backend="eager" if is_recorded else backend, verifications=ways, buckets=[4])
    if is_recorded:
        replay_recordings(made)
    return made


def of_captured_trees(sampler: Sampler, rule: str, seed: int, mode: str) -> Any:
    """Drafts of two levels, two of each node, and what comes of them."""
    count, size, device = sampler.max_num_requests, sampler.vocab_size, sampler.device
    source, is_coupled = torch.Generator().manual_seed(seed), rule == "match"
    target = (3.0 * torch.randn(count, 7, size, generator=source)).to(device)
    inner = (target[:, :3] + 0.5 * torch.randn(count, 3, size, generator=source).to(device)).contiguous()
    params = [SamplingParams(seed=seed * count + n, **LAWS[mode]) for n in range(count)]
    slots, positions = [sampler.add_request(each) for each in params], torch.arange(count, device=device)
    plan, levels = sampler.plan(slots, mode), list[Tensor]()
    for node in range(3):  # the root, and its two children
        depth = int(node > 0)
        drawn = sampler.draft(plan, inner[:, node].contiguous(), positions + depth, is_coupled, depth, width=2)
        levels.append(drawn.token_ids)
    drafts = torch.cat(levels, 1)
    proposals = None if is_coupled else inner.repeat_interleave(2, 1).flatten(0, 1)
    parents = torch.tensor([-1, -1, 0, 0, 1, 1], device=device).repeat(count, 1)
    drafted = sampler.plan(slots, mode, num_drafts=[6] * count)
    call = drafted, target.flatten(0, 1), drafts, positions, rule
    made = sampler.verify(*call, draft_logits=proposals, parents=parents)
    for slot in slots:
        sampler.remove_request(slot)
    assert made.node_ids is not None
    return drafts.tolist(), made.tolist(), made.node_ids.tolist(), made.status.tolist()
