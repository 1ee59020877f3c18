"""The definition of draft verification: one request after another, one draft after another, in plain torch.

The fast stages of this folder compute the same bits for all requests at once; ``Sampler(..., backend="reference")``
runs this. A request with k drafts has k + 1 rows of the target, and every draft has a row that it was drawn from.
Below, p is the law of a row of the target and q that of a draft: integer weights over their exact total. A Python float
is a float64, rounded once an operation, as on every other path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.batch import DraftTable, RowStatus, VerifyInputs, VerifyOutputs
from compiled_sampler.core import reference
from compiled_sampler.core.arithmetic import log2_float32, reciprocal
from compiled_sampler.core.mass import MASS_BITS
from compiled_sampler.core.noise import RESIDUAL, TARGET
from compiled_sampler.core.order import MASKED_BITS, indices, pack, packed_id, row_logits, score_order
from compiled_sampler.core.rows import RowSlots, gather_rows, idle_status, take
from compiled_sampler.core.score import drawn_noise, raced_bits
from compiled_sampler.edits.watermark import noise_positions
from compiled_sampler.modes import PROCESSED, Mode
from compiled_sampler.passes.kept import probability_mass
from compiled_sampler.speculation.acceptance import UNIT, accept_number, draft_ratio


def requests_of(mode: Mode, inputs: VerifyInputs) -> Iterator[Request | int]:
    """All requests in their order; the ``idle_status`` of padding and of requests that are not covered."""
    row = draft = 0
    entries = zip(inputs.slots.tolist(), inputs.num_drafts.tolist(), strict=True)
    idle = idle_status(inputs.table, inputs.slots).tolist()
    for n, (slot, count) in enumerate(entries):
        x = row_logits(inputs.logits[row : row + count + 1], mode.vocab_size)
        proposals = inputs.proposals if mode.drafts != "one_hot" else None
        if isinstance(proposals, DraftTable):
            proposals = row_logits(proposals.logits[slot, : max(count, 0)], mode.vocab_size)
        elif proposals is not None:
            proposals = row_logits(proposals[draft : draft + count], mode.vocab_size)
        yield idle[n] or _request(mode, inputs, n, x, proposals, row)
        row, draft = row + count + 1, draft + max(count, 0)


def _request(mode: Mode, inputs: VerifyInputs, n: int, x: Tensor, proposals: Tensor | None, row: int) -> Request:
    """Request n, with its rows and what its drafts were drawn from, float32 ``[k+1, V]`` and ``[k, V]``."""
    offsets, count, ids = torch.arange(len(x), device=x.device), len(x) - 1, indices(mode.vocab_size, x.device)
    parents = None if inputs.parents is None else inputs.parents[n, :count].tolist()
    depths = offsets if parents is None else torch.tensor(depths_of(parents), device=x.device)
    slots, positions = inputs.slots[n].expand(len(x)), inputs.positions[n] + depths
    keyed = positions
    if inputs.noise is not None:
        watermarks, history, paths = inputs.noise
        keyed = noise_positions(slots, positions, watermarks, history, take(paths, row + offsets))
    target, rest = (gather_rows(RowSlots(inputs.table, slots, keyed), stream=stream) for stream in (TARGET, RESIDUAL))
    if mode.from_probabilities:  # no parameter but the seed has a part
        target, rest = (rows._replace(noise_mask=torch.full_like(rows.noise_mask, -1)) for rows in (target, rest))
        weights = probability_mass(x)
        kept, logarithms = weights > 0, log2_float32(weights.to(torch.float32) * 2.0**-MASS_BITS)
        flags = torch.where(x.isnan().any(-1), int(RowStatus.NAN_SEEN), 0)
    else:
        weights = reference.weights(x, target, base_is_row=mode.base_is_row)
        kept, logarithms = reference.kept(x, target, base_is_row=mode.base_is_row), x * target.scale[:, None]
        flags = reference.status(x, target.scale)
    is_greedy = bool((target.noise_mask == 0).any())
    drafts = [token if 0 <= token < mode.vocab_size else -1 for token in inputs.draft_token_ids[n, :count].tolist()]
    proposed = (ids == torch.tensor(drafts, dtype=torch.int32, device=x.device)[:, None]).to(torch.int64)
    if proposals is not None and mode.drafts == "probabilities":
        proposed = probability_mass(proposals)
    elif proposals is not None:
        table = inputs.draft_table if mode.drafts == PROCESSED and inputs.draft_table is not None else inputs.table
        parameters = gather_rows(RowSlots(table, slots[:count], positions[:count]), stream=TARGET)
        proposed = reference.weights(proposals, parameters, base_is_row=mode.base_is_row)
    places, siblings = offsets[:count], torch.zeros(count, dtype=torch.int64, device=x.device)
    if parents is not None:
        places = (depths[1:] - 1).clamp(min=0)
        for node, parent in enumerate(parents):
            siblings[node] = sum(parents[each] == parent and int(depths[each + 1]) > 0 for each in range(node))
    numbers = accept_number(inputs.table, slots[:count], inputs.positions[n] + places, places, siblings)
    return Request(
        p=_laws(weights),
        q=_laws(proposed),
        drafts=drafts,
        possible=[is_greedy or draft < 0 or int(row[draft]) > 0 for row, draft in zip(proposed, drafts, strict=True)],
        numbers=numbers.tolist(),
        kept=kept,
        logarithms=logarithms,
        noise={TARGET: drawn_noise(target, ids, x), RESIDUAL: drawn_noise(rest, ids, x)},
        flags=flags.tolist(),
        is_greedy=is_greedy,
        parents=parents,
    )


def depths_of(parents: Sequence[int]) -> list[int]:
    """The depth of the root, 0, and of each node of a tree; 0 too where no path leads from the root."""
    depths = [0]
    for node, parent in enumerate(parents):
        is_reached = parent == -1 or (0 <= parent < node and depths[parent + 1] > 0)
        depths.append(depths[parent + 1] + 1 if is_reached else 0)
    return depths


def _laws(weights: Tensor) -> Laws:
    """The laws with these weights ``[n, V]``; the total of a row without mass counts as 1."""
    total = weights.sum(-1)
    return Laws(weights, total.clamp(min=1), reciprocal(total.to(torch.float64)))


class Laws(NamedTuple):
    """Distributions in integers: a token's probability is its weight over the total."""

    weights: Tensor  # int64 [n, V], 0 where a filter drops the token
    total: Tensor  # int64 [n], the sums, at least 1
    inverse: Tensor  # float64 [n], 1 over the sums; 0 for a sum of 0


