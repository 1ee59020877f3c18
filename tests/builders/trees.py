"""Random trees of drafts, and the slow truth of the rule ``match`` on them: each row drawn alone, then a walk."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compiled_sampler import LogprobOutputs, Logprobs, Plan, RowStatus, SampleOutputs, Sampler, VerifyOutputs
from tests.builders.edits import Request, V, hard_logits, random_mask, random_request

NODES = 9
KINDS = "random", "full", "chain", "star", "garbage"
"""Of trees: any, with two children a node, of one child a node, of depth 1, and no tree at all."""


def random_parents(source: random.Random, count: int, kind: str = "random") -> list[int]:
    if kind == "garbage":
        return [
            source.choice([node, node + 1, -2, 2**62, -(2**63), source.randrange(-1, count)]) for node in range(count)
        ]
    of_kind = {"full": lambda node: node // 2 - 1, "chain": lambda node: node - 1, "star": lambda node: -1}
    parent = of_kind.get(kind, lambda node: source.randrange(-1, node))
    return [parent(node) for node in range(count)]


def path_of(parents: Sequence[int], node: int) -> list[int] | None:
    """The nodes from the root to this one, which is the last; None if there is no way."""
    path: list[int] = []
    while node != -1:
        path.append(node)
        if not -1 <= parents[node] < node:
            return None
        node = parents[node]
    return path[::-1]


@dataclass
class TreeBatch:
    """Requests with trees, and what one verification of them gets."""

    requests: list[Request]
    parents: list[list[int]]
    drafts: list[list[int]]
    logits: Tensor
    masks: Tensor | None
    draft_logits: Tensor | None = None
    """``[D, V]``, for the rule "rejection"."""
    own: SampleOutputs = field(init=False)
    """What each row draws where its request has the drafts before it as output, ``[R, ...]``."""

    @property
    def counts(self) -> list[int]:
        return [len(tree) for tree in self.parents]

    @property
    def positions(self) -> Tensor:
        """Of the first tokens."""
        return torch.tensor([request.position for request in self.requests])

    def padded(self, width: int = NODES) -> tuple[Tensor, Tensor]:
        """Drafts and parents ``[N, K]``; what is behind the last node is garbage."""
        made = [
            torch.tensor([[*row, *[7] * (width - len(row))] for row in rows]) for rows in (self.drafts, self.parents)
        ]
        return made[0], made[1]

    def plan(self, sampler: Sampler) -> Plan:
        return sampler.plan([each.added(sampler) for each in self.requests], num_drafts=self.counts)

    def verified(self, sampler: Sampler, **options: Any) -> VerifyOutputs:
        """The results of requests that are added and removed."""
        plan, (drafts, parents) = self.plan(sampler), self.padded()
        made = sampler.verify(
            plan, self.logits, drafts, self.positions, **{"parents": parents, **self.rest(), **options}
        )
        for slot in plan.slots:
            sampler.remove_request(slot)
        return made

    def rest(self) -> dict[str, Any]:
        """What a verification gets besides: the mask, and the rule with the logits of drafts."""
        mask = {} if self.masks is None else {"token_bitmask": self.masks}
        return mask if self.draft_logits is None else {"rule": "rejection", "draft_logits": self.draft_logits, **mask}

    def update(self, **params: Any) -> None:
        for request in self.requests:
            request.given.update(params)

    def draw(self, sampler: Sampler, logprobs: Logprobs | None = None) -> None:
        """Draw every row alone, and make some drafts what their parents' rows draw, row after row."""
        self.own = self._drawn(sampler, logprobs)

    def _drawn(self, sampler: Sampler, logprobs: Logprobs | None) -> SampleOutputs:
        rows = []
        for request, parents, drafts in zip(self.requests, self.parents, self.drafts, strict=True):
            for node in range(-1, len(parents)):
                path = [drafts[each] if 0 <= drafts[each] < V else V for each in path_of(parents, node) or ()]
                rows.append(Request(request.given, request.prompt, request.output + path))
        slots, positions = [each.added(sampler) for each in rows], [each.position for each in rows]
        mask = {} if self.masks is None else {"token_bitmask": self.masks}
        drawn = sampler.sample(sampler.plan(slots), self.logits, torch.tensor(positions), logprobs=logprobs, **mask)
        for slot in slots:
            sampler.remove_request(slot)
        return drawn


