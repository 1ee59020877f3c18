"""Masks, biases and penalties in one pass: tokens in several lists, of any vocabulary, at any position."""

import random

import pytest
import torch

from compiled_sampler import Sampler
from compiled_sampler.core.rows import RowSlots
from compiled_sampler.core.stage import call
from compiled_sampler.edit_tables import NO_TOKEN, AllowedIds, BiasLists, EditInputs, EditTables, History, Penalties
from compiled_sampler.edits.bias import with_bias
from compiled_sampler.edits.changes import Changes, LogitsBefore, add_changes, changes_of, entry_ids
from compiled_sampler.edits.edited import edited_bits
from compiled_sampler.lowering.compiled_stages import CompiledStages, _shapes_of
from compiled_sampler.lowering.stage_code import StageCode
from compiled_sampler.modes import mode_table
from compiled_sampler.pipeline.edits import edited_logits
from compiled_sampler.pipeline.schedule import schedule_for
from tests.builders_edits import Request, edited_rows, random_mask, random_request
from tests.builders_filters import same_bits
from tools.kernels.launches import FALLBACK, generated, listed

L, ROWS = 37, 6
KINDS = ["allowed_token_ids", "logit_bias", "min_tokens", "penalties", "bad_words"]


@pytest.mark.parametrize("vocab_size", [1, 2, 127, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_in_several_lists_get_what_the_slow_truth_gives_them(vocab_size, dtype):
    """Of a few ids, so that most stand in all lists; also of empty histories, longer ones than L, and padding."""
    source, several = random.Random(vocab_size), 0
    sampler = Sampler(vocab_size, ROWS, backend="eager", logits_dtype=dtype, history_len=L)
    for turn in range(24):
        requests = [random_request(source, vocab_size, KINDS[turn % 2 :]) for _ in range(ROWS)]
        requests[0] = requests[0]._replace(prompt=[], output=[])
        requests[1] = requests[1]._replace(output=[source.randrange(vocab_size) for _ in range(L)][: L - 8])
        slots = [each.added(sampler) for each in requests]
        logits = 3.0 * torch.randn(ROWS + 2, vocab_size, generator=torch.Generator().manual_seed(turn))
        logits[2, ::2], logits[3, ::2] = float("nan"), float("-inf")
        logits = logits.to(dtype)
        positions = torch.tensor([*(each.position for each in requests), 3, L + 9])
        mask = random_mask(source, ROWS + 2, vocab_size) if turn % 3 == 0 else None
        found = sampler.edited_logits(sampler.plan([*slots, -1, -1]), logits, positions, token_bitmask=mask)
        assert same_bits(found[:ROWS], edited_rows(logits[:ROWS], requests, mask))
        if mask is None and turn % 2:  # lists edit no padding, masks may
            assert same_bits(found[ROWS:], logits[ROWS:].float())
        several += sum(len(twice(each)) for each in requests)
        for slot in slots:
            sampler.remove_request(slot)
    assert several > 10


def twice(request: Request) -> set[int]:
    """Tokens that have a bias and stand in the history of a request."""
    return {*request.given.get("logit_bias", ())} & {*request.prompt, *request.output}


@pytest.mark.parametrize("vocab_size", [1, 2, 127, 129])
def test_consumed_logits_become_what_a_copy_would(vocab_size):
    source = random.Random(vocab_size)
    sampler = Sampler(vocab_size, ROWS, backend="eager", history_len=L)
    mode = mode_table(vocab_size, "top_k")[-1]
    schedule = schedule_for(mode, ROWS + 1, torch.device("cpu"), is_edited=True)
    for _ in range(8):
        requests = [random_request(source, vocab_size, KINDS[1:]) for _ in range(ROWS)]
        slots = [each.added(sampler) for each in requests]
        sampler.plan(slots)
        positions = torch.tensor([*(each.position for each in requests), 5])
        row_slots = RowSlots(sampler._planner.table, torch.tensor([*slots, -1]), positions)
        given = sampler._planner._edits.inputs(("logit_bias", "min_tokens", "penalties", "bad_words"), {}, None)
        assert isinstance(given, EditInputs)
        logits = torch.randn(ROWS + 1, vocab_size + 3)
        wanted = edited_logits(schedule, logits, row_slots, given, call)
        consumed = logits.clone()
        found = edited_logits(schedule, consumed, row_slots, given._replace(in_place=True), call)
        assert same_bits(found, wanted)
        assert found.data_ptr() == consumed.data_ptr()
        assert torch.equal(consumed[:, vocab_size:], logits[:, vocab_size:])
        for slot in slots:
            sampler.remove_request(slot)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 512])