class Request(NamedTuple):
    """One request with k drafts, and all that its verification reads."""

    p: Laws  # of the target [k+1]
    q: Laws  # of what the drafts were drawn from [k]
    drafts: list[int]  # k token ids; -1 where a draft is none
    possible: list[bool]
    """k, false where q gives the draft no weight, so that it cannot have been drawn from it; true if ``is_greedy``."""
    numbers: list[float]  # k uniform numbers, one for the test of each draft
    kept: Tensor  # bool [k+1, V], the tokens that race in the target's own draw
    logarithms: Tensor  # float32 [k+1, V], base-2 logarithms of their weights
    noise: dict[int, Tensor]  # float32 [k+1, V] by stream; 0 of a greedy request
    flags: list[int]  # RowStatus of the k+1 rows
    is_greedy: bool  # whether its first token of the order is taken
    parents: list[int] | None = None  # k, the draft that each one follows, -1 for none; None for a chain


_NONE = RowStatus(0)


def verify(mode: Mode, inputs: VerifyInputs) -> VerifyOutputs:
    """Accept the drafts of every request as far as the mode's rule does, and draw one token more."""
    width, rules = inputs.draft_token_ids.shape[1], {"match": match, "rejection": rejection, "block": block}
    if inputs.parents is not None:
        rules = {"match": match_tree, "rejection": rejection_tree if mode.draws else match_tree}
    rule = rules[mode.rule]
    outcomes = [_IDLE[item] if isinstance(item, int) else rule(item) for item in requests_of(mode, inputs)]
    token_ids = [[*result.token_ids, *[-1] * (width + 1 - len(result.token_ids))] for result in outcomes]
    paths = [[*result.node_ids, *[-1] * (width - len(result.node_ids))] for result in outcomes]

    def column(values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=inputs.slots.device)

    return VerifyOutputs(
        token_ids=column(token_ids).view(len(outcomes), width + 1),
        num_emitted=column([result.num_emitted for result in outcomes]),
        num_accepted=column([len(result.token_ids) - 1 for result in outcomes]),
        num_matching=column([result.num_matching for result in outcomes]),
        status=column([result.status for result in outcomes], torch.int32),
        node_ids=None if inputs.parents is None else column(paths).view(len(outcomes), width),
    )


