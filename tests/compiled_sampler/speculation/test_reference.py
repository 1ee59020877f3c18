"""The definition of verification has the outcomes of ``verify_step`` in every mode, whose law others look at."""

import pytest
import torch

from compiled_sampler import SamplingParams
from compiled_sampler.batch import RowStatus
from compiled_sampler.core.noise import TARGET
from compiled_sampler.modes import PROCESSED, mode_table, probabilities_mode, verifying
from compiled_sampler.pipeline.chunks import without_kernels
from compiled_sampler.pipeline.verify import verify_step
from compiled_sampler.speculation import reference
from tests.builders.inputs import full_mode
from tests.builders.sampler import same
from tests.builders.verifications import WAYS, hard_verification, verify_inputs
from tests.tiers import tiers
from tools.kernels.launches import for_a_gpu


@pytest.mark.parametrize(("rule", "kind"), WAYS)
@pytest.mark.parametrize(
    ("vocab_size", "dtype", "base"),
    tiers([(65, "bfloat16", "top_k")], [(1, "float32", "top_k"), (2, "float32", "all"), (129, "float32", "all")]),
)
def test_every_covering_mode_has_the_same_outcomes(vocab_size, dtype, rule, kind, base):
    of_probabilities = [] if kind in ("logits", PROCESSED) else [probabilities_mode(vocab_size)]
    for mode in (*mode_table(vocab_size, base), *of_probabilities):
        chosen = verifying(mode, rule, kind)
        inputs = hard_verification(mode, kind, getattr(torch, dtype), vocab_size)
        wanted = reference.verify(chosen, inputs)
        assert same(wanted, verify_step(chosen, inputs))
        with for_a_gpu():
            assert same(wanted, verify_step(chosen, inputs, without_kernels))


@pytest.mark.parametrize(("counts", "extra_rows"), [((4,), 0), ((-1, 4, 2, -1, 0, 1, -1, -1), 3), ((0,) * 6, 1)])
@pytest.mark.parametrize(("rule", "kind"), WAYS)
def test_requests_alone_behind_padding_and_without_drafts_have_the_same_outcomes(rule, kind, counts, extra_rows):
    """The rows that are nobody's are not read."""
    for mode in mode_table(65, "top_k"):
        chosen = verifying(mode, rule, kind)
        inputs = hard_verification(mode, kind, seed=len(counts), counts=counts, extra_rows=extra_rows)
        assert same(reference.verify(chosen, inputs), verify_step(chosen, inputs))


def test_the_rows_above_meet_every_outcome():
    seen, flags = set[int](), 0
    for seed in range(8):
        mode = verifying(full_mode(65), "rejection", "logits" if seed % 2 else "one_hot")
        found = reference.verify(mode, hard_verification(mode, mode.drafts, seed=seed))
        assert (found.token_ids[[6, 8]] == -1).all()
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
    mode, (target, draft_logits) = verifying(full_mode(65), "rejection", "logits"), torch.randn(2, 60, 2, 65)
    drafts = torch.multinomial(torch.softmax(draft_logits[:, 0], -1), 1)
    inputs = verify_inputs(target, drafts, draft_logits[:, :1], params=[SamplingParams(seed=i) for i in range(60)])
    wanted = verify_step(mode, inputs)
    assert same(reference.verify(mode, inputs), wanted)
    monkeypatch.setattr(reference, *WRONG[wrong])
    assert not same(reference.verify(mode, inputs), wanted)
