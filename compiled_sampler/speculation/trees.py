"""Trees of drafts: the row of each node, the drafts before it, and the walk from the root under the rule ``match``.

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
from compiled_sampler.edits.history import UNWRITTEN, RowPaths
from compiled_sampler.speculation.acceptance import in_range
from compiled_sampler.speculation.emission import emitted
from compiled_sampler.speculation.row_layout import Layout, request_of_row


class Tree(NamedTuple):
    """Where the nodes of each request stand."""

    depths: Tensor
    """int64 ``[N, K]``, 1 for what follows the text; 0 for what is no node, or has no way from the root."""
    paths: Tensor
    """int64 ``[N, K]``, a bit for each node on the way from the root to this one, which is among them."""
    parents: Tensor
    """int64 ``[N, K]``, in [-1, K)."""
    is_wrong: Tensor
    """bool ``[N]``, whether a parent is no earlier node."""


class Ways(NamedTuple):
    """Part of the way from each node to the root, int64 ``[N, 2 + K]`` each."""

    # Before the nodes stand two ends of ways, which lead to themselves: what is behind a wrong parent, and the root.
    ends: Tensor
    """Where the part ends."""
    paths: Tensor
    """A bit for each node on it."""
    depths: Tensor
    """Their number."""


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
    place = torch.where(on_path, tree.depths - 1, -1)
    node_ids = torch.where(place[:, None] == node[:, None], node, -1).amax(-1)  # [N, K]
    tokens = torch.where(node_ids >= 0, draft_token_ids.gather(1, node_ids.clamp(min=0)), -1)
    num_accepted, last = on_path.sum(-1), torch.where(on_path, node, -1).amax(-1)
    first = in_range(layout.first_rows, draws.status)
    status = draws.status[in_range(layout.first_rows + 1 + last, draws.status)]
    of_nodes = draws.status[in_range(layout.first_rows[:, None] + 1 + node, draws.status)]
    for flag in (RowStatus.NAN_SEEN, RowStatus.POSITIVE_INFINITY):
        status = status | (draws.status[first] | torch.where(on_path, of_nodes, 0).amax(-1)) & int(flag)
    status = status | _flag((exists & ~is_token).any(-1), RowStatus.DRAFT_OUT_OF_RANGE)
    status = status | _flag(tree.is_wrong, RowStatus.PARENT_OUT_OF_RANGE)
    token = draws.token_ids[in_range(layout.first_rows + 1 + last, draws.token_ids)]
    counts = num_accepted, is_taken.sum(-1)
    outputs = emitted(token, status, counts, slots >= 0, slots, tokens)
    return VerifyOutputs(*outputs[:5], node_ids=node_ids)


def _flag(is_set: Tensor, flag: RowStatus) -> Tensor:
    return torch.where(is_set, int(flag), 0)
