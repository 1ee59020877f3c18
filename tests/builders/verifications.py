"""What a verification gets, without an engine: any rows and drafts, and ragged batches of hard ones with padding."""

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_sampler.batch import VerifyInputs
from compiled_sampler.engine.requests.slots import unfiltered_table
from compiled_sampler.modes import PROCESSED, PROPOSALS, RULES, Mode, uncovered
from compiled_sampler.params import SamplingParams
from tests.builders.inputs import Numbers, full_mode, slot_table
from tests.cases.hard_rows import mixed_batch, mixed_requests

WAYS = [("match", "one_hot"), *((rule, kind) for rule in RULES[1:] for kind in (*PROPOSALS, PROCESSED))]
"""Each rule with what drafts were drawn from."""


def verify_inputs(
    logits: Tensor,
    drafts: Sequence[Sequence[int]] | Tensor,
    proposals: Tensor | None = None,
    *,
    params: Sequence[SamplingParams],
    num_drafts: Numbers | None = None,
    slots: Numbers | None = None,
    positions: Numbers | None = None,
    vocab_size: int | None = None,
) -> VerifyInputs:
    """Requests with all drafts, at positions 7, 27, ..., whose slots take turns, unless given."""
    tokens = torch.as_tensor(drafts)
    count, width = tokens.shape
    table = slot_table(params, vocab_size or logits.shape[-1])
    return VerifyInputs(
        logits=logits.flatten(0, -2),
        slots=torch.arange(count) % len(params) if slots is None else torch.as_tensor(slots),
        positions=7 + 20 * torch.arange(count) if positions is None else torch.as_tensor(positions),
        num_drafts=torch.full((count,), width) if num_drafts is None else torch.as_tensor(num_drafts),
        draft_token_ids=tokens,
        proposals=None if proposals is None else proposals.flatten(0, -2),
        table=table,
        draft_table=unfiltered_table(table, vocab_size or logits.shape[-1]),
    )


COUNTS, K = (3, 0, 2, 1, 4, 2, -1, 3, 4, 1), 4
"""Drafts of requests of which the last but one is padding with rows, and the seventh padding without."""


def hard_verification(
    mode: Mode,
    kind: str,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    counts: Sequence[int] = COUNTS,
    extra_rows: int = 0,
) -> VerifyInputs:
    """Ragged requests that a mode covers, with rows of every kind and padding; the last rows may be nobody's."""
    vocab_size, generator = mode.vocab_size, torch.Generator().manual_seed(seed)
    requests = mixed_requests(vocab_size, 60, vocab_size)
    by = full_mode(vocab_size) if mode.from_probabilities else mode
    covered = torch.tensor([i for i, each in enumerate(requests) if uncovered(by, each) is None])
    slots = covered[torch.randint(len(covered), (len(counts),), generator=generator)]
    slots[torch.tensor(counts) < 0] = -1
    slots[8:9] = -1
    num_proposals = sum(max(count, 0) for count in counts)
    target = mixed_batch(requests, by, sum(counts) + len(counts) + extra_rows, dtype, seed).logits
    draft_logits = mixed_batch(requests, by, num_proposals, dtype, seed + 1).logits
    if mode.from_probabilities:
        target = torch.softmax(target.float().nan_to_num(0.0, 0.0, -1e9), -1)
        target[3:4, 0], target[4:5] = torch.nan, 0.0
    probs = torch.softmax(2.0 * torch.randn(num_proposals, vocab_size, generator=generator), -1)
    probs[5:6], probs[::4] = 0.0, torch.softmax(draft_logits.float().nan_to_num(0.0, 0.0, -1e9), -1)[::4]
    return verify_inputs(
        target,
        _likely_drafts(target, vocab_size, counts, generator),
        {"one_hot": None, "probabilities": probs}.get(kind, draft_logits),
        params=requests,
        num_drafts=counts,
        slots=slots,
        positions=torch.randint(2**40, slots.shape, generator=generator),
        vocab_size=vocab_size,
    )


def _likely_drafts(target: Tensor, vocab_size: int, counts: Sequence[int], generator: torch.Generator) -> Tensor:
    """Drafts ``[N, K]``, most of them the likeliest token, some of them no token."""
    top, row = target.float().nan_to_num(0.0).argmax(-1), 0
    drafts = torch.randint(-1, vocab_size + 1, (len(counts), K), generator=generator)
    for n, count in enumerate(counts):
        for j in range(max(count, 0)):
            if torch.rand((), generator=generator) < 0.7:
                drafts[n, j] = top[row + j]
        row += count + 1
    drafts[0, 2:3], drafts[2:3, 1] = -1, vocab_size
    return drafts