def tree_batch(sampler: Sampler, seed: int, *, kind: str = "", edits: Sequence[str] = (), count: int = 6) -> TreeBatch:
    """A batch whose drafts are often what their parents' rows draw: each level is drafted after that before it."""
    source = random.Random(f"{seed} {kind} {edits}")
    requests = [random_request(source, V, edits) for _ in range(count)]
    for request in requests:
        if edits and source.random() < 0.3:
            request.given["watermark_tokens"] = source.randrange(1, 4)
    parents = [random_parents(source, source.randrange(NODES + 1), kind or source.choice(KINDS[:-1])) for _ in requests]
    rows = sum(map(len, parents)) + count
    masks = random_mask(source, rows, V) if edits and source.random() < 0.5 else None
    drafts = [[source.choice([-1, V, source.randrange(V)]) for _ in tree] for tree in parents]
    batch = TreeBatch(requests, parents, drafts, hard_logits(source, rows), masks)
    for level in range(1, 5):
        batch.draw(sampler)
        row = 0
        for tree, tokens in zip(parents, drafts, strict=True):
            for node in range(len(tree)):
                if len(path_of(tree, node) or ()) == level and source.random() < 0.6:
                    tokens[node] = int(batch.own.token_ids[row + 1 + tree[node]])
            row += len(tree) + 1
    return batch


def proposed_batch(seed: int, *, kind: str = "", edits: Sequence[str] = ()) -> TreeBatch:
    """A batch with logits of a drafter; some drafts are no tokens, some come twice, garbage trees have any parents."""
    source = random.Random(f"{seed} {kind} {edits}")
    requests = [random_request(source, V, edits) for _ in range(6)]
    parents = [random_parents(source, source.randrange(1, NODES + 1), kind or source.choice(KINDS)) for _ in requests]
    count = sum(map(len, parents))
    logits = hard_logits(source, count + len(requests))
    noise = torch.randn(count, V, generator=torch.Generator().manual_seed(seed))
    rows, start = list[int](), 0
    for tree in parents:  # siblings are of one law, close to the target's at their parent
        rows += [start + 1 + parent if -1 <= parent < node else start for node, parent in enumerate(tree)]
        start += len(tree) + 1
    draft_logits = [logits[row] + noise[rows.index(row)] for row in rows]
    drafts = list[int]()
    for each in draft_logits:
        likely = each.nan_to_num().topk(3).indices.tolist()
        drafts.append(source.choice(likely) if source.random() < 0.8 else source.randrange(-1, V + 1))
    flat = iter(drafts)
    of_trees = [[next(flat) for _ in tree] for tree in parents]
    masks = random_mask(source, count + len(requests), V) if edits and seed % 2 else None
    return TreeBatch(requests, parents, of_trees, logits, masks, torch.stack(draft_logits))


@dataclass
class Walk:
    """What the walk through one tree emits."""

    token_ids: list[int]
    node_ids: list[int]
    rows: list[int]
    """Of the batch, of the tokens."""
    num_matching: int
    status: int


def walks(batch: TreeBatch) -> list[Walk]:
    made, row = [], 0
    own, status = batch.own.token_ids.tolist(), batch.own.status.tolist()
    for parents, drafts in zip(batch.parents, batch.drafts, strict=True):
        node, path, tokens = -1, list[int](), [own[row]]
        reached = [path_of(parents, each) is not None for each in range(len(parents))]
        while children := [
            each
            for each, parent in enumerate(parents)
            if parent == node and drafts[each] == tokens[-1] >= 0 and reached[each]
        ]:
            node = children[0]
            path.append(node)
            tokens.append(own[row + 1 + node])
        passed = {
            (parents[each], drafts[each])
            for each in range(len(parents))
            if reached[each] and drafts[each] == own[row + 1 + parents[each]] >= 0
        }
        rows = [row, *(row + 1 + each for each in path)]
        flags = status[rows[-1]]
        for each in rows:
            flags |= status[each] & (RowStatus.NAN_SEEN | RowStatus.POSITIVE_INFINITY)
        flags |= RowStatus.DRAFT_OUT_OF_RANGE if any(not 0 <= each < V for each in drafts) else 0
        is_wrong = any(not -1 <= parent < each for each, parent in enumerate(parents))
        flags |= RowStatus.PARENT_OUT_OF_RANGE if is_wrong else 0
        made.append(Walk(tokens, path, rows, len(passed), int(flags)))
        row += len(parents) + 1
    return made


def cut(walk: Walk, batch: TreeBatch) -> tuple[Walk, bool]:
    """The walk up to the first token that ends its request, and whether one does."""
    assert batch.own.finished is not None
    finished = batch.own.finished.tolist()
    length = next((n + 1 for n, row in enumerate(walk.rows) if finished[row]), len(walk.rows))
    is_end = any(finished[row] for row in walk.rows)
    return Walk(
        walk.token_ids[:length], walk.node_ids[:length], walk.rows[:length], walk.num_matching, walk.status
    ), is_end


def logprobs_at(own: LogprobOutputs, rows: Sequence[int], name: str) -> Tensor:
    values: Tensor = getattr(own, name)
    return values[torch.tensor(rows, dtype=torch.int64)]