def test_every_token_of_a_list_is_found_and_no_other(most):
    source = random.Random(most)
    counts = [0, 1, most // 2, most]
    lists = [sorted(source.sample(range(2 * most), count)) for count in counts]
    ids = torch.tensor([[*each, *[NO_TOKEN] * (most - len(each))] for each in lists], dtype=torch.int32)
    tables = BiasLists(torch.tensor(counts, dtype=torch.int32), ids, torch.full((4, most), 2.0))
    tokens = torch.arange(2 * most).repeat(4, 1)
    found = with_bias(torch.ones(4, 2 * most), tokens, torch.arange(4), tables)
    assert found.tolist() == [[3.0 if token in each else 1.0 for token in range(2 * most)] for each in lists]


def test_changes_of_one_token_add_up_in_any_order():
    """From any bits to any others, those of NaN and infinities too; zeros change nothing."""
    steps = torch.tensor([[0.0, -1.5, float("-inf"), float("nan"), -0.0, 3e38]]).repeat(5, 1)
    bits, ids = steps[:, :1].view(torch.int32).clone(), torch.zeros(5, 5, dtype=torch.int64)
    made = changes_of(ids, steps[:, :-1], steps[:, 1:])
    order = torch.stack([torch.randperm(5) for _ in range(5)])
    add_changes(bits, Changes(ids, made.added.gather(1, order)))
    assert torch.equal(bits, steps[:, -1:].contiguous().view(torch.int32))


def test_entries_that_stand_for_nothing_are_additions_in_many_places():
    ids = entry_ids(torch.zeros(1, 512, dtype=torch.int32), torch.zeros(1, 512, dtype=torch.bool), 1000)
    assert len(ids.unique()) == 512
    assert LogitsBefore(torch.zeros(1, 1000), None).of(ids).shape == ids.shape
    few = entry_ids(torch.zeros(1, 512, dtype=torch.int32), torch.zeros(1, 512, dtype=torch.bool), 3)
    assert few.max() == 2


def tables(vocab_size: int, rows: int) -> EditTables:
    numbers = [torch.ones(rows) for _ in range(4)]
    counts = torch.ones(rows, dtype=torch.int32)
    return EditTables(
        allowed=AllowedIds(torch.full((rows, -(-vocab_size // 32)), -1, dtype=torch.int32)),
        bias=BiasLists(counts, torch.zeros(rows, 8, dtype=torch.int32), torch.zeros(rows, 8)),
        penalties=Penalties(*numbers, counts),
        history=History(torch.zeros(rows + 1, 3, L, dtype=torch.int32), counts, counts),
    )


def arguments(vocab_size: int, rows: int, which: int):
    """The tensors of ``edited_bits``, of edits by the bits of a number."""
    made, slots = tables(vocab_size, rows), torch.arange(rows)
    mask = torch.full((rows, -(-vocab_size // 32)), -1, dtype=torch.int32) if which & 1 else None
    penalties = (made.penalties, made.history) if which & 8 else (None, None)
    of_list = made.allowed if which & 2 else None, slots, made.bias if which & 4 else None, slots
    return torch.randn(rows, vocab_size), mask, *of_list, *penalties


def test_calls_with_other_edits_are_compiled_apart():
    calls = [arguments(40, 4, which) for which in range(16)]
    assert len({_shapes_of(edited_bits, each, {"vocab_size": 40}) for each in calls}) == 16
    assert len({StageCode.of(edited_bits, each, {"vocab_size": 40}).key for each in calls}) == 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", [4, 8])
def test_lists_without_a_mask_compile_for_logits_of_16_bits(dtype, which):
    """Inductor cannot add to the bits of converted logits, unless it computes these bits."""
    logits, *given = arguments(40, 4, which)
    stages = CompiledStages()
    found = stages(edited_bits, logits.to(dtype), *given, vocab_size=40)
    assert torch.equal(found, edited_bits(logits.to(dtype), *given, vocab_size=40))


@pytest.mark.parametrize(
    ("which", "kernels", "dtype"),
    [*((which, 2 + (which > 8), torch.float32) for which in (4, 8, 12, 13, 15)), (12, 3, torch.bfloat16)],
)
def test_each_list_is_one_kernel_behind_the_copy(which, kernels, dtype):
    """In Triton's code: no copy is made for an addition, and no operator is left to ATen."""
    pytest.importorskip("triton")
    logits, *rest = arguments(4000, 64, which)
    given = logits.to(dtype), *rest
    found = listed(generated(lambda run: run(edited_bits, *given, vocab_size=4000), "triton"))
    assert not [each.name for each in found if each.kind == FALLBACK]
    assert sum(each.launches for each in found) == kernels
