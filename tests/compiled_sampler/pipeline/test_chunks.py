"""Chunks of rows: the same bits as all rows at once, in every step and mode, and never more rows than allowed."""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

from compiled_sampler import EditRows, LogitEdit, Logprobs, Sampler, SamplingParams
from compiled_sampler.batch import SampleInputs, tensors_of
from compiled_sampler.core.noise import TARGET
from compiled_sampler.core.order import pack
from compiled_sampler.core.rows import RowParams, RowSlots, gather_rows
from compiled_sampler.core.stage import Run, scratch_of
from compiled_sampler.edits.masks import MaskedLogits
from compiled_sampler.exact import row_race
from compiled_sampler.exact.threshold import FlaggedRows, keep_all_threshold, order_keys, search_threshold_in_torch
from compiled_sampler.lowering.comparison import difference, outcome
from compiled_sampler.lowering.compile_queue import PROCESSES_VARIABLE
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.lowering.layouts import layout
from compiled_sampler.lowering.tuning import tuning_of
from compiled_sampler.modes import Mode, probabilities_mode, verifying
from compiled_sampler.passes import shards
from compiled_sampler.passes.bounds import race_bounds, race_leaders, race_masked_bounds
from compiled_sampler.passes.candidates import child_tokens
from compiled_sampler.passes.maxima import customized_with_maxima, masked_with_maxima, order_maxima
from compiled_sampler.pipeline import chunks
from compiled_sampler.pipeline.chunks import chunk_ends, eagerly, leaves_by_row, without_kernels
from compiled_sampler.pipeline.law import probability_step
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.pipeline.verify import verify_step
from examples.no_digits import NoDigits
from tests.builders.custom_edits import WORDS, custom_sampler, given_to_all
from tests.builders.edited_drafts import COUNTS, K, draft_batch
from tests.builders.edits import EDITS, HISTORY, OF_EDIT
from tests.builders.edits import V as EDITED_V
from tests.builders.inputs import modes_by_name, sample_inputs, slot_table
from tests.builders.masks import masked_inputs
from tests.builders.sampler import REQUESTS
from tests.builders.sampler import V as SHARED_V
from tests.builders.trees import tree_batch
from tests.builders.verifications import WAYS, hard_verification
from tests.cases.hard_rows import mixed_batch, mixed_requests
from tests.chunked import chunks_of, eager_scratch_of
from tests.tiers import tiers
from tests.torch_states import Operations
from tools.bench.memory import scratch_bytes
from tools.kernels.launches import for_a_gpu

V, R, CHUNK = 300, 75, 16


