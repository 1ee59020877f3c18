"""The definition of verification has the outcomes of ``verify_step`` in every mode, whose law others look at."""

import pytest
import torch
from torch import Tensor

from compiled_sampler import SamplingParams, VerifyInputs
from compiled_sampler.batch import RowStatus
from compiled_sampler.core.noise import TARGET
from compiled_sampler.engine.requests.slots import unfiltered_table
from compiled_sampler.modes import (
    PROCESSED,
    PROPOSALS,
    RULES,
    Mode,
    mode_table,
    probabilities_mode,
    uncovered,
    verifying,
)
from compiled_sampler.pipeline.verify import verify_step
from compiled_sampler.speculation import reference
from tests.builders.inputs import full_mode, slot_table
from tests.builders.sampler import same
from tests.cases.hard_rows import mixed_batch, mixed_requests
from tests.tiers import tiers

WAYS = [("match", "one_hot"), *((rule, kind) for rule in RULES[1:] for kind in (*PROPOSALS, PROCESSED))]
COUNTS, K = (3, 0, 2, 1, 4, 2, -1, 3, 4, 1), 4
PADDING = (6, 8)


def likely_drafts(target: Tensor, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Drafts ``[N, K]``, most of them the likeliest token, some of them no token."""
    top, row = target.float().nan_to_num(0.0).argmax(-1), 0
    drafts = torch.randint(-1, vocab_size + 1, (len(COUNTS), K), generator=generator)
    for n, count in enumerate(COUNTS):
        for j in range(max(count, 0)):
            if torch.rand((), generator=generator) < 0.7:
                drafts[n, j] = top[row + j]
        row += count + 1
    drafts[0, 2], drafts[2, 1] = -1, vocab_size
    return drafts


def hard_inputs(mode: Mode, kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> VerifyInputs:
    """Ragged requests that a mode covers, with rows of every kind and two requests of padding."""
    vocab_size, generator = mode.vocab_size, torch.Generator().manual_seed(seed)
    requests = mixed_requests(vocab_size, 60, vocab_size)
    by = full_mode(vocab_size) if mode.from_probabilities else mode
    covered = torch.tensor([i for i, each in enumerate(requests) if uncovered(by, each) is None])
    slots = covered[torch.randint(len(covered), (len(COUNTS),), generator=generator)]
    slots[list(PADDING)] = -1
    num_proposals = sum(max(count, 0) for count in COUNTS)
    target = mixed_batch(requests, by, sum(COUNTS) + len(COUNTS), dtype, seed).logits
    draft_logits = mixed_batch(requests, by, num_proposals, dtype, seed + 1).logits
    if mode.from_probabilities:
        target = torch.softmax(target.float().nan_to_num(0.0, 0.0, -1e9), -1)
        target[3, 0], target[4] = torch.nan, 0.0
    probs = torch.softmax(2.0 * torch.randn(num_proposals, vocab_size, generator=generator), -1)
    probs[5], probs[::4] = 0.0, torch.softmax(draft_logits.float().nan_to_num(0.0, 0.0, -1e9), -1)[::4]
    table = slot_table(requests, vocab_size)
    return VerifyInputs(
        logits=target,
        slots=slots,
        positions=torch.randint(2**40, slots.shape, generator=generator),
        num_drafts=torch.tensor(COUNTS),
        draft_token_ids=likely_drafts(target, vocab_size, generator),
        proposals={"one_hot": None, "probabilities": probs, "logits": draft_logits}.get(kind, draft_logits),
        table=table,
        draft_table=unfiltered_table(table, vocab_size),
    )


@pytest.mark.parametrize(("rule", "kind"), WAYS)
@pytest.mark.parametrize(
    ("vocab_size", "dtype", "base"),
    tiers([(65, "bfloat16", "top_k")], [(1, "float32", "top_k"), (2, "float32", "all"), (129, "float32", "all")]),
)
def test_every_covering_mode_has_the_same_outcomes(vocab_size, dtype, rule, kind, base):
    of_probabilities = [] if kind in ("logits", PROCESSED) else [probabilities_mode(vocab_size)]
    for mode in (*mode_table(vocab_size, base), *of_probabilities):
        inputs, chosen = hard_inputs(mode, kind, getattr(torch, dtype), vocab_size), verifying(mode, rule, kind)
        assert same(reference.verify(chosen, inputs), verify_step(chosen, inputs))


def test_the_rows_above_meet_every_outcome():
    seen, flags = set[int](), 0
    for seed in range(8):
        mode = verifying(full_mode(65), "rejection", "logits" if seed % 2 else "one_hot")
        found = reference.verify(mode, hard_inputs(mode, mode.drafts, seed=seed))
        seen |= set(found.num_accepted.tolist())
        for each in found.status[found.status >= 0].tolist():
            flags |= each
    assert seen == {-1, 0, 1, 2, 3, 4}
    elsewhere = RowStatus.HISTORY_EXCEEDED | RowStatus.PARAMETER_OUT_OF_RANGE  # of edits, of functional
    elsewhere |= RowStatus.PARENT_OUT_OF_RANGE  # of trees
    assert flags == sum(RowStatus) & ~elsewhere & ~RowStatus.NOT_COVERED


WRONG = {
    "accepts_all": ("passing", lambda request: [True] * len(request.drafts)),
    "no_residual": ("residual", lambda request, row, carry, dtype: request.p.weights[row].to(dtype)),
    "noise_of_the_target": ("RESIDUAL", TARGET),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_definition_is_detected(wrong, monkeypatch):
    mode, requests = verifying(full_mode(65), "rejection", "logits"), torch.arange(60)
    target, draft_logits = torch.randn(120, 65), torch.randn(60, 65)
    drafts = torch.multinomial(torch.softmax(draft_logits, -1), 1)
    table = slot_table([SamplingParams(seed=i) for i in range(60)], 65)
    inputs = VerifyInputs(target, requests, requests, requests * 0 + 1, drafts, draft_logits, table)
    wanted = verify_step(mode, inputs)
    assert same(reference.verify(mode, inputs), wanted)
    monkeypatch.setattr(reference, *WRONG[wrong])
    assert not same(reference.verify(mode, inputs), wanted)
