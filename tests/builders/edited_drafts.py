"""Batches of drafts whose requests have all edits mixed, those of the user too, and their verification by a sampler."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_sampler import Draft, Plan, Sampler, VerifyOutputs
from tests.builders import custom_edits
from tests.builders.edits import V, hard_logits, random_mask, random_request
from tests.builders.sampler import REQUESTS, SHARED_SLOTS

K = 3
FORMS = ("one_hot", "probabilities", "logits", "processed", "handles")
COUNTS = (3, 0, 2, 1, 3, 0, 0, 3, 2)
"""Drafts of each request: ragged, the last ones of a chunk without any, and no multiple of any chunk."""


class DraftBatch(NamedTuple):
    """What one call of ``verify`` gets."""

    plan: Plan
    logits: Tensor
    drafts: Tensor | list[Draft]
    positions: Tensor
    given: dict[str, Any]
    """Proposals, a mask, and what edits of the user read."""

    def verified(self, sampler: Sampler, rule: str, **options: Any) -> VerifyOutputs:
        """The results; the logits are a copy, which edits may write."""
        logits = torch.empty_like(self.logits).copy_(self.logits)
        return sampler.verify(self.plan, logits, self.drafts, self.positions, rule, **self.given, **options)

    def leave(self, sampler: Sampler) -> None:
        for slot in self.plan.slots:
            sampler.remove_request(slot)


def drafting_sampler(backend: str = "eager", dtype: torch.dtype = torch.float32, cached: bool = False) -> Sampler:
    """A sampler that has the edits of the user and a history."""
    options = {"logits_dtype": dtype, "draft_cache_len": K if cached else 0}
    return custom_edits.custom_sampler(backend, SHARED_SLOTS, **options)


def added(sampler: Sampler, mode: str, source: random.Random, count: int) -> tuple[list[int], Tensor]:
    """The slots of requests with random edits, for which a mode is the cheapest; and the positions of their tokens."""
    slots, positions = list[int](), list[int]()
    for number in range(count):
        request = random_request(source, V)
        own = [name for name in custom_edits.EDITS if source.random() < 0.4]
        of_mode = REQUESTS["greedy" if number == 1 else mode]
        filters = {name: getattr(of_mode, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        extra = {name: custom_edits.OF_EDIT[name] for name in own}
        params = replace(request.params, **filters, seed=number, extra_args=extra)
        slots.append(sampler.add_request(params, request.prompt, request.output))
        positions.append(request.position)
    return slots, torch.tensor(positions)


def draft_batch(
    sampler: Sampler, mode: str, form: str, *, counts: Sequence[int] = COUNTS, masked: bool = True, seed: int = 0
) -> DraftBatch:
    """Requests of a mode with ``counts`` drafts each, which rows near the target's give under the same edits."""
    source, generator = random.Random(f"{mode} {form} {seed}"), torch.Generator().manual_seed(seed)
    slots, positions = added(sampler, mode, source, len(counts))
    rows, plan = sum(counts) + len(counts), sampler.plan(slots, num_drafts=list(counts))
    logits = hard_logits(source, rows, sampler.logits_dtype)
    of_edits = {"edit_inputs": custom_edits.random_inputs(rows, seed)}
    mask = {"token_bitmask": random_mask(source, rows, V)} if masked else {}
    handles, proposed = list[Draft](), list[Tensor]()
    for place in range(max(counts)):
        row = torch.tensor(plan.first_rows) + torch.tensor(counts).clamp(max=place)
        near = logits[row].nan_to_num(0.0, 9.0, -9.0) + torch.randn(len(row), V, generator=generator)
        proposed.append(near.to(sampler.logits_dtype))
        read = {name: each[row] for name, each in mask.items()}
        own = {name: each[row] for name, each in of_edits["edit_inputs"].items()}
        where = {"coupled": False, "offset": place, "edit_inputs": own}
        handles.append(sampler.draft(sampler.plan(slots), proposed[-1], positions + place, **where, **read))
    drafts: Tensor | list[Draft] = handles
    given: dict[str, Any] = {**of_edits, **mask}
    if form != "handles":
        pairs = [(n, place) for n, count in enumerate(counts) for place in range(count)]
        drafts = torch.tensor([int(handles[place].token_ids[n]) for n, place in pairs], dtype=torch.int64)
        drafts[4::9] = V + 3
        read_from = [proposed[place][n] for n, place in pairs]
        values = torch.stack(read_from) if pairs else logits[:0]
        given |= _proposals(form, values)
    return DraftBatch(plan, logits, drafts, positions, given)


def _proposals(form: str, values: Tensor) -> dict[str, Any]:
    """What a call is given of the logits ``[D, V]`` that drafts were drawn from."""
    if form == "one_hot":
        return {}
    if form == "probabilities":
        return {"draft_probs": values.float().softmax(-1)}
    return {"draft_logits": values, "draft_logits_are": "raw" if form == "logits" else form}
