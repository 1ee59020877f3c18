"""Trees of drafts: each output is the slow truth's, on every path, whatever a tree holds, and its law the target's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from compiled_sampler import (
    EditRows,
    LogitEdit,
    Logprobs,
    RowStatus,
    Sampler,
    SamplingParams,
    Verification,
    VerifyOutputs,
)
from compiled_sampler import functional as F
from compiled_sampler.batch import tensors_of
from compiled_sampler.pipeline import edits as edits_of_rows
from tests.builders.edits import EDITS, V, edited_sampler
from tests.builders.sampler import emptied, nothing_compiles, planned, recorded, same, stages_stay_eager
from tests.builders.trees import KINDS, NODES, TreeBatch, cut, logprobs_at, proposed_batch, tree_batch, walks
from tests.tiers import tiers

ROWS = 64  # of a sampler that draws every row alone
WAYS = {
    "match": Verification("match", NODES, trees=True),
    "rejection": Verification("rejection", NODES, drafts="logits", trees=True),
}


def batch_of(rule: str, seed: int, kind: str = "", edits: Sequence[str] = ()) -> TreeBatch:
    if rule == "rejection":
        return proposed_batch(seed, kind=kind, edits=edits)
    return tree_batch(edited_sampler("eager", ROWS), seed, kind=kind, edits=edits)


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


@pytest.mark.parametrize("rule", WAYS)
@pytest.mark.parametrize("edits", [(), EDITS], ids=["plain", "edits"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_definition_has_every_bit_of_the_stages(kind, edits, rule):
    eager, reference = (edited_sampler(each, ROWS) for each in ("eager", "reference"))
    accepted = 0
    for seed in range(4 if rule == "rejection" else 1):
        batch = batch_of(rule, seed, kind, edits)
        made = batch.verified(eager)
        assert same(made, batch.verified(reference))
        accepted += int(made.num_accepted.sum())
    assert accepted or kind == "garbage"


@pytest.mark.parametrize("rule", WAYS)
@pytest.mark.parametrize("edits", [(), EDITS], ids=["plain", "edits"])
def test_a_chain_with_parents_is_the_chain(edits, rule):
    sampler = edited_sampler("eager", ROWS)
    for seed in range(4):
        batch = batch_of(rule, seed, "chain", edits)
        assert same(batch.verified(sampler)._replace(node_ids=None), batch.verified(sampler, parents=None))


def test_a_chain_is_a_chain_also_beyond_the_history():
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


@pytest.mark.parametrize(("rule", "edits"), [("match", ()), ("match", ("penalties", "stops")), ("rejection", ())])
def test_narrow_trees_are_replayed_in_a_wide_variant_and_slots_are_used_again(rule, edits):
    captured = [(*edits, "watermark")] if edits else ()
    options = {"verifications": [WAYS[rule]], "buckets": [2, 8], "captured_edits": captured}
    eager, graph = edited_sampler("eager", ROWS), recorded(edited_sampler("eager", 8, **options))
    for seed in range(3):
        batch = batch_of(rule, seed, edits=edits)
        batch.masks = None
        plan, narrow, out = batch.plan(graph), max(batch.counts), None
        drafts, parents = (each[:, :narrow] for each in batch.padded())
        for _ in range(2):
            made = graph.verify(plan, batch.logits, drafts, batch.positions, parents=parents, out=out, **batch.rest())
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
    ([[-1, -2, 0], [-1]], "got -2; number drafts from the root on"),
    ([[-1, 0, 0, 0], [-1]], r"parents must have num_drafts=\(3, 1\) numbers for each request"),
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
    ("rule", "mode", "edits"),
    tiers(
        [("match", "greedy", ()), ("rejection", "top_k_top_p[64]", ())],
        [
            *(("match", *each) for each in (("full", ()), ("no_filter", ("penalties", "dry")))),
            *(("rejection", mode, ()) for mode in ("full", "no_filter")),
        ],
    ),
)
def test_compiled_stages_have_the_bits_of_eager_ones(rule, mode, edits):
    captured = [(*edits, "watermark")] if edits else ()
    options = {"verifications": [WAYS[rule]], "buckets": [8], "captured_edits": captured}
    eager, compiled = edited_sampler("eager", ROWS), edited_sampler("compiled", 8, **options)
    compiled.warmup(modes=[mode])
    law = {"temperature": 0.9 * (mode != "greedy"), "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    law |= {"top_k": 9, "top_p": 0.9} if mode == "top_k_top_p[64]" else {}
    with nothing_compiles():
        for seed, kind in enumerate(KINDS):
            batch = batch_of(rule, seed, kind, edits)
            batch.masks = None
            batch.update(**law if mode != "full" else {})
            assert same(batch.verified(compiled), batch.verified(eager))
    lowering = compiled.statistics().lowering
    assert lowering is not None
    assert not lowering.eager_stages


def test_a_warm_up_prepares_trees_and_nothing_is_compiled_for_them_later():
    options = {"verifications": [WAYS["match"]], "captured_edits": [("penalties", "stops", "watermark")]}
    eager, compiled = edited_sampler("eager", ROWS), edited_sampler("compiled", 8, buckets=[2, 8], **options)
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


# The rule "rejection".


@pytest.mark.parametrize("params", [{}, {"min_p": 0.05}, {"top_k": 5, "top_p": 0.9}])
def test_batchmates_that_need_a_wider_mode_change_nothing(params):
    """Rows with and without candidates have the same bits, and greedy requests beside others too."""
    sampler = edited_sampler("eager", ROWS)
    for seed in range(3):
        batch = proposed_batch(seed)
        batch.update(**{"temperature": 0.9, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params})
        batch.requests[0].given.update(temperature=0.0)
        alone = batch.verified(sampler)
        batch.requests[-1].given.update(top_k=100, top_p=0.7, min_p=0.01)
        among = batch.verified(sampler)
        for one, other in zip(alone, among, strict=True):
            assert (one is None and other is None) or torch.equal(one[:-1], other[:-1])


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


def test_handles_of_trees_are_refused():
    (sampler, plan), logits = planned(SamplingParams(seed=1), num_drafts=[2]), torch.randn(1, V)
    handles = [sampler.draft(plan, logits, torch.tensor([3]), False, offset) for offset in range(2)]
    call = plan, torch.randn(3, V), handles, torch.tensor([3])
    with pytest.raises(ValueError, match="siblings are drawn without replacement"):
        sampler.verify(*call, "rejection", parents=[[-1, -1]])
    assert sampler.verify(*call, "match", parents=[[-1, -1]]).num_emitted.item() >= 1