def match(request: Request) -> Outcome:
    """Accept a draft while it is the token that the target itself draws at its position."""
    own = [draw(request, row, TARGET) for row in range(len(request.drafts) + 1)]
    passed = [token == draft >= 0 for token, draft in zip(own, request.drafts, strict=False)]
    return outcome(request, leading(passed), passed, own[leading(passed)])


def match_tree(request: Request) -> Outcome:
    """From the root, go to the first child that is the token which the target itself draws, until there is none."""
    assert request.parents is not None
    own = [draw(request, row, TARGET) for row in range(len(request.drafts) + 1)]
    is_reached = [depth > 0 for depth in depths_of(request.parents)[1:]]
    node, path = -1, list[int]()
    while True:
        children = [
            child
            for child, parent in enumerate(request.parents)
            if parent == node and is_reached[child] and request.drafts[child] == own[node + 1] >= 0
        ]
        if not children:
            break
        node = children[0]
        path.append(node)
    passed = {
        (parent, draft)
        for parent, draft, reached in zip(request.parents, request.drafts, is_reached, strict=True)
        if reached and draft == own[parent + 1] >= 0
    }
    emitted = request._replace(drafts=[request.drafts[node] for node in path])
    emitted = emitted._replace(flags=[request.flags[row] for row in (0, *(node + 1 for node in path))])
    flags = _NONE if -1 not in request.drafts else RowStatus.DRAFT_OUT_OF_RANGE
    if any(not -1 <= parent < node for node, parent in enumerate(request.parents)):
        flags |= RowStatus.PARENT_OUT_OF_RANGE
    return outcome(emitted, len(path), [True] * len(passed), own[node + 1], flags, path)


def rejection_tree(request: Request) -> Outcome:
    """From the root, go to the first child that passes a test of what the children before it left of p and q.

    Of p they leave ``relu(p - q)``, of q what they are not: Jeon et al., arXiv 2402.14160. That is ``relu(p - b q)``
    with one number b, as no child comes twice.
    """
    assert request.parents is not None
    judged, flags = judged_nodes(request)
    node, path = -1, list[int]()
    while True:
        children = [child for child in judged if request.parents[child] == node]
        accepted, rejected, debt = first_accepted(request, node + 1, children)
        if accepted < 0:
            break
        node = accepted
        path.append(node)
    passed = [True for child in judged if passes_first(request, request.parents[child] + 1, child)]
    emitted = request._replace(drafts=[request.drafts[each] for each in path])
    emitted = emitted._replace(flags=[request.flags[row] for row in (0, *(each + 1 for each in path))])
    if rejected < 0 or request.is_greedy:
        token = draw(request, node + 1, TARGET if rejected < 0 else RESIDUAL)
        return outcome(emitted, len(path), passed, token, flags, path)
    carry = float(reciprocal(torch.tensor([debt], dtype=torch.float64))) if debt > 1.0 else 1.0
    left = residual(request, node + 1, carry, torch.float32, rejected)
    left[request.drafts[rejected]] = 0.0  # what was rejected has no residual
    if not (left > 0.0).any():
        flags |= RowStatus.ZERO_RESIDUAL
    return outcome(emitted, len(path), passed, draw(request, node + 1, RESIDUAL, left), flags, path)


def judged_nodes(request: Request) -> tuple[list[int], RowStatus]:
    """The nodes that can have been drawn where they stand, and the flags of those that cannot."""
    parents, drafts, depths = request.parents or [], request.drafts, depths_of(request.parents or [])
    judged, flags = list[int](), _NONE if -1 not in drafts else RowStatus.DRAFT_OUT_OF_RANGE
    for node, parent in enumerate(parents):
        if not depths[node + 1]:
            flags |= _NONE if -1 <= parent < node else RowStatus.PARENT_OUT_OF_RANGE
            continue
        before = [drafts[each] for each in range(node) if parents[each] == parent and depths[each + 1]]
        is_possible = request.possible[node] and (request.is_greedy or drafts[node] not in before)
        if drafts[node] >= 0 and is_possible:
            judged.append(node)
        elif drafts[node] >= 0:
            flags |= RowStatus.DRAFT_IMPOSSIBLE
    return judged, flags


