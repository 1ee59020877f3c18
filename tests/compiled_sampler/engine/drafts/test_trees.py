"""Trees of drafts under the rule ``match``: each output is the slow truth's, on every path, whatever a tree holds."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from compiled_sampler import EditRows, LogitEdit, Logprobs, Sampler, SamplingParams, Verification, VerifyOutputs
from compiled_sampler.batch import tensors_of
from compiled_sampler.core.noise import TARGET
from compiled_sampler.core.order import indices, is_visible
from compiled_sampler.core.reference import kept
from compiled_sampler.core.rows import RowSlots, gather_rows
from compiled_sampler.core.score import score_key
from compiled_sampler.pipeline import edits as edits_of_rows
from tests.builders.edits import EDITS, V, edited_sampler, hard_logits, random_request
from tests.builders.sampler import (
    REQUESTS,
    emptied,
    nothing_compiles,
    planned,
    recorded,
    same,
    sampler_with,
    stages_stay_eager,
)
from tests.builders.trees import KINDS, NODES, TreeBatch, cut, logprobs_at, tree_batch, walks
from tests.tiers import tiers

ROWS = 64  # of a sampler that draws every row alone
WAY = Verification("match", NODES, trees=True)


def check(made: VerifyOutputs, batch: TreeBatch) -> int:
    """How many drafts are accepted; every output is that of the walk."""
    for n, walk in enumerate(walks(batch)):
        length = len(walk.rows)
        if made.finished is not None:
            walk, is_end = cut(walk, batch)
            assert bool(made.finished[n]) == is_end
        emitted = [token for token in walk.token_ids if token >= 0]
        assert made.token_ids[n].tolist() == walk.token_ids + [-1] * (NODES + 1 - len(walk.token_ids))
        assert made.node_ids is not None
        assert made.node_ids[n].tolist() == walk.node_ids + [-1] * (NODES - len(walk.node_ids))
        assert made.num_emitted[n] == len(emitted)
        assert made.num_accepted[n] == min(length - 1, len(walk.token_ids))
        assert made.num_matching[n] == walk.num_matching
        assert made.status[n] == walk.status
        if made.logprobs is not None:
            assert batch.own.logprobs is not None
            for name in ("token", "rank", "top"):
                wanted = logprobs_at(batch.own.logprobs, walk.rows[: len(emitted)], name)
                assert torch.equal(getattr(made.logprobs, name)[n, : len(emitted)], wanted)
                assert (made.logprobs.token[n, len(emitted) :] == -torch.inf).all()
    return int(made.num_accepted.sum())


@pytest.mark.parametrize("edits", [(), EDITS], ids=["plain", "edits"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_output_is_that_of_a_walk_through_rows_drawn_alone(kind, edits):
    sampler = edited_sampler("eager", ROWS)
    accepted = sum(
        check(batch.verified(sampler), batch)
        for batch in (tree_batch(sampler, seed, kind=kind, edits=edits) for seed in range(4))
    )
    assert accepted > 10 or kind == "garbage"


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_logprobs_are_those_of_the_rows_of_the_path(backend):
    eager, sampler = (edited_sampler(each, ROWS) for each in ("eager", backend))
    batch = tree_batch(eager, 3, edits=("penalties", "bad_words", "stops"))
    for of in ("raw", "filtered"):
        logprobs = Logprobs(top=2, of=of, rank=True)
        batch.draw(eager, logprobs)
        check(batch.verified(sampler, logprobs=logprobs), batch)


def test_the_definition_has_every_bit_of_the_stages():
    eager, reference = (edited_sampler(each, ROWS) for each in ("eager", "reference"))
    for seed in range(6):
        batch = tree_batch(eager, seed, kind=KINDS[seed % len(KINDS)], edits=EDITS if seed % 2 else ())
        assert same(batch.verified(eager), batch.verified(reference))


def test_a_chain_with_parents_is_the_chain_also_beyond_the_history():
    """Tokens that the history has no room for are behind no row that it can still be told of."""
    drafts, length = torch.tensor([[0, 2, 1, 0, 1, 1, 1, 1]]), 6
    logits = torch.zeros(9, 16).scatter_(1, torch.tensor([0, 2, 1, 0, 1, 1, 1, 1, 5])[:, None], 99.0)
    made = []
    for parents in (None, torch.arange(8)[None] - 1):
        sampler = Sampler(16, 2, backend="eager", history_len=length)
        law = SamplingParams(temperature=0.0, frequency_penalty=1.0, repetition_penalty=1.5)
        plan = sampler.plan([sampler.add_request(law, [0, 2], [0, 1, 1, 2])], num_drafts=[8])
        out = sampler.verify(plan, logits.clone(), drafts, torch.tensor([6]), "match", parents=parents)
        made.append((out.token_ids.tolist(), out.num_accepted.tolist(), out.status.tolist()))
    assert made[0] == made[1]


def test_lists_on_the_host_and_flat_trees_are_the_padded_ones():
    sampler = edited_sampler("eager", ROWS)
    batch = tree_batch(sampler, 5)
    wanted, plan = batch.verified(sampler), batch.plan(sampler)
    assert same(batch.verified(sampler, parents=batch.parents), wanted)
    drafts, parents = (torch.tensor([each for row in rows for each in row]) for rows in (batch.drafts, batch.parents))
    widest = max(batch.counts)
    for tree in (parents, parents.to(torch.int32), batch.parents):
        made = sampler.verify(plan, batch.logits, drafts, batch.positions, parents=tree)
        assert torch.equal(made.token_ids, wanted.token_ids[:, : widest + 1])
        assert torch.equal(made.node_ids, wanted.node_ids[:, :widest])


@pytest.mark.parametrize("edits", [(), ("penalties", "stops")], ids=["plain", "edits"])
def test_narrow_trees_are_replayed_in_a_wide_variant_and_slots_are_used_again(edits):
    eager = edited_sampler("eager", ROWS)
    captured = [(*edits, "watermark")] if edits else ()
    graph = recorded(edited_sampler("eager", 8, verifications=[WAY], buckets=[2, 8], captured_edits=captured))
    for seed in range(3):
        batch = tree_batch(eager, seed, edits=edits)
        batch.masks = None
        plan, narrow, out = batch.plan(graph), max(batch.counts), None
        drafts, parents = (each[:, :narrow] for each in batch.padded())
        for _ in range(2):
            made = graph.verify(plan, batch.logits, drafts, batch.positions, parents=parents, out=out)
            out = emptied(made)
        wanted = batch.verified(eager)
        shape = {"token_ids": wanted.token_ids[:, : narrow + 1], "node_ids": wanted.node_ids[:, :narrow]}
        assert same(made, wanted._replace(**shape))
        for slot in plan.slots:
            graph.remove_request(slot)
    assert graph.statistics().replays > 0


def test_rows_without_requests_and_requests_without_drafts_emit_what_they_must():
    sampler, single = planned(SamplingParams(seed=1))
    logits, zeros, none = torch.randn(2, V), torch.zeros(2).long(), torch.empty(2, 0).long()
    plan = sampler.plan([0, -1], num_drafts=[0, 0])
    made = sampler.verify(plan, logits, none, zeros, parents=none)
    drawn = sampler.sample(single, logits[:1], zeros[:1])
    assert made.token_ids.tolist() == [drawn.token_ids.tolist(), [-1]]
    assert made.node_ids.shape == (2, 0)
    assert same(sampler.verify(plan, logits, none.flatten(), zeros, parents=[[], []]), made)


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


def test_a_watermark_alone_copies_no_text(monkeypatch):
    """It reads the last tokens of a row where they stand, in the history and in the drafts before it."""
    monkeypatch.setattr(edits_of_rows, "row_history", None)
    sampler = edited_sampler("eager", ROWS)
    batch = tree_batch(sampler, 3)
    for n, request in enumerate(batch.requests):
        request.given["watermark_tokens"] = 1 + n % 3
    for _ in range(4):
        batch.draw(sampler)
        own = iter(batch.own.token_ids.tolist())
        for tree, tokens in zip(batch.parents, batch.drafts, strict=True):
            rows = [next(own) for _ in range(len(tree) + 1)]
            tokens[:] = [rows[1 + parent] for parent in tree]
    batch.draw(sampler)
    assert check(batch.verified(sampler), batch)


HOST_FAULTS: list[tuple[Any, str]] = [
    ([[-1, 1, 0], [-1]], "the parent of draft 1 of request 0 must be an earlier draft or -1, got 1"),
    ([[1, -1, 0], [-1]], "the parent of draft 0 of request 0 must be an earlier draft or -1, got 1"),
    ([[-1, -2, 0], [-1]], "got -2; number drafts from the root on"),
    ([[-1, 0, 0, 0], [-1]], r"parents must have num_drafts=\(3, 1\) numbers for each request"),
    ([-1, 0, 0, -1], r"parents must have num_drafts=\(3, 1\) numbers for each request"),
    ([[-1, 0, 0]], r"parents must have num_drafts=\(3, 1\) numbers for each request"),
    ([[-1, 0.5, 0], [-1]], r"parents\[0\]\[1\] must be an int"),
    (torch.zeros(2, 2, dtype=torch.int64), r"parents must be \[2, >= 3\] as planned, got \[2, 2\]"),
    (torch.zeros(2, 4, dtype=torch.int64), r"parents must be \[2, 3\] like draft_token_ids, got \[2, 4\]"),
]


@pytest.mark.parametrize(("parents", "message"), HOST_FAULTS)
def test_bad_trees_on_the_host_are_named(parents, message):
    sampler, plan = planned(*[SamplingParams(seed=1)] * 2, num_drafts=[3, 1])
    call = plan, torch.randn(6, V), torch.zeros(2, 3).long(), torch.zeros(2).long()
    with pytest.raises((TypeError, ValueError), match=message):
        sampler.verify(*call, parents=parents)


@pytest.mark.parametrize(
    ("rule", "message"), [("block", "judges one chain"), ("rejection", "accepts such drafts as often")]
)
def test_rules_that_lose_the_law_of_a_tree_are_refused(rule, message):
    sampler, plan = planned(SamplingParams(seed=1), num_drafts=[1])
    call = plan, torch.randn(2, V), torch.zeros(1, 1).long(), torch.zeros(1).long(), rule
    with pytest.raises(ValueError, match=message):
        sampler.verify(*call, parents=[[-1]])
    with pytest.raises(ValueError, match=message):
        Verification(rule, 2, trees=True)


@pytest.mark.parametrize(
    ("mode", "edits"), tiers([("greedy", ())], [("full", ()), ("no_filter", ("penalties", "dry"))])
)
def test_compiled_stages_have_the_bits_of_eager_ones(mode, edits):
    eager, captured = edited_sampler("eager", ROWS), [(*edits, "watermark")] if edits else ()
    compiled = edited_sampler("compiled", 8, verifications=[WAY], buckets=[8], captured_edits=captured)
    compiled.warmup(modes=[mode])
    of_mode = (
        {} if mode == "full" else {"temperature": 0.9 * (mode != "greedy"), "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    )
    with nothing_compiles():
        for seed, kind in enumerate(KINDS):
            batch = tree_batch(eager, seed, kind=kind, edits=edits)
            batch.masks = None
            for request in batch.requests:
                request.given.update(of_mode)
            assert same(batch.verified(compiled), batch.verified(eager))


def test_a_warm_up_prepares_trees_and_nothing_is_compiled_for_them_later():
    compiled = edited_sampler(
        "compiled", 8, verifications=[WAY], buckets=[2, 8], captured_edits=[("penalties", "stops", "watermark")]
    )
    eager = edited_sampler("eager", ROWS)
    with stages_stay_eager():
        compiled.warmup(modes=["full"])
    with nothing_compiles():
        for seed in range(2):
            batch = tree_batch(eager, seed, edits=("penalties", "stops") if seed else ())
            batch.masks = None
            assert same(batch.verified(compiled), batch.verified(eager))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out._replace(node_ids=None), "out.node_ids must be a torch.Tensor in a verification of trees"),
        (lambda out: out._replace(node_ids=out.token_ids.clone()), r"out.node_ids must be \[1, 2\]"),
    ],
)
def test_wrong_outputs_are_named(change: Callable[[VerifyOutputs], VerifyOutputs], message):
    sampler, plan = planned(SamplingParams(seed=1), num_drafts=[2])
    call = plan, torch.randn(3, V), torch.zeros(1, 2).long(), torch.zeros(1).long()
    out = emptied(sampler.verify(*call, parents=[[-1, -1]]))
    assert sampler.verify(*call, parents=[[-1, -1]], out=out) is out
    assert len(tensors_of(out)) == 6
    with pytest.raises((TypeError, ValueError), match=message):
        sampler.verify(*call, parents=[[-1, -1]], out=change(out))
    with pytest.raises(ValueError, match=r"out.node_ids must be None"):
        sampler.verify(*call, out=out)


@pytest.mark.parametrize("edits", [(), ("penalties", "bad_words", "xtc")], ids=["plain", "edits"])
def test_siblings_are_the_best_of_the_race_in_order(edits):
    """The definition: the tokens that the filters keep, by their scores; the first is what a coupled draft draws."""
    source, width = random.Random(7), 5
    for name, params in REQUESTS.items():
        sampler = edited_sampler("eager", ROWS)
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


@dataclass(frozen=True)
class NoRepeats(LogitEdit):
    """Hides the last two tokens."""

    history_tokens: ClassVar[int] = 2

    def edit(self, x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
        assert rows.history is not None
        return torch.where((ids[..., None] == rows.history[:, None]).any(-1), float("-inf"), x)


@pytest.mark.parametrize("consume", [False, True, "restore"])
def test_edits_of_the_user_and_those_in_place_see_the_path_of_a_node(consume):
    eager = Sampler(V, 4, backend="eager", history_len=32, edits=[NoRepeats()])
    penalties = {"presence_penalty": 2.0, "repetition_penalty": 1.5} if consume else {}
    params = SamplingParams(temperature=0.0, extra_args={"NoRepeats": {}}, **penalties)
    slot = eager.add_request(params, [1, 2], [3])
    logits = torch.zeros(5, V)
    logits[:, 3:7] = torch.tensor([9.0, 8.0, 7.0, 1.0])
    drafts, parents = torch.tensor([[4, 5, 5, 3]]), [[-1, -1, 0, 2]]
    plan, kept = eager.plan([slot], num_drafts=[4]), logits.clone()
    made = eager.verify(plan, logits, drafts, torch.tensor([3]), parents=parents, consume_logits=consume)
    assert made.node_ids.tolist() == [[0, 2, 3, -1]] if not consume else made.node_ids[0, 0] == 0
    for place, token in enumerate(made.tolist()[0]):  # the same without drafts, token after token
        row = [0, *(node + 1 for node in made.node_ids[0].tolist() if node >= 0)][place]
        alone = eager.sample(eager.plan([slot]), kept[row : row + 1].clone(), torch.tensor([3 + place]))
        assert alone.token_ids.tolist() == [token]
    assert consume is True or torch.equal(logits, kept)