@dataclass(frozen=True)
class Lifted(LogitEdit):
    """An edit of some tokens that depends on the row."""

    def edit(self, x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
        return x + torch.where((ids % 3 == 0) & (rows.positions % 2 == 1), 4.0, 0.0)


def hard_inputs(mode: Mode) -> SampleInputs:
    """Rows of every kind for requests of all kinds that the mode covers, one of padding."""
    requests = mixed_requests(mode.vocab_size, 60, seed=5)
    logits, slots, positions = mixed_batch(requests, mode, R, torch.float32, seed=5)
    slots[33] = -1
    return SampleInputs(logits, slots, positions, slot_table(requests, mode.vocab_size))


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
def test_tokens_drafts_probabilities_and_edits_are_the_same_bits_in_chunks(name, base):
    mode = modes_by_name(V, base)[name]
    inputs = hard_inputs(mode)
    edited = inputs._replace(edits=given_to_all([Lifted()], 60, V))
    assert_chunks_change_nothing(lambda run: sample_step(mode, inputs._replace(offsets=torch.arange(R) % 4), run))
    for step in (sample_step, probability_step):
        for each in (inputs, edited):
            assert_chunks_change_nothing(lambda run: step(mode, each, run))  # noqa: B023 - called at once
        assert not same(step(mode, inputs), step(mode, edited))


OF_LOGITS = [(name, *way) for name in REQUESTS for way in WAYS]
OF_PROBABILITIES = [("probabilities", *way) for way in WAYS if way[1] in ("one_hot", "probabilities")]
FIRST = [*(case for case in OF_LOGITS if case[0] in ("greedy", "full")), *OF_PROBABILITIES]


@pytest.mark.parametrize(("name", "rule", "kind"), tiers(FIRST, OF_LOGITS))
def test_verifications_are_the_same_bits_in_chunks(name, rule, kind):
    mode = verifying(probabilities_mode(V) if name == "probabilities" else modes_by_name(V)[name], rule, kind)
    inputs = hard_verification(mode, kind)
    wanted = verify_step(mode, inputs)
    for fuses in (False, True):
        assert same(chunked(lambda run: verify_step(mode, inputs, run), 8, fuses=fuses)[0], wanted)
    with for_a_gpu():
        assert same(chunked(lambda run: verify_step(mode, inputs, run), 8, fuses=True)[0], wanted)


def test_the_comparisons_see_rows_of_another_chunk():
    mode, part = modes_by_name(V)["full"], chunks.part_of
    inputs = hard_inputs(mode)
    wanted = sample_step(mode, inputs)
    with mock.patch.object(
        chunks, "part_of", lambda rows, first, end: part(rows, max(first - 1, 0), end - (first > 0))
    ):
        assert not same(chunked(lambda run: sample_step(mode, inputs, run))[0], wanted)
        with pytest.raises(AssertionError):
            run_other_stages()
    assert same(chunked(lambda run: sample_step(mode, inputs, run))[0], wanted)


def test_compiled_stages_give_the_same_bits_in_chunks():
    """Of the layout that other tests compile."""
    mode = modes_by_name(SHARED_V)["no_filter"]
    inputs = hard_inputs(mode)
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
    mode = modes_by_name(V)["full"]
    inputs = hard_inputs(mode)
    apart = 2**31 // (R - 2)
    logits = torch.empty(R * apart, dtype=torch.bfloat16).as_strided((R, V), (apart, 1)).copy_(inputs.logits)
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


# Stages in eager torch in chunks of rows: the bits and the layouts of all rows at once, whatever else they read.


IN_CHUNKS = set[Any]()
"""Those that were run in chunks."""


def declared_stages() -> set[Any]:
    """The stages of all modules that are taken in chunks, of which one says by no declaration what it holds."""
    modules = [module for name, module in sys.modules.items() if name.startswith("compiled_sampler.")]
    functions = (value for module in modules for value in vars(module).values() if isinstance(value, FunctionType))
    return {function for function in functions if scratch_of(function) is not None} | {child_tokens}


def compared(stage: Any, /, *tensors: Any, **static: Any) -> Any:
    """The results of a stage, which are those of two rows at once."""
    writes = tuning_of(stage).writes
    with mock.patch.object(chunks, "eager_rows", return_value=2) as asked:
        found = outcome(partial(eagerly, stage, **static), tensors, writes=writes)
    if asked.called:
        wanted = outcome(partial(stage, **static), tensors, writes=writes)
        assert not difference(found, wanted), stage
        assert [*map(layout, leaves_by_row(found))] == [*map(layout, leaves_by_row(wanted))], stage
        IN_CHUNKS.add(stage)
    return stage(*tensors, **static)


@contextmanager
def comparing(sampler: Sampler) -> Iterator[None]:
    with mock.patch.object(sampler._runner._executor, "_run", Run(compared)):
        yield


MIXED = [
    ("no_filter", "rejection", "handles"),
    ("no_filter", "block", "probabilities"),
    ("greedy", "match", "one_hot"),
    ("full", "block", "processed"),
]


def verify_and_draw(mode: str, rule: str, form: str) -> None:
    """Batches with all edits mixed, for as many slots as rows: a table that is cut by its size would be seen."""
    options = {"draft_cache_len": K} if form == "handles" else {}
    sampler = custom_sampler("eager", sum(COUNTS) + len(COUNTS), **options)
    batch = draft_batch(sampler, mode, form)
    assert len(batch.logits) == sampler.max_num_requests
    first = torch.tensor(batch.plan.first_rows)
    edits: dict[str, Any] = {"token_bitmask": batch.given["token_bitmask"][first]}
    edits["edit_inputs"] = {name: each[first] for name, each in batch.given["edit_inputs"].items()}
    asked = [Logprobs(top=3, of="filtered", entropy=True, token_ids=(1, 5)), Logprobs(of="processed", rank=True)]
    with comparing(sampler):
        batch.verified(sampler, rule, logprobs=asked[1])
        plan, logits = sampler.plan(batch.plan.slots), batch.logits[first]
        for logprobs in asked:
            sampler.sample(plan, logits, batch.positions, logprobs=logprobs, **edits)
        sampler.sample(plan, logits.clone(), batch.positions, consume_logits="restore", **edits)
        sampler.probs(plan, logits, positions=batch.positions, **edits)
        sampler.draft(plan, logits, batch.positions, width=2, **edits)


def verify_plain_drafts() -> None:
    """Drafts in a cache, from probabilities and of trees, without edits."""
    sampler, count = Sampler(EDITED_V, 8, backend="eager", draft_cache_len=2), 4
    slots = [sampler.add_request(SamplingParams(seed=n)) for n in range(count)]
    plan, ragged = sampler.plan(slots), sampler.plan(slots, num_drafts=[2, 1, 0, 2])
    logits, positions = torch.randn(9, EDITED_V), torch.zeros(count, dtype=torch.int64)
    drafts, siblings = torch.arange(2 * count).view(count, 2), torch.full((count, 2), -1)
    with comparing(sampler):
        handles = [sampler.draft(plan, logits[:count], positions, False, place) for place in range(2)]
        sampler.verify(ragged, logits, handles, positions, "rejection")
        sampler.verify_from_probs(ragged, logits.softmax(-1), drafts, positions, rule="rejection")
        given = {"draft_logits": logits[:5], "parents": siblings}
        sampler.verify(ragged, logits, drafts, positions, "rejection", **given)


def verify_trees() -> None:
    sampler = Sampler(EDITED_V, 64, backend="eager", history_len=HISTORY)
    batch = tree_batch(sampler, 3, edits=EDITS)
    plan, (drafts, parents) = batch.plan(sampler), batch.padded()
    with comparing(sampler):
        sampler.verify(plan, batch.logits, drafts, batch.positions, "match", parents=parents)


def run_other_stages() -> None:
    """Those of a GPU and of shards."""
    inputs, _ = masked_inputs("min_p", "both", EDITED_V)
    logits, slots, positions, table, *_ = inputs
    rows = gather_rows(RowSlots(table, slots, positions), stream=TARGET)
    masks = inputs.edits.token_bitmask, slots, inputs.edits.tables.allowed
    vocab = {"vocab_size": EDITED_V}
    blocks: dict[str, Any] = {**vocab, "block": 32}
    reduced = {**blocks, "slices": 1, "by_bits": True, "names": True}
    maxima = order_maxima(logits, **reduced)
    masked, row_max = MaskedLogits(logits, *masks), logits.nan_to_num(-9.0).amax(-1)
    compared(masked_with_maxima, logits, *masks, **reduced)
    custom = given_to_all([NoDigits(WORDS)], 5, EDITED_V)
    by_user = masks[0], slots, positions, masks[2], custom.tables.custom, (), None
    compared(customized_with_maxima, logits, *by_user, edits=custom.custom, **reduced)
    compared(race_masked_bounds, masked, rows, **blocks, finds_max=True)
    bounds = compared(race_bounds, logits, rows, **blocks, finds_max=True)
    compared(race_leaders, logits, bounds, rows, **blocks)
    level: dict[str, Any] = {**vocab, "ratio": 4, "size": 8}
    parents = pack(maxima.keys[:, :2], torch.arange(2))
    compared(child_tokens, logits, parents, **level)
    keys = shards.every_key(rows.live)
    for by_mass in (False, True):
        compared(shards.weights_from_keys, logits, keys, row_max, rows.scale, **blocks, by_mass=by_mass)
    compared(order_keys, logits, **vocab)
    columns: dict[str, Any] = {**vocab, "start": 7, "num_blocks": 1}
    ids = torch.arange(2 * len(logits)).view(-1, 2)
    largest = compared(shards.law_keys_of_shard, logits, (ids,), **columns)
    flags = {"moment": True, "rank": True}
    compared(shards.law_sums_of_shard, logits, largest, rows.scale, ids[:, 0], **columns, **flags)
    compared(shards.count_of_key, logits, maxima.keys[:, 0], **blocks)
    unnamed = maxima._replace(token_ids=None)
    compared(shards.winners_of_blocks, logits, unnamed, rows, None, None, **blocks, by_bits=True, start=0)
    stand_in_for_kernels(logits, rows, row_max)


def stand_in_for_kernels(logits: Tensor, rows: RowParams, row_max: Tensor) -> None:
    """Stages of a GPU whose kernels are not there yet."""
    vocab, base = {"vocab_size": EDITED_V}, {"vocab_size": EDITED_V, "base_is_row": True}
    known = keep_all_threshold(rows, rows.live, rows.live)
    compared(row_race.race_rows_in_torch, logits, rows.live, rows, row_max, None, **vocab)
    compared(row_race.race_and_weigh_in_torch, logits, FlaggedRows(rows, row_max, rows.live), **vocab, block=32)
    compared(row_race.race_beyond_candidates_in_torch, logits, known, rows, row_max, known.row_mass[:, None], **base)
    compared(row_race.race_top_k_in_torch, logits, rows, **vocab)
    compared(search_threshold_in_torch, logits, known, row_max, rows, **base)


def test_what_stands_in_for_kernels_has_as_many_parts_of_a_row_as_they_have(monkeypatch):
    logits = torch.randn(5, EDITED_V)
    inputs = sample_inputs(logits, [SamplingParams(seed=seed) for seed in range(5)])
    rows = gather_rows(RowSlots(inputs.table, inputs.slots, inputs.positions), stream=TARGET)
    monkeypatch.setattr(chunks, "num_parts", lambda vocab_size, num_rows, *, weighs: num_rows + weighs)
    monkeypatch.setattr(chunks, "eager_rows", lambda **_: 2)
    winners = without_kernels(row_race.race_rows, logits, rows.live, rows, logits.amax(-1), None, vocab_size=EDITED_V)
    flagged = FlaggedRows(rows, logits.amax(-1), rows.live)
    masses, raced = without_kernels(row_race.race_and_weigh, logits, flagged, vocab_size=EDITED_V, block=32)
    wanted = row_race.race_and_weigh_in_torch(logits, flagged, vocab_size=EDITED_V, block=32)[0].sum(-1)
    assert winners.shape == (5, 5)
    of_rows = row_race.race_rows_in_torch(logits, rows.live, rows, None, None, vocab_size=EDITED_V)
    assert torch.equal(winners.amax(-1), of_rows[:, 0])
    assert torch.equal(masses, torch.nn.functional.pad(wanted[:, None], (0, 5)))
    assert raced.shape == (5, 6)
    assert (raced == row_race.NO_WINNER).all()


def test_every_stage_in_chunks_has_the_bits_and_layouts_of_all_rows_at_once():
    for case in MIXED:
        verify_and_draw(*case)
    verify_plain_drafts()
    verify_trees()
    run_other_stages()
    assert declared_stages() == IN_CHUNKS


@pytest.mark.full
@pytest.mark.parametrize("is_gpu", [False, True])
def test_stages_that_are_not_cut_hold_no_number_for_each_token(is_gpu):
    rows, vocab_size, heavy = 24, 5003, set[str]()
    declared = declared_stages()

    def watched(stage: Any, /, *tensors: Any, **static: Any) -> Any:
        stage = row_race.IN_TORCH.get(stage, stage)
        fresh = set[int]()

        def see(function: Any, given: Any, made: Any) -> None:
            read = {each.untyped_storage().data_ptr() for each in tree_leaves(given) if isinstance(each, Tensor)}
            memory = (each.untyped_storage() for each in tree_leaves(made) if isinstance(each, Tensor))
            fresh.update({each.data_ptr() for each in memory if each.nbytes() >= 4 * rows * vocab_size} - read)

        with Operations(see):
            results = stage(*tensors, **static)
        returned = {leaf.untyped_storage().data_ptr() for leaf in leaves_by_row(results)}
        if fresh - returned and stage not in declared:
            heavy.add(stage.__name__)
        return results

    sampler = Sampler(vocab_size, rows, backend="eager", history_len=8)
    positions, mask = torch.full((rows,), 3), torch.randint(-(2**31), 2**31 - 1, (rows, 157), dtype=torch.int32)
    laws: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"min_p": 0.1}, {"top_k": 5}, {"top_k": 500}]
    laws += [{"top_p": 0.9}, {"top_k": 900, "top_p": 0.95, "min_p": 0.01}]
    asked = [Logprobs(top=5, rank=True, entropy=True, token_ids=(1, 2)), Logprobs(of="filtered", top=3), None]
    with mock.patch.object(sampler._runner._executor, "_run", Run(watched)), for_a_gpu() if is_gpu else nullcontext():
        for law in laws:
            slots = [sampler.add_request(SamplingParams(seed=seed, **law)) for seed in range(rows)]
            plan, logits = sampler.plan(slots), torch.randn(rows, vocab_size)
            for logprobs, bitmask in itertools.product(asked, (mask, None)):
                sampler.sample(plan, logits, positions, logprobs=logprobs, token_bitmask=bitmask)
            sampler.probs(plan, logits, positions=positions)
            drafted, drafts = sampler.plan(slots, num_drafts=[0] * rows), torch.zeros((rows, 1), dtype=torch.int64)
            for rule in ("match", "rejection", "block"):
                sampler.verify(drafted, logits, drafts, positions, rule)
            for slot in slots:
                sampler.remove_request(slot)
    assert heavy == set()
