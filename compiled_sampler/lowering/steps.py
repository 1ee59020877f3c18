"""The steps of the pipeline with compiled stages, or in eager torch where there are none."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import ProbabilityOutputs, SampleInputs, SampleOutputs, VerifyInputs, VerifyOutputs
from compiled_sampler.core.stage import Run, call
from compiled_sampler.modes import Mode
from compiled_sampler.pipeline.verify import probability_step, sample_step, verify_step
from compiled_sampler.speculation.row_layout import with_padding


def sampling_step(mode: Mode, inputs: SampleInputs, stages: Run | None) -> SampleOutputs:
    """Tokens of ``pipeline.sample_step``; ``stages`` runs its stages, None in eager torch."""
    return sample_step(mode, inputs, call if stages is None else stages)


def probabilities_step(mode: Mode, inputs: SampleInputs, stages: Run | None) -> ProbabilityOutputs:
    """Distributions of ``pipeline.probability_step``; arguments as ``sampling_step``."""
    return probability_step(mode, inputs, call if stages is None else stages)


def verification_step(mode: Mode, inputs: VerifyInputs, stages: Run | None) -> VerifyOutputs:
    """Tokens and counts of ``pipeline.verify_step``; arguments as ``sampling_step``.

    With compiled stages a single request gets another of padding, and single rows too, so that all stages are compiled
    for several alone: a third of the kernels.
    """
    if stages is None:
        return verify_step(mode, inputs, call)
    logits, slots, positions, num_drafts, draft_token_ids, proposals, table = inputs
    single = slots.shape[0] == 1
    requests = slots, positions, num_drafts, draft_token_ids
    slots, positions, num_drafts, draft_token_ids = stages(with_padding, *requests) if single else requests
    proposals = None if proposals is None else _two_rows(proposals)
    several = VerifyInputs(_two_rows(logits), slots, positions, num_drafts, draft_token_ids, proposals, table)
    made = verify_step(mode, several, stages)
    return VerifyOutputs(*(each[:1] for each in made)) if single else made


def _two_rows(values: Tensor) -> Tensor:
    """At least two rows, the new ones 0."""
    return values if values.shape[0] > 1 else F.pad(values, (0, 0, 0, 2 - values.shape[0]))