def first_accepted(request: Request, row: int, children: Sequence[int]) -> tuple[int, int, float]:
    """The first child of a row that is accepted, or -1; the last that is rejected, or -1; and b of the residual."""
    p, q, rejected, debt, spent = request.p, request.q, -1, 0.0, 0
    for child in children:
        draft, inverse = request.drafts[child], q.inverse[child]
        left = p.weights[row].to(torch.float64) * p.inverse[row]
        left = left - q.weights[child].to(torch.float64) * (debt * inverse)
        total = float((torch.where(left > 0.0, left, 0.0) * UNIT).to(torch.int64).sum()) / UNIT
        rest = float((q.total[child] - spent).to(torch.float64) * inverse)
        share = float(q.weights[child, draft].to(torch.float64) * inverse)
        passes = (
            request.numbers[child] * (total * share)
            < (float(p.weights[row, draft]) * float(p.inverse[row]) - debt * share) * rest
        )
        if passes_first(request, row, child) if rejected < 0 or request.is_greedy else passes:
            return child, rejected, debt
        debt = 1.0 if rejected < 0 else debt + total * float(reciprocal(torch.tensor([rest], dtype=torch.float64)))
        rejected, spent = child, spent + int(q.weights[child, draft])
    return -1, rejected, debt


def passes_first(request: Request, row: int, child: int) -> bool:
    """Whether a child of a row is accepted as the first of its siblings."""
    p, q, draft = request.p, request.q, request.drafts[child]
    mine = float(p.weights[row, draft]) * float(q.total[child])
    theirs = float(q.weights[child, draft]) * float(p.total[row])
    return request.numbers[child] * theirs < mine


def rejection(request: Request) -> Outcome:
    """Accept a draft with probability ``min(1, p / q)``; the first that is not gives way to ``relu(p - q)``.

    Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
    """
    passed = passing(request)
    return ended(request, leading(passed), passed, carry=1.0)


def block(request: Request) -> Outcome:
    """Accept the longest prefix that passes a test of its own; Sun et al., arXiv 2403.10444.

    ``carry``, the share of the target's law that a prefix carries, is ``min(1, carry * p / q)`` from draft to draft.
    """
    carry = [1.0]
    for row in range(len(request.drafts)):
        carry.append(min(carry[-1] * ratio(*odds(request, row)), 1.0))
    longest = max(row for row, share in enumerate(carry) if prefix_passes(request, row, share))
    return ended(request, longest, passing(request), carry[longest])


def passing(request: Request) -> list[bool]:
    """Whether each draft passes the test of its own position: ``u < p / q``, strict, as ``u * (m * W) < w * M``."""
    pairs = [odds(request, row) for row in range(len(request.drafts))]
    return [u * theirs < mine for u, (mine, theirs) in zip(request.numbers, pairs, strict=True)]


def rejectable(request: Request, row: int) -> int:
    """The draft that a row judges; -1 after the last, and for one that is no token or cannot have been drawn from q."""
    return request.drafts[row] if row < len(request.drafts) and request.possible[row] else -1


def odds(request: Request, row: int) -> tuple[float, float]:
    """``w * M`` and ``m * W`` of a draft, of weight w of W in p and m of M in q; 0 and 0 if it was not drawn from q."""
    p, q, draft = request.p, request.q, rejectable(request, row)
    if draft < 0:
        return 0.0, 0.0
    return float(p.weights[row, draft]) * float(q.total[row]), float(q.weights[row, draft]) * float(p.total[row])


def ratio(mine: float, theirs: float) -> float:
    """``p / q`` from ``odds``; 0 where p is."""
    pair = torch.tensor([[mine], [theirs]], dtype=torch.float64)
    return float(draft_ratio(*pair)) if mine > 0.0 else 0.0


