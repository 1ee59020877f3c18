"""Drafts of trees: siblings in the order of the race, and streams and laws from the draft to the emitted token."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams, Verification
from compiled_sampler.core.noise import TARGET
from compiled_sampler.core.order import indices, is_visible
from compiled_sampler.core.reference import kept
from compiled_sampler.core.rows import RowSlots, gather_rows
from compiled_sampler.core.score import score_key
from tests.builders.edits import V, edited_sampler, hard_logits, random_request
from tests.builders.sampler import REQUESTS, planned, replay_recordings, sampler_with
from tests.builders.trees import NODES
from tests.tiers import tiers


@pytest.mark.parametrize("edits", [(), ("penalties", "bad_words", "xtc")], ids=["plain", "edits"])
def test_siblings_are_the_best_of_the_race_in_order(edits):
    """The definition: the tokens that the filters keep, by their scores; the first is what a coupled draft draws."""
    source, width = random.Random(7), 5
    for name, params in REQUESTS.items():
        sampler = edited_sampler("eager", 64)
        of_mode = {each: getattr(params, each) for each in ("temperature", "top_k", "top_p", "min_p")}
        of_mode |= {"top_k": params.top_k * (name != "greedy")}
        requests = [random_request(source, V, edits) for _ in range(6)]
        for request in requests:
            request.given.update(of_mode)
        slots = [each.added(sampler) for each in requests]
        logits, plan = hard_logits(source, len(slots)), sampler.plan(slots)
        positions = torch.tensor([each.position for each in requests])
        made = sampler.draft(plan, logits, positions, width=width)
        edited = sampler.edited_logits(plan, logits, positions)
        rows = gather_rows(RowSlots(sampler._requests.table, torch.tensor(slots), positions), stream=TARGET)
        keep = kept(edited, rows, base_is_row=False) | (is_visible(edited) & (rows.noise_mask == 0)[:, None])
        key = torch.where(keep, score_key(edited, indices(V, edited.device), rows).to(torch.int64), -(2**40))
        order = key.sort(dim=-1, descending=True, stable=True)
        wanted = torch.where(order.values > -(2**40), order.indices, -1)[:, :width]
        assert torch.equal(made.token_ids, wanted)
        drawn = sampler.draft(plan, logits, positions)
        assert torch.equal(made.token_ids[:, 0], drawn.token_ids)
        assert torch.equal(made.drawn.status, drawn.drawn.status)


def test_siblings_of_small_vocabularies_of_padding_and_of_no_request_are_none():
    sampler, _ = planned(SamplingParams(seed=1), vocab_size=3)
    made = sampler.draft(sampler.plan([0, -1]), torch.randn(2, 3), torch.zeros(2).long(), width=5)
    assert sorted(made.token_ids[0].tolist()) == [-1, -1, 0, 1, 2]
    assert made.token_ids[1].tolist() == [-1] * 5
    assert sampler.draft(sampler.plan([]), torch.randn(0, 3), torch.zeros(0).long(), width=2).token_ids.shape == (0, 2)


def test_wrong_siblings_are_named():
    sampler, plan = planned(SamplingParams(seed=1))
    call = plan, torch.randn(1, V), torch.zeros(1).long()
    with pytest.raises(ValueError, match=r"width must be in \[1, 64\], got 0"):
        sampler.draft(*call, width=0)
    with pytest.raises(ValueError, match=r"siblings must be an int in \[0, 4\], got 5"):
        Verification("match", 4, trees=True, siblings=5)
    with pytest.raises(ValueError, match="siblings must be 0 without trees=True, got 2"):
        Verification("match", 4, siblings=2)
    handle, chain = sampler.draft(*call, width=1), sampler.plan(plan.slots, num_drafts=[1])
    with pytest.raises(ValueError, match="got siblings; pass token_ids and parents instead"):
        sampler.verify(chain, torch.randn(2, V), [handle], torch.zeros(1).long())


DRAFTERS = "coupled", "likeliest", "independent", "garbage"


Texts = list[list[int]]


def drafted(drafter: str, source: random.Random, sampler: Sampler, texts: Texts, trees: Texts, row_of: Any) -> Texts:
    """The token of each node of each tree, by a drafter that knows the target's logits."""
    paths: list[dict[int, list[int]]] = [{-1: []} for _ in texts]  # of each request, the drafts up to a node
    for level in range(NODES):
        nodes = [(n, node) for n, tree in enumerate(trees) for node in range(len(tree)) if tree[node] in paths[n]]
        nodes = [(n, node) for n, node in nodes if node not in paths[n] and len(paths[n][trees[n][node]]) == level]
        if not nodes:
            break
        before = [paths[n][trees[n][node]] for n, node in nodes]
        logits = torch.stack([row_of(texts[n] + path) for (n, _), path in zip(nodes, before, strict=True)])
        places = torch.tensor([len(texts[n]) + level for n, _ in nodes])
        best = logits.topk(NODES).indices
        if drafter == "coupled":
            best = sampler.draft(sampler.plan([n for n, _ in nodes]), logits, places, width=NODES).token_ids
        for (n, node), path, tokens in zip(nodes, before, best.tolist(), strict=True):
            sibling = trees[n][:node].count(trees[n][node])
            choices = {"independent": tokens[:3], "garbage": [*range(-1, V + 1)]}
            token = source.choice(choices[drafter]) if drafter in choices else tokens[sibling]
            paths[n][node] = [*path, token]
    return [[found[node][-1] for node in range(len(tree))] for found, tree in zip(paths, trees, strict=True)]


