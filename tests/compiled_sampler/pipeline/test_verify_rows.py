"""Verification in chunks of requests: the bits of all at once, and no edited copy above the bound."""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_sampler import Sampler, SamplingParams, Verification, VerifyOutputs
from compiled_sampler.batch import RequestRows
from compiled_sampler.logprobs import LAWS
from compiled_sampler.modes import mode_table, verifying
from compiled_sampler.pipeline import verify_rows
from compiled_sampler.pipeline.schedule import EDITED_BYTES, LARGE_ROWS, request_ends, warmup_batches
from compiled_sampler.speculation.row_layout import rows_of_requests
from tests.builders.edited_drafts import COUNTS, FORMS, DraftBatch, K, draft_batch, drafting_sampler
from tests.builders.edits import V, edited_sampler, random_mask
from tests.builders.logprobs import EVERYTHING, bare, differing
from tests.builders.sampler import SHARED_SLOTS, replay_recordings, same
from tests.chunked import request_chunks_of
from tests.tiers import tiers
from tests.torch_states import Operations
from tools.bench.memory import scratch_bytes

RULES = ("rejection", "block")
MODES = ("no_filter", "min_p", "top_k_top_p[64]", "top_k", "full")
DTYPES = torch.float32, torch.bfloat16
ROWS = (1, 8, 13)
"""Rows of a copy: of less than a request, of two requests, of three."""


def assert_same(found: VerifyOutputs, wanted: VerifyOutputs) -> None:
    assert same(bare(found), bare(wanted))
    if wanted.logprobs is not None:
        assert differing(found.logprobs, wanted.logprobs) == []


def assert_chunks_change_nothing(
    sampler: Sampler, batch: DraftBatch, rule: str, sizes: Sequence[int], **options: Any
) -> VerifyOutputs:
    """The results at once, which are those with copies of so many rows."""
    wanted = batch.verified(sampler, rule, **options)
    for most in sizes:
        with request_chunks_of(most, V) as chunks:
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
    batch = draft_batch(sampler, mode, form, **options)
    try:
        assert batch.plan.mode.name == mode
        yield batch
    finally:
        batch.leave(sampler)


CASES = [
    (MODES[(number + shift) % len(MODES)], rule, form)
    for number, form in enumerate(FORMS)
    for rule, shifts in (("rejection", (0, 2)), ("block", (1, 3)))
    for shift in shifts
]


@pytest.mark.parametrize(("mode", "rule", "form"), tiers(CASES[::4], CASES))
def test_all_edits_mixed_are_the_same_bits_in_chunks(mode, rule, form):
    seed = CASES.index((mode, rule, form))
    sampler = sampler_of(DTYPES[seed % 2], cached=form == "handles" and seed % 4 < 2)
    with batch_of(sampler, mode, form, seed=seed) as batch:
        found = assert_chunks_change_nothing(sampler, batch, rule, [ROWS[seed % 3]])
    assert len(set(found.num_accepted.tolist())) > 1


@pytest.mark.parametrize("of", range(3), ids=LAWS)
def test_logprobs_of_every_law_are_the_same_bits_in_chunks(of):
    """A boundary is refused beside filters of whole rows."""
    sampler, asked = sampler_of(torch.bfloat16), replace(EVERYTHING[of], boundary=False)
    with batch_of(sampler, MODES[of], "logits", seed=of) as batch:
        found = assert_chunks_change_nothing(sampler, batch, RULES[of % 2], [8], logprobs=asked)
    assert (found.logprobs.token > -torch.inf).any()


@pytest.mark.parametrize(("counts", "rows"), [((0,) * 9, 4), ((0, 3, 0, 0, 0), 1), ((3, 0, 0, 0, 3), 4)], ids=str)
def test_requests_without_drafts_have_the_same_bits_in_chunks(counts, rows):
    sampler = sampler_of(torch.float32)
    with batch_of(sampler, "no_filter", "logits", counts=counts) as batch:
        assert_chunks_change_nothing(sampler, batch, "rejection", [rows])


