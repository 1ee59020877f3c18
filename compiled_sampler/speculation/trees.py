"""Trees of drafts: the row of each node and the drafts before it; the path of ``match``, the walk of ``rejection``.

``match`` finds its path at once, along the tokens that were drawn; ``rejection`` walks from the root, test by test.

A tree is m drafts of one request, each of which follows an earlier one or, with a parent of -1, the text itself. The
first row of the request draws what follows the text, row j + 1 what follows node j; nodes of one depth share a position
and so its noise. The drafts before a node are bits of one integer, as ``MOST_DRAFTS`` is 64.

A node whose parent is no earlier node has no way from the root, nor has what follows it: their rows draw nothing, and
whatever a tree holds, nothing is read out of range.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import RowStatus, SampleOutputs, VerifyOutputs
from compiled_sampler.core.arithmetic import reciprocal
from compiled_sampler.core.noise import RESIDUAL, TARGET
from compiled_sampler.core.rows import RowSlots, gather_rows, idle_status, take
from compiled_sampler.edits.history import UNWRITTEN, RowPaths
from compiled_sampler.passes.law import Law
from compiled_sampler.speculation.acceptance import (
    UNIT,
    Weighed,
    accept_number,
    in_range,
    proposed_of,
    weighed_drafts,
)
from compiled_sampler.speculation.emission import Final, outputs_of
from compiled_sampler.speculation.row_layout import CachedRows, Layout, Trials, request_of_draft, request_of_row


class Tree(NamedTuple):
    """Where the nodes of each request stand."""

    depths: Tensor  # int64 [N, K], 1 for what follows the text; 0 for what is no node, or has no way from the root
    paths: Tensor  # int64 [N, K], a bit for each node on the way from the root to this one, which is among them
    parents: Tensor  # int64 [N, K], in [-1, K)
    is_wrong: Tensor  # bool [N], whether a parent is no earlier node


class Ways(NamedTuple):
    """Part of the way from each node to the root, int64 ``[N, 2 + K]`` each."""

    # Before the nodes stand two ends of ways, which lead to themselves: what is behind a wrong parent, and the root.
    ends: Tensor  # where the part ends
    paths: Tensor  # a bit for each node on it
    depths: Tensor  # their number


_ENDS = 2


_STEPS = 8  # of one kernel; two kernels climb through 64 nodes


def first_ways(parents: Tensor, num_drafts: Tensor) -> Ways:
    """From each node up to so many steps towards the root."""
    node = torch.arange(parents.shape[1], device=parents.device)
    exists, is_right = node < num_drafts[:, None], (parents >= -1) & (parents < node)
    ends = F.pad(torch.where(exists & is_right, parents + _ENDS, 0), (_ENDS, 0))
    ends = torch.where(torch.arange(ends.shape[1], device=node.device) == 1, 1, ends)
    paths = torch.where(exists, torch.ones_like(parents) << node, 0)
    return _climbed(Ways(ends, F.pad(paths, (_ENDS, 0)), F.pad(exists.to(torch.int64), (_ENDS, 0))))


def tree_of(ways: Ways, parents: Tensor, num_drafts: Tensor) -> Tree:
    """Where the nodes of trees stand, from their ``first_ways``."""
    if parents.shape[1] > _STEPS:
        ways = _climbed(ways)
    node = torch.arange(parents.shape[1], device=parents.device)
    is_wrong = (node < num_drafts[:, None]) & ((parents < -1) | (parents >= node))
    depths = torch.where(ways.ends == 1, ways.depths, 0)[:, _ENDS:]
    return Tree(depths, ways.paths[:, _ENDS:], parents.clamp(-1, parents.shape[1] - 1), is_wrong.any(-1))


def _climbed(ways: Ways) -> Ways:
    """Each way, and those of the nodes where it ends, ``_STEPS`` in all."""
    # What is gathered from is always the same, so that Inductor makes one kernel of it: of numbers that double from
    # step to step it would compute each for every use anew.
    end, path, depth = ways
    for _ in range(_STEPS - 1):
        path, depth = path | ways.paths.gather(1, end), depth + ways.depths.gather(1, end)
        end = ways.ends.gather(1, end)
    return Ways(end, path, depth)


def tree_rows(layout: Layout, tree: Tree, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The slot and the position of each row, int64 ``[R]`` each; rows that no path leads to are padding."""
    request = _request_of_row(layout)
    node = layout.offsets - 1
    depth = torch.where(node < 0, 0, tree.depths[request, node.clamp(0, tree.depths.shape[1] - 1)])
    is_reached = (node < 0) | (depth > 0)
    return torch.where(is_reached, layout.slots, -1), positions[request] + depth


