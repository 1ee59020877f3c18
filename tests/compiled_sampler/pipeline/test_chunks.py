"""Chunks of rows: the same bits as all rows at once, in every step and mode, and never more rows than allowed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compiled_sampler import EditRows, LogitEdit, Sampler
from compiled_sampler.batch import SampleInputs, VerifyInputs, tensors_of
from compiled_sampler.core.stage import Run
from compiled_sampler.lowering.compile_queue import PROCESSES_VARIABLE
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.modes import RULES, Mode, probabilities_mode, verifying
from compiled_sampler.params import SamplingParams
from compiled_sampler.pipeline import chunks
from compiled_sampler.pipeline.chunks import chunk_ends, without_kernels
from compiled_sampler.pipeline.law import probability_step
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.pipeline.verify import verify_step
from tests.builders.custom_edits import given_to_all
from tests.builders.edits import OF_EDIT
from tests.builders.inputs import modes_by_name, slot_table
from tests.builders.sampler import REQUESTS
from tests.builders.sampler import V as SHARED_V
from tests.chunked import chunks_of, eager_scratch_of
from tests.tiers import tiers
from tools.bench.memory import scratch_bytes
from tools.kernels.launches import for_a_gpu

V, R, K, CHUNK = 300, 75, 3, 16


@dataclass(frozen=True)
class Lifted(LogitEdit):
    """An edit of some tokens that depends on the row."""

    def edit(self, x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
        return x + torch.where((ids % 3 == 0) & (rows.positions % 2 == 1), 4.0, 0.0)


def inputs_of(name: str, vocab_size: int = V) -> SampleInputs:
    """Rows of every kind: normal and tied, of two seeds, with a NaN, +inf and padding."""
    generator = torch.Generator().manual_seed(5)
    logits = 3.0 * torch.randn(R, vocab_size + 5, generator=generator)
    logits[::3] = logits[::3].round()
    logits[7, 11], logits[20, 5], logits[40] = torch.nan, torch.inf, -torch.inf
    slots, positions = torch.arange(R) % 2, torch.arange(R) * 7
    slots[33] = -1
    table = slot_table([replace(REQUESTS[name], seed=seed) for seed in (1, 2)], vocab_size)
    return SampleInputs(logits, slots, positions, table)


def drafted(mode: Mode, name: str) -> VerifyInputs:
    """Ragged requests with the rows above, or their probabilities, and drafts that are partly the likely tokens."""
    sampled = inputs_of(name)
    counts = torch.tensor([3, 0, 2, -1, 1, 3] * 5)
    logits = sampled.logits[: int((counts + 1).sum())]
    slots = torch.where(counts < 0, -1, torch.arange(len(counts)) % 2)
    drafts = torch.full((len(counts), K), -1)
    starts = (counts + 1).cumsum(0) - (counts + 1)
    for n, count in enumerate(counts.tolist()):
        for j in range(max(count, 0)):
            drafts[n, j] = (logits[starts[n] + j, :V].nan_to_num(-9.0, 9.0, -9.0).argmax() + (n + j) % 2) % V
    proposals = None
    if mode.drafts != "one_hot":
        proposals = logits[: int(counts.clamp(min=0).sum())].nan_to_num(0.0, 9.0, -9.0).roll(1, 0)
    if mode.drafts == "probabilities":
        proposals = torch.softmax(proposals, -1)
    if mode.from_probabilities:
        logits = torch.softmax(logits.nan_to_num(0.0, 9.0, -9.0), -1)
    return VerifyInputs(logits, slots, sampled.positions[: len(counts)], counts, drafts, proposals, sampled.table)


def same(found: Any, wanted: Any) -> bool:
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(tensors_of(found), tensors_of(wanted), strict=True)
    )


def chunked(step: Callable[[Any], Any], most: int = CHUNK, *, fuses: bool = False) -> tuple[Any, int]:
    """A step's results in chunks, and the stages that ran."""
    ran = []

    def watch(stage: Any, /, *tensors: Any, **static: Any) -> Any:
        ran.append(stage)
        return without_kernels(stage, *tensors, **static)

    with chunks_of(most):
        return step(Run(watch, fuses=fuses)), len(ran)


def assert_chunks_change_nothing(step: Callable[[Any], Any]) -> None:
    """The bits are the same at once and in chunks, of a CPU's and of a GPU's stages; and there are chunks."""
    wanted, stages = chunked(step, R)
    for fuses in (False, True):
        found, more = chunked(step, fuses=fuses)
        assert same(found, wanted)
        assert more > stages
        with for_a_gpu():
            assert same(chunked(step, fuses=fuses)[0], wanted)


@pytest.mark.parametrize(("name", "base"), [*((name, "top_k") for name in REQUESTS), ("full", "all")])
def test_tokens_drafts_and_probabilities_are_the_same_bits_in_chunks(name, base):
    mode, inputs = modes_by_name(V, base)[name], inputs_of(name)
    drafts = inputs._replace(offsets=torch.arange(R) % 4)
    assert_chunks_change_nothing(lambda run: sample_step(mode, inputs, run))
    assert_chunks_change_nothing(lambda run: sample_step(mode, drafts, run))
    assert_chunks_change_nothing(lambda run: probability_step(mode, inputs, run))