def test_counts_and_slots_on_the_device_are_the_same_bits_in_chunks():
    """Ragged counts in a plan of full ones, of int32, padding among them: without rows, and with a row of its own."""
    sampler, given = sampler_of(torch.float32), [3, -1, 0, 0, 2, -1, -1, 1, 3]
    with batch_of(sampler, "top_k_top_p[64]", "handles", counts=(K,) * 9) as batch:
        slots = torch.tensor([-1 if n in (1, 3, 5, 6) else slot for n, slot in enumerate(batch.plan.slots)])
        buffers = {"slot_ids": slots.int(), "draft_counts": torch.tensor(given, dtype=torch.int32)}
        batch = batch._replace(plan=replace(batch.plan, **buffers))
        found = assert_chunks_change_nothing(sampler, batch, "block", [8])
        assert [each < 0 for each in found.status.tolist()] == [slot < 0 for slot in slots.tolist()]


LISTS = {"logit_bias": {5: 2.0}, "repetition_penalty": 1.5}


def lists_and_masks(sampler: Sampler, counts: Sequence[int], given: dict[str, Any] = LISTS) -> DraftBatch:
    """A batch with edits that write a few tokens and a mask, and with draft logits: few stages to compile."""
    source, size = torch.Generator().manual_seed(1), sampler.vocab_size
    slots = [sampler.add_request(SamplingParams(seed=n, **given), [1, 2, 3]) for n in range(len(counts))]
    plan = sampler.plan(slots, num_drafts=counts)
    logits, rows = (torch.randn(n, size, generator=source) for n in (plan.num_rows, plan.num_proposals))
    drafts = torch.randint(size, (len(rows),), generator=source)
    options = {"draft_logits": rows, "token_bitmask": random_mask(random.Random(1), len(logits), size)}
    return DraftBatch(plan, logits, drafts, torch.full((len(counts),), 3), options)


@pytest.mark.full
def test_compiled_chunks_have_the_bits_of_eager_torch():
    """A last chunk of one request too, of 9 in chunks of 2, though stages are compiled for several alone."""
    samplers = [edited_sampler(backend, SHARED_SLOTS) for backend in ("eager", "compiled")]
    wanted = lists_and_masks(samplers[0], COUNTS).verified(samplers[0], "block")
    with request_chunks_of(8, V) as chunks:
        assert_same(lists_and_masks(samplers[1], COUNTS).verified(samplers[1], "block"), wanted)
    assert min(chunks) == 1


def test_recorded_steps_are_in_chunks():
    edits = ("token_bitmask", "logit_bias", "penalties")
    ways = [Verification("block", K, "logits")]
    eager = edited_sampler("eager", 8)
    recorded = edited_sampler("eager", 8, captured_edits=[edits], verifications=ways, buckets=[2, 8])
    replay_recordings(recorded)
    with request_chunks_of(8, V) as chunks:
        recorded.warmup(modes=["no_filter"])
    assert chunks
    found, wanted = (lists_and_masks(each, COUNTS[:6]).verified(each, "block") for each in (recorded, eager))
    assert_same(found, wanted)
    assert recorded.statistics().direct_runs == 0


N, LARGE = 24, 2000
BIAS = {"logit_bias": {n: 1.0 for n in range(5)}}


def largest(work: Callable[[], object]) -> int:
    """The most elements of a tensor that an operation made."""
    sizes = [0]

    def see(function: Any, given: Any, made: Any) -> None:
        if isinstance(made, torch.Tensor) and function._schema.returns[0].alias_info is None:
            sizes.append(made.numel())

    with Operations(see):
        work()
    return max(sizes)


def verification(count: int, rule: str, **params: Any) -> Any:
    """A call that verifies ``count`` requests of ``K`` drafts, with draft logits, a mask, lists and a row filter."""
    sampler = Sampler(LARGE, count, backend="eager", history_len=16)
    given = {"frequency_penalty": 0.5, "top_n_sigma": 2.0, **BIAS, **params}
    *batch, options = lists_and_masks(sampler, [K] * count, given)
    return lambda: sampler.verify(*batch, rule, **options)