def row_paths(layout: Layout, tree: Tree, positions: Tensor, draft_token_ids: Tensor, *, vocab_size: int) -> RowPaths:
    """The drafts before each row ``[R]``."""
    request, node = _request_of_row(layout), layout.offsets - 1
    nodes = torch.arange(tree.depths.shape[1], device=node.device)
    path = torch.where(node < 0, 0, tree.paths[request, node.clamp(0, len(nodes) - 1)])
    is_before = ((path[:, None] >> nodes) & 1) != 0  # [R, K]
    places = torch.where(is_before, tree.depths[request] - 1, -1)
    at_place = torch.where(places[:, None] == nodes[:, None], nodes, -1).amax(-1)  # [R, K]
    tokens = torch.where(at_place >= 0, draft_token_ids[request[:, None], at_place.clamp(min=0)], UNWRITTEN)
    is_token = (tokens >= 0) & (tokens < vocab_size)
    return RowPaths(torch.where(is_token, tokens, UNWRITTEN), positions[request], is_before.sum(-1))


def _request_of_row(layout: Layout) -> Tensor:
    row = torch.arange(layout.offsets.shape[0], device=layout.offsets.device)
    request = request_of_row(layout.first_rows, layout.num_drafts, row, searched=True)
    return request.clamp(max=layout.num_drafts.shape[0] - 1)


def tree_trials(layout: Layout, tree: Tree, slots: Tensor, positions: Tensor) -> Trials:
    """The inputs of each node's test: its parent's row judges it; nodes that no path leads to are no drafts."""
    trials, width = layout.trials, tree.depths.shape[1]
    draft = torch.arange(trials.row_ids.shape[0], device=slots.device)
    owner = request_of_draft(layout.first_drafts, layout.num_drafts, draft, searched=True).clamp(max=len(slots) - 1)
    node = (draft - layout.first_drafts[owner]).clamp(0, width - 1)
    depth, row = tree.depths[owner, node], layout.first_rows[owner] + 1 + tree.parents[owner, node]
    place = (depth - 1).clamp(min=0)
    return Trials(
        row_ids=in_range(row, layout.slots),
        slots=torch.where(trials.slots < 0, -1, slots[owner]),
        positions=positions[owner] + place,
        offsets=place,
        drafts=torch.where(depth > 0, trials.drafts, -1),
    )


def emit_path(
    draws: SampleOutputs, layout: Layout, tree: Tree, slots: Tensor, draft_token_ids: Tensor, *, vocab_size: int
) -> VerifyOutputs:
    """The outputs of the rule ``match``, from the target's own draws: from the root on, the child that is drawn."""
    node = torch.arange(draft_token_ids.shape[1], device=slots.device)
    is_token, exists = (draft_token_ids >= 0) & (draft_token_ids < vocab_size), node < layout.num_drafts[:, None]
    own = draws.token_ids[in_range(layout.first_rows[:, None] + 1 + tree.parents, draws.token_ids)]
    is_drawn = (tree.depths > 0) & is_token & (own == draft_token_ids)
    # A node is on the path if it and all before it are drawn; of several with one parent the first is taken.
    pairs = is_drawn[:, :, None] & is_drawn[:, None] & (tree.parents[:, :, None] == tree.parents[:, None])
    is_taken = is_drawn & ~(pairs & (node < node[:, None])).any(-1)
    taken = torch.where(is_taken, torch.ones_like(tree.paths) << node, 0).sum(-1, keepdim=True)
    on_path = (tree.depths > 0) & ((tree.paths & ~taken) == 0)
    node_ids, tokens = _path(tree, on_path, draft_token_ids)
    num_accepted, last = on_path.sum(-1), torch.where(on_path, node, -1).amax(-1)
    status = draws.status[in_range(layout.first_rows + 1 + last, draws.status)]
    status = status | _flags_of_path(draws.status, layout, tree, on_path, exists & ~is_token)
    token = draws.token_ids[in_range(layout.first_rows + 1 + last, draws.token_ids)]
    counts = num_accepted, is_taken.sum(-1)
    outputs = outputs_of(token, status, counts, slots >= 0, slots, tokens)
    return VerifyOutputs(*outputs[:5], node_ids=node_ids)


