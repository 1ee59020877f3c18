"""Stages in eager torch in chunks of rows: the bits and the layouts of all rows at once, whatever else they read."""

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from compiled_sampler import Logprobs, Sampler, SamplingParams
from compiled_sampler.core.noise import TARGET
from compiled_sampler.core.order import pack
from compiled_sampler.core.rows import RowParams, RowSlots, gather_rows
from compiled_sampler.core.stage import Run, scratch_of
from compiled_sampler.edits.masks import MaskedLogits
from compiled_sampler.exact import row_race
from compiled_sampler.exact.threshold import FlaggedRows, keep_all_threshold, order_keys, search_threshold_in_torch
from compiled_sampler.lowering.comparison import difference, outcome
from compiled_sampler.lowering.layouts import layout
from compiled_sampler.lowering.tuning import tuning_of
from compiled_sampler.passes import shards
from compiled_sampler.passes.bounds import race_bounds, race_leaders, race_masked_bounds
from compiled_sampler.passes.candidates import child_tokens
from compiled_sampler.passes.maxima import customized_with_maxima, masked_with_maxima, order_maxima
from compiled_sampler.pipeline import chunks
from compiled_sampler.pipeline.chunks import eagerly, leaves_by_row, without_kernels
from examples.no_digits import NoDigits
from tests.builders.custom_edits import WORDS, custom_sampler, given_to_all
from tests.builders.edited_drafts import COUNTS, K, draft_batch
from tests.builders.edits import EDITS, HISTORY, V
from tests.builders.inputs import sample_inputs
from tests.builders.masks import masked_inputs
from tests.builders.trees import tree_batch
from tests.torch_states import Operations
from tools.kernels.launches import for_a_gpu

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
    sampler, count = Sampler(V, 8, backend="eager", draft_cache_len=2), 4
    slots = [sampler.add_request(SamplingParams(seed=n)) for n in range(count)]
    plan, ragged = sampler.plan(slots), sampler.plan(slots, num_drafts=[2, 1, 0, 2])
    logits, positions = torch.randn(9, V), torch.zeros(count, dtype=torch.int64)
    drafts, siblings = torch.arange(2 * count).view(count, 2), torch.full((count, 2), -1)
    with comparing(sampler):
        handles = [sampler.draft(plan, logits[:count], positions, False, place) for place in range(2)]
        sampler.verify(ragged, logits, handles, positions, "rejection")
        sampler.verify_from_probs(ragged, logits.softmax(-1), drafts, positions, rule="rejection")
        given = {"draft_logits": logits[:5], "parents": siblings}
        sampler.verify(ragged, logits, drafts, positions, "rejection", **given)


def verify_trees() -> None:
    sampler = Sampler(V, 64, backend="eager", history_len=HISTORY)
    batch = tree_batch(sampler, 3, edits=EDITS)
    plan, (drafts, parents) = batch.plan(sampler), batch.padded()
    with comparing(sampler):
        sampler.verify(plan, batch.logits, drafts, batch.positions, "match", parents=parents)


def run_other_stages() -> None:
    """Those of a GPU and of shards."""
    inputs, _ = masked_inputs("min_p", "both", V)
    logits, slots, positions, table, *_ = inputs
    rows = gather_rows(RowSlots(table, slots, positions), stream=TARGET)
    masks = inputs.edits.token_bitmask, slots, inputs.edits.tables.allowed
    vocab = {"vocab_size": V}
    blocks: dict[str, Any] = {**vocab, "block": 32}
    reduced = {**blocks, "slices": 1, "by_bits": True, "names": True}
    maxima = order_maxima(logits, **reduced)
    masked, row_max = MaskedLogits(logits, *masks), logits.nan_to_num(-9.0).amax(-1)
    compared(masked_with_maxima, logits, *masks, **reduced)
    custom = given_to_all([NoDigits(WORDS)], 5, V)
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
    vocab, base = {"vocab_size": V}, {"vocab_size": V, "base_is_row": True}
    known = keep_all_threshold(rows, rows.live, rows.live)
    compared(row_race.race_rows_in_torch, logits, rows.live, rows, row_max, None, **vocab)
    compared(row_race.race_and_weigh_in_torch, logits, FlaggedRows(rows, row_max, rows.live), **vocab, block=32)
    compared(row_race.race_beyond_candidates_in_torch, logits, known, rows, row_max, known.row_mass[:, None], **base)
    compared(row_race.race_top_k_in_torch, logits, rows, **vocab)
    compared(search_threshold_in_torch, logits, known, row_max, rows, **base)


def test_what_stands_in_for_kernels_has_as_many_parts_of_a_row_as_they_have(monkeypatch):
    logits = torch.randn(5, V)
    inputs = sample_inputs(logits, [SamplingParams(seed=seed) for seed in range(5)])
    rows = gather_rows(RowSlots(inputs.table, inputs.slots, inputs.positions), stream=TARGET)
    monkeypatch.setattr(chunks, "num_parts", lambda vocab_size, num_rows, *, weighs: num_rows + weighs)
    monkeypatch.setattr(chunks, "eager_rows", lambda **_: 2)
    winners = without_kernels(row_race.race_rows, logits, rows.live, rows, logits.amax(-1), None, vocab_size=V)
    flagged = FlaggedRows(rows, logits.amax(-1), rows.live)
    masses, raced = without_kernels(row_race.race_and_weigh, logits, flagged, vocab_size=V, block=32)
    wanted = row_race.race_and_weigh_in_torch(logits, flagged, vocab_size=V, block=32)[0].sum(-1)
    assert winners.shape == (5, 5)
    of_rows = row_race.race_rows_in_torch(logits, rows.live, rows, None, None, vocab_size=V)
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


def test_the_comparison_sees_rows_of_another_chunk():
    part = chunks.part_of
    with (
        mock.patch.object(chunks, "part_of", lambda rows, first, end: part(rows, max(first - 1, 0), end - (first > 0))),
        pytest.raises(AssertionError),
    ):
        run_other_stages()


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
