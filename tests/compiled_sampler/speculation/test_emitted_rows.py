"""Rows that emit a token, and results by request and place, for requests with different numbers of drafts."""

import math

import pytest
import torch

from compiled_sampler.logprobs import LogprobOutputs
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.speculation.emission import by_request, emitted_rows

NUM_DRAFTS = torch.tensor([2, -1, 0, 3, 1])
SLOTS = torch.tensor([4, -1, 0, 2, 7])
TOKEN_IDS = torch.tensor([[5, 6, -1, -1], [-1] * 4, [9, -1, -1, -1], [1, 2, 3, 8], [-1, -1, -1, -1]])
LOGITS = torch.zeros(12, 3)  # three rows of the first request, one, four, two, and two of nobody


@pytest.fixture(params=[None, CompiledStages()], ids=["eager", "compiled"])
def run(request):
    """How a stage is run."""
    return request.param or (lambda stage, *tensors: stage(*tensors))


def test_a_row_has_the_token_that_it_emits(run):
    rows = run(emitted_rows, LOGITS, SLOTS, NUM_DRAFTS, TOKEN_IDS)
    assert rows.token_ids.tolist() == [5, 6, -1, 9, 1, 2, 3, 8, -1, -1, -1, -1]
    assert rows.slots.tolist() == [4, 4, -1, 0, 2, 2, 2, 2, -1, -1, -1, -1]


def test_results_come_back_by_request_and_place(run):
    found = torch.arange(12.0)
    rows = LogprobOutputs(found, top_token_ids=torch.arange(24).view(12, 2), top=found[:, None].expand(-1, 2).clone())
    by = run(by_request, rows, NUM_DRAFTS, TOKEN_IDS)
    none = -math.inf
    wanted = [[0.0, 1.0, none, none], [none] * 4, [3.0, none, none, none], [4.0, 5.0, 6.0, 7.0], [none] * 4]
    assert by.token.tolist() == wanted
    assert by.top[..., 1].tolist() == wanted
    assert by.top_token_ids[..., 0].tolist() == [[0, 2, -1, -1], [-1] * 4, [6, -1, -1, -1], [8, 10, 12, 14], [-1] * 4]
    assert by.rank is by.given is by.entropy is by.num_kept is by.boundary is None