@pytest.mark.parametrize("name", ["greedy", "min_p", "full"])
def test_edits_are_the_same_bits_in_chunks(name):
    mode, inputs = modes_by_name(V)[name], inputs_of(name)
    edited = inputs._replace(edits=given_to_all([Lifted()], 2, V))
    for step in (sample_step, probability_step):
        assert_chunks_change_nothing(lambda run: step(mode, edited, run))  # noqa: B023 - called at once
        assert not same(step(mode, inputs), step(mode, edited))


@pytest.mark.parametrize("drafts", ["one_hot", "probabilities", "logits"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", tiers(["greedy", "full"], REQUESTS))
def test_verifications_are_the_same_bits_in_chunks(name, rule, drafts):
    mode = verifying(modes_by_name(V)[name], rule, drafts)
    inputs = drafted(mode, name)
    wanted = verify_step(mode, inputs)
    for fuses in (False, True):
        assert same(chunked(lambda run: verify_step(mode, inputs, run), fuses=fuses)[0], wanted)
    with for_a_gpu():
        assert same(chunked(lambda run: verify_step(mode, inputs, run), fuses=True)[0], wanted)


@pytest.mark.parametrize("drafts", ["one_hot", "probabilities"])
@pytest.mark.parametrize("rule", RULES)
def test_verifications_of_probabilities_are_the_same_bits_in_chunks(rule, drafts):
    mode = verifying(probabilities_mode(V), rule, drafts)
    inputs = drafted(mode, "no_filter")
    found, _ = chunked(lambda run: verify_step(mode, inputs, run))
    assert same(found, verify_step(mode, inputs))


def test_the_comparison_sees_rows_of_another_chunk():
    mode, inputs, part = modes_by_name(V)["full"], inputs_of("full"), chunks.part_of
    wanted = sample_step(mode, inputs)
    with mock.patch.object(
        chunks, "part_of", lambda rows, first, end: part(rows, max(first - 1, 0), end - (first > 0))
    ):
        assert not same(chunked(lambda run: sample_step(mode, inputs, run))[0], wanted)
    assert same(chunked(lambda run: sample_step(mode, inputs, run))[0], wanted)


def test_compiled_stages_give_the_same_bits_in_chunks():
    """Of the layout that other tests compile."""
    mode, inputs = modes_by_name(SHARED_V)["no_filter"], inputs_of("no_filter", SHARED_V)
    inputs = inputs._replace(logits=inputs.logits[:, :SHARED_V].contiguous())
    with chunks_of(CHUNK):
        assert same(sample_step(mode, inputs, CompiledStages()), sample_step(mode, inputs))


@given(st.integers(1, 5000), st.integers(1, 600))
def test_chunks_are_of_about_as_many_rows_and_begin_at_aligned_ones(num_rows, most):
    ends = chunk_ends(num_rows, most)
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    assert sum(sizes) == num_rows
    assert all(0 < size <= most for size in sizes)
    assert max(sizes) - min(sizes) <= (31 if most >= 16 else 1)
    assert most < 16 or all(end % 16 == 0 for end in ends[:-1])


def test_rows_beyond_2_to_the_31_elements_are_read_where_they_are():
    """Rows of few tokens, so far apart that only the last one's elements are beyond: memory that is never touched."""
    mode, inputs = modes_by_name(V)["full"], inputs_of("full")
    apart = 2**31 // (R - 2)
    logits = torch.empty(R * apart, dtype=torch.bfloat16).as_strided((R, V), (apart, 1)).copy_(inputs.logits[:, :V])
    assert logits[-1].storage_offset() > 2**31
    wanted = sample_step(mode, inputs._replace(logits=logits.contiguous()))
    for most in (R, CHUNK):
        assert same(chunked(lambda run: sample_step(mode, inputs._replace(logits=logits), run), most)[0], wanted)


@pytest.mark.parametrize("backend", ["eager", "compiled"])
@pytest.mark.parametrize("edit", ["penalties", "dry"])
def test_eager_edits_of_long_histories_hold_no_more_than_a_chunk_and_keep_their_bits(edit, backend, monkeypatch):
    """Their scratch grows with the history, as does that of a record of drafts, here to eight bounds and more."""
    monkeypatch.setattr(CompiledStages, "compiles_at_calls", False)
    monkeypatch.setenv(PROCESSES_VARIABLE, "0")
    count, width, length, bound = 16, 7, 2000, 2**20
    sampler = Sampler(V, count, backend=backend, history_len=length)
    text = [token % 40 for token in range(length - 16)]
    slots = [sampler.add_request(SamplingParams(seed=n, **OF_EDIT[edit]), text[n:]) for n in range(count)]
    positions = torch.tensor([len(text) - n for n in range(count)])
    logits = 3.0 * torch.randn(count * (width + 1), V, generator=torch.Generator().manual_seed(2))
    drafts = torch.arange(count * width).view(count, width) % V
    drawn, plan = sampler.plan(slots), sampler.plan(slots, num_drafts=[width] * count)

    def work() -> tuple[Any, Any]:
        return sampler.sample(drawn, logits[:count], positions), sampler.verify(plan, logits, drafts, positions)

    wanted = work()
    assert scratch_bytes(work, logits.device) > 4 * bound
    with eager_scratch_of(bound):
        found = work()
        listed = 12 * count * (width + 1) * length if (edit, backend) == ("dry", "compiled") else 0  # ids and logits
        assert scratch_bytes(work, logits.device) < 2 * bound + listed
    assert same(found[0], wanted[0])
    assert same(found[1], wanted[1])