@pytest.mark.parametrize(
    ("rule", "params"),
    tiers([("block", {})], [("rejection", {}), ("block", {"top_k": 20, "top_p": 0.9}), ("rejection", {"top_p": 0.9})]),
    ids=str,
)
def test_no_tensor_of_a_chunked_step_is_above_the_bound(rule, params):
    most, padded, small = 4 * (K + 1), 2048, 2**10
    work, alone = verification(N, rule, **params), verification(4, rule, **params)
    assert largest(work) >= N * (K + 1) * LARGE
    with request_chunks_of(most, LARGE) as chunks:
        assert largest(work) <= most * padded
        assert chunks == [4] * (N // 4)
        held = scratch_bytes(work, torch.device("cpu"))
    assert held <= scratch_bytes(alone, torch.device("cpu")) + small * N * (K + 1)


UNCUT = [
    ("match", BIAS, {}),
    ("block", {"temperature": 0.0, **BIAS}, {}),
    ("rejection", BIAS, {"consume_logits": True}),
    ("rejection", {}, {}),
    ("block", {"stop_token_ids": (3,)}, {}),
]


@pytest.mark.parametrize(("rule", "params", "options"), [*UNCUT, ("rejection", BIAS, {})], ids=str)
def test_only_steps_that_need_edited_rows_together_are_in_chunks(rule, params, options):
    """Others edit row by row, where the logits are written, or nothing."""
    sampler = Sampler(V, N, backend="eager")
    slots = [sampler.add_request(SamplingParams(seed=n, **params)) for n in range(N)]
    plan = sampler.plan(slots, num_drafts=[K] * N)
    drafts, positions = torch.randint(V, (N, K)), torch.zeros(N, dtype=torch.int64)
    with request_chunks_of(8, V) as chunks:
        sampler.verify(plan, torch.randn(N * (K + 1), V), drafts, positions, rule, **options)
        assert bool(chunks) == ((rule, params, options) not in UNCUT)
        chunks.clear()
        sampler.verify_from_probs(plan, torch.rand(N * (K + 1), V), drafts, positions, rule=rule)
        assert not chunks


@pytest.mark.parametrize("field", RequestRows._fields)
def test_the_comparison_sees_rows_of_another_request(field):
    def moved(*read: Any) -> RequestRows:
        rows = rows_of_requests(*read)
        return rows._replace(**{field: getattr(rows, field).roll(1)})

    sampler = sampler_of(torch.float32)
    with batch_of(sampler, "top_k_top_p[64]", "logits") as batch, request_chunks_of(8, V):
        wanted = batch.verified(sampler, "block")
        with mock.patch.object(verify_rows, "rows_of_requests", moved):
            assert not same(batch.verified(sampler, "block"), wanted)


@given(st.integers(1, 3000), st.integers(1, 65), st.integers(1, 2**22 - 1))
def test_a_chunk_has_no_more_rows_than_a_copy_and_a_request_at_least(requests, times, vocab_size):
    mode = verifying(mode_table(vocab_size, "top_k")[1], "block", "logits")
    rows = requests * times
    ends = request_ends(mode, requests, rows, times)
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    assert sum(sizes) == requests
    assert min(sizes) > 0
    if rows * 4 * vocab_size <= EDITED_BYTES:
        assert len(sizes) == 1
    else:
        assert max(sizes) * times * 4 * vocab_size <= EDITED_BYTES or max(sizes) == 1
        assert max(sizes) - min(sizes) <= 3
        assert len(sizes) <= 2 + 2 * rows * 4 * vocab_size // EDITED_BYTES or max(sizes) <= 2


@pytest.mark.parametrize(("rule", "cut"), [("match", [False]), ("rejection", [True, False])])
def test_batches_in_chunks_are_warmed_up_besides_those_at_once(rule, cut):
    """Both have many rows, but a copy picks rows in a chunk alone."""
    mode, sizes = verifying(mode_table(151_936, "top_k")[1], rule), [8, LARGE_ROWS, 200]
    found = warmup_batches(mode, sizes, K + 1, torch.device("cpu"), is_edited=True)
    many = [(size, rows) for size, rows in found if size >= LARGE_ROWS]
    assert [len(request_ends(mode, *batch, K + 1)) > 1 for batch in many] == cut
    assert len(warmup_batches(mode, sizes, K + 1, torch.device("cpu"))) == len(found) - len(cut) + 1