def prefix_passes(request: Request, row: int, carry: float) -> bool:
    """Whether ``block`` accepts all drafts before a row, if it accepts no longer prefix."""
    # The probability is S / (S + 1 - carry) before a draft of q, S the sum of relu(carry * p - q); else it is carry.
    if carry >= 1.0:
        return True
    u = request.numbers[row - 1]
    if rejectable(request, row) < 0:
        return u < carry
    left = residual(request, row, carry, torch.float64)
    total = float((torch.where(left > 0.0, left, 0.0) * UNIT).to(torch.int64).sum())
    return u * (total + (1.0 - carry) * UNIT) < total


def residual(request: Request, row: int, carry: float, dtype: torch.dtype, child: int | None = None) -> Tensor:
    """``carry * p - q`` of every token: ``[V]`` of the dtype that it is computed in."""
    # child: the draft whose proposal q is, in a tree; None for the one that the row judges.
    p, q, draft = request.p, request.q, row if child is None else child
    target = p.weights[row].to(dtype) * (carry * p.inverse[row]).to(dtype)
    return target - q.weights[draft].to(dtype) * q.inverse[draft].to(dtype)


def ended(request: Request, num_accepted: int, passed: Sequence[bool], carry: float) -> Outcome:
    """The outcome whose last token is drawn from the residual if a draft was rejected, else as the target's own is."""
    # A draft that is no token, or that q gives no weight, was not drawn from q: the token is the target's own. Where
    # nothing is left of the residual, the token is drawn from the target.
    row, draft = num_accepted, rejectable(request, num_accepted)
    flags = _NONE if all(request.possible) else RowStatus.DRAFT_IMPOSSIBLE
    if draft < 0:
        return outcome(request, row, passed, draw(request, row, TARGET), flags)
    left = residual(request, row, carry, torch.float32)
    left[draft] = 0.0  # what was rejected has no residual
    if request.is_greedy:  # its one token is no rejected one
        return outcome(request, row, passed, draw(request, row, RESIDUAL), flags)
    if not (left > 0.0).any():
        flags |= RowStatus.ZERO_RESIDUAL
    return outcome(request, row, passed, draw(request, row, RESIDUAL, left), flags)


def draw(request: Request, row: int, stream: int, left: Tensor | None = None) -> int:
    """The winner of a row's race: of the tokens with a residual ``left``, if any has one, else of those kept; or -1."""
    keep, logarithms = request.kept[row], request.logarithms[row]
    if left is not None and (left > 0.0).any():
        keep, logarithms = left > 0.0, log2_float32(left)
    bits = torch.where(keep, raced_bits(logarithms, request.noise[stream][row]), MASKED_BITS)
    winner = pack(score_order(bits), indices(len(keep), keep.device)).amax()
    return int(packed_id(winner)) if keep.any() else -1


def outcome(
    request: Request,
    num_accepted: int,
    passed: Sequence[bool],
    token: int,
    flags: RowStatus = _NONE,
    node_ids: Sequence[int] = (),
) -> Outcome:
    """The accepted drafts and one token more, with the flags of the rows that these come from."""
    # passed: whether each draft passes the test of its own position; token: -1 where its row is masked.
    status = flags
    if token < 0:
        status |= RowStatus.ALL_MASKED
    if -1 in request.drafts:
        status |= RowStatus.DRAFT_OUT_OF_RANGE
    for row in range(num_accepted + 1):
        status |= RowStatus(request.flags[row]) & (RowStatus.NAN_SEEN | RowStatus.POSITIVE_INFINITY)
    return Outcome([*request.drafts[:num_accepted], token], sum(passed), int(status), node_ids)


def leading(passed: Sequence[bool]) -> int:
    """How many pass before the first that does not."""
    return sum(takewhile(bool, passed))


class Outcome(NamedTuple):
    """What becomes of a request."""

    token_ids: list[int]  # the accepted drafts and one token more, -1 where its row is masked; nothing of padding
    num_matching: int
    status: int
    node_ids: Sequence[int] = ()  # which of a tree's drafts the accepted ones are

    @property
    def num_emitted(self) -> int:
        """The tokens to commit, without the -1 of a masked row; -1 of padding."""
        return sum(token >= 0 for token in self.token_ids) if self.token_ids else -1


_IDLE = {-1: Outcome([], -1, -1), int(RowStatus.NOT_COVERED): Outcome([-1], 0, int(RowStatus.NOT_COVERED))}
"""Of padding, and of requests that are not covered."""