def streams(drafter: str | None, seed: int, count: int, length: int) -> tuple[Texts, int]:
    """The tokens of requests, alone or with trees, and how many drafts were accepted; slots are used again."""
    source, sampler = random.Random(seed), Sampler(V, count, backend="eager", history_len=4 * length)
    table = 3.0 * torch.randn(97, V, generator=torch.Generator().manual_seed(seed))

    def row_of(text: list[int]) -> Tensor:
        return table[hash(tuple(text[-3:])) % len(table)]

    params = [
        SamplingParams(seed=seed * count + n, temperature=0.9, top_k=5 * (n % 3), frequency_penalty=0.5 * (n % 2))
        for n in range(count)
    ]
    slots = [sampler.add_request(each, [n % V]) for n, each in enumerate(params)]
    plain = [replace(each, frequency_penalty=0.0) for each in params]
    drafting = sampler_with(plain, V, count)  # of several nodes at once, which penalties do not allow
    texts, accepted = [[n % V] for n in range(count)], 0
    while min(map(len, texts)) <= length:
        counts = [0 if drafter is None else source.randrange(NODES + 1) for _ in texts]
        trees = [[source.randrange(-1, node) for node in range(nodes)] for nodes in counts]
        drafts = trees if drafter is None else drafted(drafter, source, drafting, texts, trees, row_of)
        rows = list[Tensor]()
        for text, tree, tokens in zip(texts, trees, drafts, strict=True):
            path: dict[int, list[int]] = {-1: text}
            for node, (parent, token) in enumerate(zip(tree, tokens, strict=True)):
                path[node] = [*path[parent], token]
            rows += map(row_of, path.values())
        plan = sampler.plan(slots, num_drafts=counts)
        positions = torch.tensor([len(text) for text in texts])
        padded = torch.tensor([tokens + [-1] * (NODES - len(tokens)) for tokens in drafts])
        made = sampler.verify(plan, torch.stack(rows), padded, positions, parents=trees)
        accepted += int(made.num_accepted.sum())
        for text, tokens in zip(texts, made.tolist(), strict=True):
            text += tokens
    return [text[: length + 1] for text in texts], accepted


@pytest.mark.parametrize(("count", "rounds"), tiers([(24, 1)], [(400, 50)]))
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_streams_with_trees_are_those_without(drafter, count, rounds):
    for seed in range(rounds):
        (alone, _), (texts, accepted) = (streams(each, seed, count, 12) for each in (None, drafter))
        assert texts == alone
        assert accepted > count or drafter == "garbage"


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
