"""Rejection without filters, which weighs only rows that judge a draft: the same as the mode that weighs every row.

And the same where rows are weighed and raced for as on a GPU.
"""

import itertools

import pytest
import torch

from compiled_sampler.modes import PROPOSALS
from compiled_sampler.params import SamplingParams
from tests.builders.inputs import mode_table, slot_table
from tests.compiled_sampler.speculation.test_rules import V, ragged, same, verify
from tools.kernels.launches import for_a_gpu

FREE = [
    SamplingParams(seed=3),
    SamplingParams(seed=4, temperature=0.4),
    SamplingParams(seed=6, temperature=0.0),
    SamplingParams(seed=7, temperature=1.6),
    SamplingParams(top_k=1),
]


@pytest.mark.parametrize("kind", PROPOSALS)
@pytest.mark.parametrize(
    "lengths",
    [[0] * 6, [1, 0, 0, 0, 0, 0], [4, 3, 1, 0, 4, 4], [4, 3, -1, 0, 4, 4], [-1, 0, 2, -1, -1, 1], [4] * 6, [0, 4]],
)
def test_without_filters_a_row_that_judges_no_draft_needs_no_law(kind, lengths):
    slots = [n % 5 if k >= 0 and n != 2 else -1 for n, k in enumerate(lengths)]
    inputs = ragged(kind, lengths, slots)._replace(table=slot_table(FREE, V))
    mode = next(mode for mode in mode_table(V, "top_k") if mode.name == "no_filter")
    strange = (None, torch.nan, torch.inf, -torch.inf)
    for value, share, extra_rows in itertools.product(strange, (0.02, 1.0), (0, 3)):
        some = torch.rand(inputs.logits.shape) < share
        some &= torch.rand(len(some), 1) < 0.4
        logits = inputs.logits if value is None else torch.where(some, value, inputs.logits)
        given = inputs._replace(logits=torch.cat([logits, torch.randn(extra_rows, V)]))
        assert same(verify("rejection", kind, given, mode), verify("rejection", kind, given))


@pytest.mark.parametrize("kind", PROPOSALS)
@pytest.mark.parametrize(("rule", "name"), [("rejection", "no_filter"), ("rejection", "min_p"), ("block", "min_p")])
def test_the_ways_of_a_gpu_lead_to_the_same_tokens(rule, name, kind):
    lengths = [4, 3, 1, 0, -1, 4]
    inputs = ragged(kind, lengths, [0, 1, 2, 3, -1, 4])._replace(table=slot_table(FREE, V))
    mode = next(mode for mode in mode_table(V, "top_k") if mode.name == name)
    wanted = verify(rule, kind, inputs, mode)
    with for_a_gpu():
        assert same(verify(rule, kind, inputs, mode), wanted)
