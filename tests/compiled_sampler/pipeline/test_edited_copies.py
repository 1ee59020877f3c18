"""Edited copies of a verification: which are bounded, that they stay so, and that a chunk reads its own rows."""

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.batch import RequestRows
from compiled_sampler.modes import mode_table, verifying
from compiled_sampler.pipeline import verify_chunks
from compiled_sampler.pipeline.schedule import EDITED_BYTES, LARGE_ROWS, request_ends, warmup_batches
from compiled_sampler.speculation.row_layout import rows_of_requests
from tests.builders.edited_drafts import draft_batch, drafting_sampler
from tests.builders.edits import V
from tests.builders.sampler import same
from tests.chunked import request_chunks_of
from tests.tiers import tiers
from tools.bench.memory import scratch_bytes

N, K, LARGE = 24, 3, 2000
BIAS = {"logit_bias": {n: 1.0 for n in range(5)}}


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation made."""

    def __init__(self) -> None:
        """None yet."""
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation as it is."""
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and func._schema.returns[0].alias_info is None:
            self.elements = max(self.elements, made.numel())
        return made


def verification(count: int, rule: str, **params: Any) -> Any:
    """A call that verifies ``count`` requests of ``K`` drafts, with draft logits, a mask, lists and a row filter."""
    sampler = Sampler(LARGE, count, backend="eager", history_len=16)
    params = {"frequency_penalty": 0.5, "top_n_sigma": 2.0, **BIAS, **params}
    slots = [sampler.add_request(SamplingParams(seed=n, **params), [1, 2]) for n in range(count)]
    plan, rows = sampler.plan(slots, num_drafts=[K] * count), count * (K + 1)
    logits, draft_logits = torch.randn(rows, LARGE), torch.randn(count * K, LARGE)
    drafts, positions = torch.randint(LARGE, (count, K)), torch.full((count,), 2)
    masks = torch.full((rows, -(-LARGE // 32)), -2, dtype=torch.int32)
    options = {"draft_logits": draft_logits, "token_bitmask": masks}
    return lambda: sampler.verify(plan, logits, drafts, positions, rule, **options)


@pytest.mark.parametrize("params", tiers([{}], [{}, {"top_k": 20, "top_p": 0.9}, {"top_p": 0.9}]), ids=str)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_no_tensor_of_a_chunked_step_is_above_the_bound(rule, params):
    most, padded, small = 4 * (K + 1), 2048, 2**10
    work, alone = verification(N, rule, **params), verification(4, rule, **params)
    with Largest() as seen:
        work()
    assert seen.elements >= N * (K + 1) * LARGE
    with request_chunks_of(most, LARGE) as chunks:
        with Largest() as seen:
            work()
        assert chunks == [4] * (N // 4)
        assert seen.elements <= most * padded
        held = scratch_bytes(work, torch.device("cpu"))
    assert held <= scratch_bytes(alone, torch.device("cpu")) + small * N * (K + 1)


@pytest.mark.parametrize("rows", [N * (K + 1) - 1, N * (K + 1)])
def test_a_batch_within_the_bound_is_not_cut(rows):
    work = verification(N, "rejection")
    with request_chunks_of(rows, LARGE) as chunks:
        work()
    assert bool(chunks) == (rows < N * (K + 1))


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
    sampler = drafting_sampler()
    batch = draft_batch(sampler, "top_k_top_p[64]", "logits")
    wanted = batch.verified(sampler, "block")

    def moved(*read: Any) -> RequestRows:
        rows = rows_of_requests(*read)
        return rows._replace(**{field: getattr(rows, field).roll(1)})

    with request_chunks_of(8, V):
        assert same(batch.verified(sampler, "block"), wanted)
        with mock.patch.object(verify_chunks, "rows_of_requests", moved):
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
