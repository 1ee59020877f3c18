"""Verification in chunks of requests: the bits of all at once, and no edited copy above the bound."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_sampler import Sampler, VerifyOutputs
from compiled_sampler.pipeline.verification import request_chunks
from compiled_sampler.speculation.row_layout import rows_of_requests
from tests.builders.edited_drafts import COUNTS, FORMS, DraftBatch, K, draft_batch, drafting_sampler
from tests.builders.edits import V
from tests.builders.logprobs import EVERYTHING, bare, differing
from tests.builders.sampler import same
from tests.chunked import edited_copies_of

RULES = ("rejection", "block")
MODES = ("no_filter", "min_p", "top_k_top_p[64]", "top_k", "full")
DTYPES = torch.float32, torch.bfloat16
ROWS = (1, 8, 13)
"""Rows of a copy: of less than a request, of two requests, of three."""


@contextmanager
def counted_chunks(most: int) -> Iterator[list[int]]:
    """Within, edited copies have at most so many rows; the requests of each chunk."""
    sizes = list[int]()

    def noted(starts, drafts, *given):
        sizes.append(len(drafts))
        return rows_of_requests(starts, drafts, *given)

    with edited_copies_of(most, V), mock.patch.object(request_chunks, "rows_of_requests", noted):
        yield sizes


def assert_same(found: VerifyOutputs, wanted: VerifyOutputs) -> None:
    """All fields are the same bits."""
    assert same(bare(found), bare(wanted))
    if wanted.logprobs is not None:
        assert differing(found.logprobs, wanted.logprobs) == []


def assert_chunks_change_nothing(
    sampler: Sampler, batch: DraftBatch, rule: str, sizes: Sequence[int] = ROWS, **options: Any
) -> VerifyOutputs:
    """The results at once, which are those with copies of so many rows."""
    wanted = batch.verified(sampler, rule, **options)
    for most in sizes:
        with counted_chunks(most) as chunks:
            assert_same(batch.verified(sampler, rule, **options), wanted)
        assert len(chunks) > 1
        assert sum(chunks) == len(batch.plan.slots)
        assert max(chunks) <= max(most // (max(batch.plan.num_drafts) + 1), 1)
    return wanted


@functools.cache
def sampler_of(dtype: torch.dtype, cached: bool = False) -> Sampler:
    """One for all tests, which give slots back."""
    return drafting_sampler("eager", dtype, cached)


@contextmanager
def batch_of(sampler: Sampler, mode: str, form: str, **options: Any) -> Iterator[DraftBatch]:
    """A batch, whose requests leave at the end."""
    batch = draft_batch(sampler, mode, form, **options)
    try:
        assert batch.plan.mode.name == mode
        yield batch
    finally:
        batch.leave(sampler)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", MODES)
def test_all_edits_mixed_are_the_same_bits_in_chunks(mode, rule, form):
    seed = MODES.index(mode) + FORMS.index(form) + len(rule)
    sampler = sampler_of(DTYPES[seed % 2], cached=form == "handles" and seed % 4 < 2)
    with batch_of(sampler, mode, form, seed=seed) as batch:
        found = assert_chunks_change_nothing(sampler, batch, rule, [ROWS[seed % 3]])
    assert len(set(found.num_accepted.tolist())) > 1
