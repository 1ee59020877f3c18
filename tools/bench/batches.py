"""Batches of the benchmark: their inputs, how the library serves them, and the eager answer they are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_sampler import Plan, SampleInputs, Sampler, VerifyInputs
from compiled_sampler.batch import tensors_of
from compiled_sampler.core.stage import Run
from compiled_sampler.engine.requests.slots import SlotState
from compiled_sampler.modes import Mode, mode_table, verifying
from compiled_sampler.pipeline.chunks import eagerly
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.pipeline.schedule import row_class, schedule_for
from compiled_sampler.pipeline.verify import verify_step
from tools.bench.cases import Case
from tools.measuring import logits_like

_MOST_ROWS = 128  # of one eager batch
_DRAFTER_TEMPERATURE = 0.9  # drafts come from a law near the target's, so that some are accepted and some are not

Results = tuple[Tensor, ...]


class Batch(NamedTuple):
    """What calls read; a request has one row, with drafts K + 1."""

    logits: Tensor
    """``[R, V]``."""
    positions: Tensor
    """int64 ``[N]``."""
    draft_token_ids: Tensor | None = None
    """int64 ``[N, K]``; None where nothing is verified."""
    draft_probs: Tensor | None = None
    """float32 ``[N * K, V]``, what the drafts were drawn from; None for one-hot drafts."""

    @property
    def num_requests(self) -> int:
        """N."""
        return self.positions.shape[0]

    def requests(self, first: int, count: int) -> Batch:
        """Views of ``count`` requests."""
        parts = []
        for tensor in self:
            times = 0 if tensor is None else tensor.shape[0] // self.num_requests
            parts.append(None if tensor is None else tensor[first * times : (first + count) * times])
        return Batch(*parts)  # type: ignore[arg-type]

    def split(self, count: int) -> Iterator[Batch]:
        """Views of ``count`` requests each, the last of fewer."""
        for first in range(0, self.num_requests, count):
            yield self.requests(first, min(count, self.num_requests - first))

    def calls(self, count: int) -> list[Batch]:
        """As ``split``, positions and drafts in tensors of their own, as an engine has them.

        Inductor copies what does not begin at a multiple of 16 bytes, which is a graph node of 0.9 us; every other
        view of a single position would not.
        """
        parts = self.split(count)
        return [p._replace(positions=p.positions.clone(), draft_token_ids=_clone(p.draft_token_ids)) for p in parts]

    def to(self, device: torch.device) -> Batch:
        """Copies on another device."""
        return Batch(*(None if tensor is None else tensor.to(device) for tensor in self))  # type: ignore[arg-type]


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


class WrongAnswer(AssertionError):
    """A result differs from eager torch, so its time is of no interest."""


def sampling_batch(
    distribution: str, requests: int, vocab_size: int, device: torch.device, dtype: torch.dtype
) -> Batch:
    """Requests without drafts, each with logits and a position of its own."""
    logits = logits_like(distribution, requests, vocab_size, device, dtype)
    return Batch(logits, torch.arange(requests, device=device))


def verification_batch(
    distribution: str, requests: int, num_drafts: int, vocab_size: int, device: torch.device, dtype: torch.dtype
) -> Batch:
    """Requests with K drafts each, drawn from their probabilities."""
    rows = requests * (num_drafts + 1)
    logits = logits_like(distribution, rows, vocab_size, device, dtype)
    judged = logits.view(requests, num_drafts + 1, vocab_size)[:, :num_drafts].reshape(-1, vocab_size)
    probs = torch.softmax(judged.float() / _DRAFTER_TEMPERATURE, -1)
    generator = torch.Generator(device).manual_seed(rows)
    drawn = (probs / torch.empty_like(probs).exponential_(generator=generator)).argmax(-1)
    positions = torch.arange(requests, device=device) * (num_drafts + 1)
    return Batch(logits, positions, drawn.view(requests, num_drafts), probs)


def plan_of(sampler: Sampler, slot: int, case: Case, requests: int) -> Plan:
    """A plan for a batch whose requests all stand in one slot."""
    return sampler.plan([slot] * requests, num_drafts=[case.num_drafts] * requests if case.rule else None)


def served(sampler: Sampler, plan: Plan, case: Case, batch: Batch) -> Results:
    """What the library returns for a batch, through its public calls."""
    if case.rule is None or batch.draft_token_ids is None:
        return sampler.sample(plan, batch.logits, batch.positions)
    draft_probs = batch.draft_probs if case.drafts == "probabilities" else None
    return sampler.verify(
        plan, batch.logits, batch.draft_token_ids, batch.positions, rule=case.rule, draft_probs=draft_probs
    )


def tune(sampler: Sampler, slot: int, case: Case, requests: int) -> None:
    """Compile what a batch needs with the number of requests that stands for it, as ``Sampler.warmup`` does."""
    times, device = case.num_drafts + 1, sampler.device
    count = row_class(requests, device)
    if row_class(count * times, device) != row_class(requests * times, device):
        count = requests
    mode = plan_of(sampler, slot, case, requests).mode
    one, other = (schedule_for(mode, n * times, device) for n in (count, requests))
    for size in (count,) if one == other else (count, requests):
        logits = torch.zeros(size * times, sampler.vocab_size, dtype=sampler.logits_dtype, device=device)
        ids = torch.zeros(size, case.num_drafts, dtype=torch.int64, device=device)
        probs = torch.full((size * case.num_drafts, sampler.vocab_size), 1.0 / sampler.vocab_size, device=device)
        batch = Batch(logits, torch.zeros(size, dtype=torch.int64, device=device), ids, probs)
        served(sampler, plan_of(sampler, slot, case, size), case, batch)


def eager(case: Case, mode: Mode, batch: Batch, run: Run = eagerly) -> Results:
    """What the pipeline returns for a batch in eager torch.

    Args:
        case: its parameters are those of every request.
        mode: of the plan that the library made.
        batch: on any device.
        run: how a stage is run.
    """
    return eager_calls(case, mode, batch.logits.device, run)(batch)


def eager_calls(case: Case, mode: Mode, device: torch.device, run: Run = eagerly) -> Callable[[Batch], Results]:
    """``eager`` for many batches: what a sampler has ready before a call, the table of requests, is made once."""
    state = SlotState(1, mode_table(mode.vocab_size, "top_k"), device)
    slot = state.add(case.params)
    state.upload()

    def made(batch: Batch) -> Results:
        slots = torch.full((batch.num_requests,), slot, device=device)
        if case.rule is None or batch.draft_token_ids is None:
            return sample_step(mode, SampleInputs(batch.logits, slots, batch.positions, state.table), run)
        inputs = VerifyInputs(
            batch.logits,
            slots,
            batch.positions,
            torch.full_like(slots, case.num_drafts),
            batch.draft_token_ids,
            batch.draft_probs if case.drafts == "probabilities" else None,
            state.table,
        )
        return verify_step(verifying(mode, case.rule, case.drafts), inputs, run)

    return made


def check(case: Case, mode: Mode, batch: Batch, results: Sequence[Results]) -> None:
    """Hold every row of every call against eager torch in batches of another size, the first against the CPU too.

    Args:
        case: what was called.
        mode: of the plan.
        batch: the inputs of all calls.
        results: of each call, in the order of the batch.

    Raises:
        WrongAnswer: a row differs.
    """
    chunks = [eager(case, mode, part) for part in batch.split(max(1, _MOST_ROWS // (case.num_drafts + 1)))]
    made, wanted = joined(results), joined(chunks)
    compare(case.name, made, wanted)
    if batch.logits.is_cuda:
        first = eager(case, mode, batch.requests(0, 1).to(torch.device("cpu")))
        compare(f"{case.name}, on the CPU", tuple(each[:1].cpu() for each in tensors_of(made)), first)


def joined(parts: Sequence[Results]) -> Results:
    """The fields of several results, one after the other."""
    return tuple(torch.cat(fields) for fields in zip(*map(tensors_of, parts), strict=True))


def compare(label: str, made: Results, wanted: Results) -> None:
    """Raise unless all fields are the same.

    Raises:
        WrongAnswer: the message counts the requests that differ and names the first.
    """
    found, expected = tensors_of(made), tensors_of(wanted)
    if [each.shape for each in found] != [each.shape for each in expected]:
        raise WrongAnswer(f"{label}: results have other shapes than eager torch gives")
    fields = [(a != b).view(len(a), -1).any(-1) for a, b in zip(found, expected, strict=True)]
    wrong = torch.stack(fields).any(0).nonzero().flatten().tolist()
    if wrong:
        total = len(fields[0])
        raise WrongAnswer(f"{label}: {len(wrong)} of {total} requests differ from eager torch, the first is {wrong[0]}")