def _path(tree: Tree, on_path: Tensor, draft_token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The nodes on a path from the root in their order, and their drafts, ``[N, K]`` each; -1 behind the last."""
    node = torch.arange(tree.depths.shape[1], device=on_path.device)
    place = torch.where(on_path, tree.depths - 1, -1)
    node_ids = torch.where(place[:, None] == node[:, None], node, -1).amax(-1)
    return node_ids, torch.where(node_ids >= 0, draft_token_ids.gather(1, node_ids.clamp(min=0)), -1)


def _flags_of_path(flags: Tensor, layout: Layout, tree: Tree, on_path: Tensor, is_no_token: Tensor) -> Tensor:
    """The ``RowStatus`` flags of the rows that are emitted, of drafts that are no tokens, and of wrong parents."""
    node = torch.arange(on_path.shape[1], device=on_path.device)
    first = flags[in_range(layout.first_rows, flags)]
    of_nodes = flags[in_range(layout.first_rows[:, None] + 1 + node, flags)]
    status = _flag(is_no_token.any(-1), RowStatus.DRAFT_OUT_OF_RANGE)
    for flag in (RowStatus.NAN_SEEN, RowStatus.POSITIVE_INFINITY):
        status = status | (first | torch.where(on_path, of_nodes, 0).amax(-1)) & int(flag)
    return status | _flag(tree.is_wrong, RowStatus.PARENT_OUT_OF_RANGE)


def _flag(is_set: Tensor, flag: RowStatus) -> Tensor:
    return torch.where(is_set, int(flag), 0)


class Nodes(NamedTuple):
    """What the tests of the nodes of each request compare under the rule ``rejection``, ``[N, K]`` each."""

    weighed: Weighed
    numbers: Tensor  # float64, the uniform number of each test
    is_possible: Tensor
    """bool, whether a draft can have been drawn where it stands: not out of range, of weight 0, or a sibling again."""
    is_sure: Tensor  # bool, the one token of a greedy request

    @property
    def is_accepted_first(self) -> Tensor:
        """bool, whether a draft passes the test of the first among its siblings."""
        return self.is_possible & (self.is_sure | (self.numbers * self.weighed.theirs < self.weighed.mine))


class Walk(NamedTuple):
    """How far each request has come under the rule ``rejection``, ``[N]`` each."""

    node: Tensor  # int64, the node whose children are tested, -1 for the root
    child: Tensor  # int64, the child to test next; K for none
    rejected: Tensor  # int64, the last of the children that were rejected; -1 for none
    debt: Tensor  # float64, b of the residual relu(p - b * q) that their rejections leave; 0 for none
    spent: Tensor  # int64, their weight in q
    row_ids: Tensor  # int64, the row of the node
    proposals: Tensor  # int64, the row of the proposals of the child to test next


def judge_nodes(
    logits: Tensor,
    law: Law,
    proposed: Law | None,
    values: Tensor | CachedRows | None,
    layout: Layout,
    tree: Tree,
    requests: RowSlots,
    draft_token_ids: Tensor,
    *,
    vocab_size: int,
) -> tuple[Nodes, Walk]:
    """The nodes of each request, and the walk at its begin; ``law`` is of the target's rows ``[R]``."""
    own = take(law, layout.trials.row_ids)
    weighed = weighed_drafts(logits, own, proposed, values, layout, requests.table, vocab_size=vocab_size)
    node = torch.arange(draft_token_ids.shape[1], device=draft_token_ids.device)
    index = layout.first_drafts[:, None] + node
    weighed = take(weighed, in_range(index, weighed.w))
    is_reached = (tree.depths > 0) & (node < layout.num_drafts[:, None])
    is_token = is_reached & (draft_token_ids >= 0) & (draft_token_ids < vocab_size)
    is_before = is_reached[:, None] & (tree.parents[:, :, None] == tree.parents[:, None]) & (node < node[:, None])
    is_again = (is_before & (draft_token_ids[:, :, None] == draft_token_ids[:, None])).any(-1)
    is_greedy = torch.zeros_like(is_token)
    if law.cut is not None:
        is_greedy = is_greedy | (requests.table.noise_mask[requests.slots.clamp(min=0)] == 0)[:, None]
    offsets, slots = (tree.depths - 1).clamp(min=0), requests.slots[:, None].expand(tree.depths.shape)
    positions = requests.positions[:, None] + offsets
    numbers = accept_number(requests.table, slots, positions, offsets, is_before.sum(-1))
    is_possible = is_token & weighed.is_possible & (is_greedy | ~is_again)
    nothing = torch.full_like(requests.slots, -1)
    child = _next_child(tree, layout, nothing, nothing)
    debt, zero = torch.zeros_like(nothing, dtype=torch.float64), torch.zeros_like(nothing)
    walk = Walk(nothing, child, nothing, debt, zero, *_walked_rows(nothing, child, layout))
    return Nodes(weighed, numbers, is_possible, is_greedy & (weighed.w > 0.0)), walk


def walk_on(walk: Walk, sums: Tensor, nodes: Nodes, tree: Tree, layout: Layout) -> Walk:
    """The walk after one test more; ``sums`` are parts of ``relu(p - b * q)`` of the rows, int64 ``[N, n]``."""
    # After some rejected children the target's law is what is left, (p - b q) / T with its sum T, and a child is drawn
    # from q without them, q / (1 - Q). It is accepted by the ratio of the two. If it is not, the law to draw from is
    # relu((p - b q) / T - q / (1 - Q)), which is relu(p - (b + T / (1 - Q)) q) but for its sum: b alone has changed.
    # T is the probability of so many rejections: an error of T counts no more than as often as it is made.
    count = tree.depths.shape[1]
    at = walk.child.clamp(max=count - 1)
    weighed, u, is_possible, is_sure = take(nodes, (torch.arange(at.shape[0], device=at.device), at))
    total = sums.sum(-1).to(torch.float64) * (1.0 / UNIT)
    rest = (weighed.q.total - walk.spent).to(torch.float64) * weighed.q.inverse
    q = weighed.m.to(torch.float64) * weighed.q.inverse
    left = weighed.w.to(torch.float64) * weighed.own.inverse - walk.debt * q
    is_first = walk.rejected < 0
    passes = torch.where(is_first, u * weighed.theirs < weighed.mine, u * (total * q) < left * rest) | is_sure
    passes &= weighed.w > 0.0  # siblings of a greedy request may repeat, which leaves no numbers to test with
    is_judged = (walk.child < count) & is_possible
    accepts, rejects = is_judged & passes, is_judged & ~passes
    debt = torch.where(is_first, 1.0, walk.debt + total * reciprocal(rest))
    node = torch.where(accepts, at, walk.node)
    child = _next_child(tree, layout, node, torch.where(walk.child < count, at, count))
    return Walk(
        node,
        child,
        torch.where(accepts, -1, torch.where(rejects, at, walk.rejected)),
        torch.where(accepts, 0.0, torch.where(rejects, debt, walk.debt)),
        torch.where(accepts, 0, walk.spent + torch.where(rejects, weighed.m.to(torch.int64), 0)),
        *_walked_rows(node, child, layout),
    )


def _next_child(tree: Tree, layout: Layout, node: Tensor, after: Tensor) -> Tensor:
    """The first child of a node behind the node ``after``, int64 ``[N]``; K for none."""
    count = tree.depths.shape[1]
    each = torch.arange(count, device=node.device)
    is_child = (tree.depths > 0) & (tree.parents == node[:, None]) & (each < layout.num_drafts[:, None])
    return torch.where(is_child & (each > after[:, None]), each, count).amin(-1)


def _walked_rows(node: Tensor, child: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    return in_range(layout.first_rows + 1 + node, layout.slots), layout.first_drafts + child


def final_of_walk(
    walk: Walk,
    nodes: Nodes,
    law: Law,
    proposed: Law | None,
    layout: Layout,
    tree: Tree,
    requests: RowSlots,
    draft_token_ids: Tensor,
    *,
    vocab_size: int,
) -> tuple[Final, Tensor, Tensor]:
    """The final row of each request; the nodes on its path and their drafts, ``[N, K]`` each."""
    node = torch.arange(draft_token_ids.shape[1], device=draft_token_ids.device)
    path = torch.where(walk.node < 0, 0, tree.paths.gather(1, walk.node.clamp(min=0)[:, None])[:, 0])
    is_live = idle_status(requests.table, requests.slots) == 0
    on_path = (((path[:, None] >> node) & 1) != 0) & is_live[:, None]
    node_ids, tokens = _path(tree, on_path, draft_token_ids)
    exists = node < layout.num_drafts[:, None]
    is_token = (draft_token_ids >= 0) & (draft_token_ids < vocab_size)
    status = _flags_of_path(law.status, layout, tree, on_path, exists & ~is_token)
    is_impossible = exists & is_token & (tree.depths > 0) & ~nodes.is_possible
    status = status | _flag(is_impossible.any(-1), RowStatus.DRAFT_IMPOSSIBLE)
    num_accepted, proposals = on_path.sum(-1), layout.first_drafts + walk.rejected
    rejected = torch.where(walk.rejected < 0, -1, draft_token_ids.gather(1, walk.rejected.clamp(min=0)[:, None])[:, 0])
    last = requests._replace(positions=requests.positions + num_accepted)
    final = Final(
        row_ids=walk.row_ids,
        num_accepted=num_accepted,
        num_matching=nodes.is_accepted_first.sum(-1),
        drafts=rejected,
        proposals=proposals,
        rows=gather_rows(last, stream=torch.where(rejected >= 0, RESIDUAL, TARGET)),
        law=take(law, walk.row_ids),
        proposed=proposed_of(proposed, proposals),
        carry=torch.where(walk.debt > 1.0, reciprocal(walk.debt), 1.0),
        status=status,
    )
    return final, node_ids, tokens
