"""Batches with drafts of every kind, and the tokens that the plain sampler gives for their rows."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams, VerifyOutputs
from compiled_sampler.modes import Mode
from tools.exactness.hard_rows import hard_rows, mixed_batch
from tools.exactness.verification_paths import BATCH, WIDTH, Job, V


def job(sampler: Sampler, requests: list[SamplingParams], mode: Mode, seed: int) -> Job:
    """A batch for requests that the mode covers; equal arguments give equal batches.

    Args:
        sampler: eager, holds the requests in slots 0, 1, ...
        requests: by slot.
        mode: gives V.
        seed: of everything.
    """
    generator = torch.Generator().manual_seed(seed)
    _, slots, positions = mixed_batch(requests, mode, BATCH, torch.float32, seed)
    positions = positions.clamp(max=2**63 - 1 - WIDTH)
    num_drafts = torch.randint(WIDTH + 1, (BATCH,), generator=generator)
    request = torch.arange(BATCH).repeat_interleave(num_drafts + 1)
    offset = torch.arange(len(request)) - (num_drafts + 1).cumsum(0)[request] + num_drafts[request] + 1
    of_row, where = slots[request], positions[request] + offset
    logits = hard_rows([requests[slot] for slot in of_row.tolist()], where, V, generator)
    other = logits + 0.7 * torch.randn(logits.shape, generator=generator)

    def sampled(x: Tensor) -> Tensor:
        return sampler.sample(sampler.plan(of_row.tolist()), x, where).token_ids

    random_ids = torch.randint(-2, V + 2, (len(request),), generator=generator)
    drafters = torch.stack([sampled(logits), random_ids, logits.nan_to_num(-torch.inf).argmax(-1), sampled(other)])
    drafts = torch.full((BATCH, WIDTH), -1)
    judged = offset < num_drafts[request]
    chosen = torch.randint(len(drafters), (BATCH,), generator=generator)[request]
    drafts[request[judged], offset[judged]] = drafters[chosen, torch.arange(len(request))][judged]
    proposals = torch.softmax(other.nan_to_num(0.0, 50.0, -50.0).clamp(-50.0, 50.0), -1)[judged]
    return Job(logits, slots, positions, num_drafts, drafts, proposals)


def stream(sampler: Sampler, work: Job) -> VerifyOutputs:
    """What ``match`` must give, from the plain sampler's tokens of every row; the status is left at 0."""
    counts = (work.num_drafts + 1).tolist()
    slots = [slot for slot, count in zip(work.slots.tolist(), counts, strict=True) for _ in range(count)]
    where = torch.cat([at + torch.arange(count) for at, count in zip(work.positions, counts, strict=True)])
    tokens = sampler.sample(sampler.plan(slots), work.logits, where).token_ids.split(counts)
    out = torch.full((len(counts), WIDTH + 1), -1)
    accepted, matching = [], []
    for n, (own, drafts) in enumerate(zip(tokens, work.drafts.tolist(), strict=True)):
        hits = [a == b != -1 for a, b in zip(own[:-1].tolist(), drafts, strict=False)]
        length = hits.index(False) if False in hits else len(hits)
        out[n, : length + 1] = own[: length + 1]
        accepted.append(length)
        matching.append(sum(hits))
    emitted = (out >= 0).sum(-1)  # a row that is all masked gives no token
    counters = emitted, torch.tensor(accepted), torch.tensor(matching)
    return VerifyOutputs(out, *counters, torch.zeros(len(counts), dtype=torch.int32))
