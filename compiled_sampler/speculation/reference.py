"""The definition of draft verification: one request after another, one draft after another, in plain torch.

The fast stages of this folder compute the same bits for all requests at once; ``Sampler(..., backend="reference")``
runs this. A request with k drafts has k + 1 rows of the target, and every draft has a row that it was drawn from.
Below, p is the law of a row of the target and q that of a draft: integer weights over their exact total. A Python float
is a float64, rounded once an operation, as on every other path.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler.batch import RowStatus, VerifyInputs, VerifyOutputs
from compiled_sampler.core.noise import RESIDUAL, TARGET
from compiled_sampler.core.order import MASKED_BITS, indices, pack, packed_id, score_order
from compiled_sampler.core.score import raced_bits
from compiled_sampler.modes import Mode
from compiled_sampler.speculation.acceptance import UNIT, draft_ratio
from compiled_sampler.speculation.request import Request, requests_of
from compiled_sampler.speculation.residual import log2

_NONE = RowStatus(0)


def verify(mode: Mode, inputs: VerifyInputs) -> VerifyOutputs:
    """Accept the drafts of every request as far as the mode's rule does, and draw one token more."""
    width, rule = inputs.draft_token_ids.shape[1], {"match": match, "rejection": rejection, "block": block}[mode.rule]
    found = [_IDLE[each] if isinstance(each, int) else rule(each) for each in requests_of(mode, inputs)]
    token_ids = [[*each.token_ids, *[-1] * (width + 1 - len(each.token_ids))] for each in found]

    def column(values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=inputs.slots.device)

    return VerifyOutputs(
        token_ids=column(token_ids).view(len(found), width + 1),
        num_emitted=column([each.num_emitted for each in found]),
        num_accepted=column([len(each.token_ids) - 1 for each in found]),
        num_matching=column([each.num_matching for each in found]),
        status=column([each.status for each in found], torch.int32),
    )


def match(request: Request) -> Outcome:
    """Accept a draft while it is the token that the target itself draws at its position."""
    own = [draw(request, row, TARGET) for row in range(len(request.drafts) + 1)]
    passed = [token == draft >= 0 for token, draft in zip(own, request.drafts, strict=False)]
    return outcome(request, leading(passed), passed, own[leading(passed)])


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
    # Before a draft of q with probability S / (S + 1 - carry), S the sum of relu(carry * p - q); else carry.
    if carry >= 1.0:
        return True
    u = request.numbers[row - 1]
    if rejectable(request, row) < 0:
        return u < carry
    left = residual(request, row, carry, torch.float64)
    total = float((torch.where(left > 0.0, left, 0.0) * UNIT).to(torch.int64).sum())
    return u * (total + (1.0 - carry) * UNIT) < total


def residual(request: Request, row: int, carry: float, dtype: torch.dtype) -> Tensor:
    """``carry * p - q`` of every token: ``[V]`` of the dtype that it is computed in."""
    p, q = request.p, request.q
    target = p.weights[row].to(dtype) * (carry * p.inverse[row]).to(dtype)
    return target - q.weights[row].to(dtype) * q.inverse[row].to(dtype)


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
        keep, logarithms = left > 0.0, log2(left)
    bits = torch.where(keep, raced_bits(logarithms, request.noise[stream][row]), MASKED_BITS)
    winner = pack(score_order(bits), indices(len(keep), keep.device)).amax()
    return int(packed_id(winner)) if keep.any() else -1


def outcome(
    request: Request, num_accepted: int, passed: Sequence[bool], token: int, flags: RowStatus = _NONE
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
    return Outcome([*request.drafts[:num_accepted], token], sum(passed), int(status))


def leading(passed: Sequence[bool]) -> int:
    """How many pass before the first that does not."""
    return sum(takewhile(bool, passed))


class Outcome(NamedTuple):
    """What becomes of a request."""

    token_ids: list[int]
    """The accepted drafts and one token more, -1 where its row is masked; nothing of padding."""
    num_matching: int
    status: int

    @property
    def num_emitted(self) -> int:
        """The tokens to commit, without the -1 of a masked row; -1 of padding."""
        return sum(token >= 0 for token in self.token_ids) if self.token_ids else -1


_IDLE = {-1: Outcome([], -1, -1), int(RowStatus.NOT_COVERED): Outcome([-1], 0, int(RowStatus.NOT_COVERED))}
"""Of padding, and of requests that are not covered."""
