"""Edited copies: tokens in several lists, picked rows, and records of tokens, eager, compiled and as Triton's code."""

import dataclasses
import itertools
import random
import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled_sampler import EditRows, EditSizes, LogitEdit, Sampler, SamplingParams
from compiled_sampler.batch import PickedRows
from compiled_sampler.core.rows import RowSlots
from compiled_sampler.core.stage import call
from compiled_sampler.edits import EDIT_SPECS, PARAMETERS
from compiled_sampler.edits.allowed_token_ids import AllowedIds
from compiled_sampler.edits.bias import BiasLists, write_biases
from compiled_sampler.edits.changes import edited_tokens, entry_ids, take_back
from compiled_sampler.edits.custom import customized
from compiled_sampler.edits.history import NO_SUCCESSOR, ORDINAL, SUCCESSOR, TOKEN, UNWRITTEN, History
from compiled_sampler.edits.masks import copied, masked
from compiled_sampler.edits.min_tokens import StopLists
from compiled_sampler.edits.penalties import Penalties, write_penalties
from compiled_sampler.edits.recording import Text, are_ends, entries_of, record_drafts, record_draws, record_ends
from compiled_sampler.edits.tables import EditInputs, EditTables
from compiled_sampler.engine.requests.edit_slots import RowLayout
from compiled_sampler.lowering.comparison import outcome
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.lowering.layouts import unshared
from compiled_sampler.modes import mode_table
from compiled_sampler.pipeline.edits import edited_logits
from compiled_sampler.pipeline.schedule import StepRun, schedule_for
from tests.builders.custom_edits import given_to_all
from tests.builders.edits import OF_EDIT, Request, edited_by, edited_rows, random_mask, random_request
from tests.builders.filters import same_bits
from tests.tiers import tiers
from tools.kernels.launches import FALLBACK, for_a_gpu, generated, listed

L, ROWS = 37, 6
WRITING = (write_biases, write_penalties)
KINDS = ["allowed_token_ids", "logit_bias", "min_tokens", "penalties", "bad_words"]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    tiers([(129, torch.float32)], [(1, torch.float32), (2, torch.bfloat16), (127, torch.bfloat16)]),
)
def test_tokens_in_several_lists_get_what_the_slow_truth_gives_them(vocab_size, dtype):
    """Of a few ids, so that most stand in all lists; also of empty histories, longer ones than L, and padding."""
    source, several = random.Random(vocab_size), 0
    sampler = Sampler(vocab_size, ROWS, backend="eager", logits_dtype=dtype, history_len=L)
    for turn in range(24):
        requests = [random_request(source, vocab_size, KINDS[turn % 2 :]) for _ in range(ROWS)]
        requests[0] = requests[0]._replace(prompt=[], output=[])
        requests[1] = requests[1]._replace(output=[source.randrange(vocab_size) for _ in range(L)][: L - 8])
        logits = 3.0 * torch.randn(ROWS + 2, vocab_size, generator=torch.Generator().manual_seed(turn))
        logits[2, ::2], logits[3, ::2] = float("nan"), float("-inf")
        logits = logits.to(dtype)
        mask = random_mask(source, ROWS + 2, vocab_size) if turn % 3 == 0 else None
        found = edited_by(sampler, requests, logits, mask)
        assert same_bits(found[:ROWS], edited_rows(logits[:ROWS], requests, mask))
        if mask is None and turn % 2:  # lists edit no padding, masks may
            assert same_bits(found[ROWS:], logits[ROWS:].float())
        several += sum(len(twice(each)) for each in requests)
    assert several > 10


def twice(request: Request) -> set[int]:
    """Tokens that have a bias and stand in the history of a request."""
    return {*request.given.get("logit_bias", ())} & {*request.prompt, *request.output}


@pytest.mark.parametrize("vocab_size", [2, 129])
def test_consumed_logits_become_what_a_copy_would(vocab_size):
    source = random.Random(vocab_size)
    sampler = Sampler(vocab_size, ROWS, backend="eager", history_len=L)
    mode = mode_table(vocab_size, "top_k")[-1]
    run = StepRun(call, schedule_for(mode, ROWS + 1, torch.device("cpu"), is_edited=True))
    for _ in range(8):
        requests = [random_request(source, vocab_size, KINDS[1:]) for _ in range(ROWS)]
        slots = [each.added(sampler) for each in requests]
        sampler.plan(slots)
        positions = torch.tensor([*(each.position for each in requests), 5])
        row_slots = RowSlots(sampler._requests.staged.table, torch.tensor([*slots, -1]), positions)
        given = sampler._edits.inputs(("logit_bias", "min_tokens", "penalties", "bad_words"), {}, None)
        assert isinstance(given, EditInputs)
        logits = torch.randn(ROWS + 1, vocab_size + 3)
        wanted = edited_logits(run, logits, row_slots, given)
        consumed = logits.clone()
        found = edited_logits(run, consumed, row_slots, given._replace(leave=True))
        assert same_bits(found, wanted)
        assert found.data_ptr() == consumed.data_ptr()
        assert torch.equal(consumed[:, vocab_size:], logits[:, vocab_size:])
        for slot in slots:
            sampler.remove_request(slot)


def test_entries_that_stand_for_nothing_are_additions_of_0_in_many_places():
    is_entry = torch.zeros(1, 512, dtype=torch.bool)
    ids = entry_ids(torch.zeros(1, 512, dtype=torch.int32), is_entry, 1000)
    assert len(ids.unique()) == 512
    made = edited_tokens(ids, torch.zeros(1, 512), torch.full((1, 512), torch.nan), is_entry)
    assert not made.added.any()
    assert entry_ids(torch.zeros(1, 512, dtype=torch.int32), is_entry, 3).max() == 2


def test_bits_become_those_of_any_logit():
    """NaN, infinities and zeros of both signs too, from each to each."""
    numbers = torch.tensor([0.0, -1.5, -torch.inf, torch.inf, torch.nan, -0.0, 3e38, 1e-40])
    before, after = (each.flatten()[None] for each in torch.meshgrid(numbers, numbers, indexing="ij"))
    ids = torch.arange(before.shape[1])[None]
    made = edited_tokens(ids, before, after, torch.ones_like(ids, dtype=torch.bool))
    assert same_bits((before.view(torch.int32) + made.added).view(torch.float32), after)


def tables(rows: int) -> EditTables:
    """A bias of one token, and penalties of a history of 5 that holds one of them twice, in each request."""
    counts = torch.ones(rows, dtype=torch.int32)
    penalties = {name: counts if name == "of_output" else torch.ones(rows) for name in Penalties._fields}
    entries = torch.from_numpy(entries_of([Text([7, 3, 30, 7, 1], 2)], L)[0])
    ids, biases = (
        torch.full((rows, 11), 5, dtype=torch.int32),
        torch.full((rows, 11), 2.0),
    )  # tables are parts of others
    return EditTables(
        lists=(BiasLists(counts, ids[:, 1:9], biases[:, 2:10]), Penalties(**penalties)),
        history=History(entries.repeat(rows + 1, 1, 1), counts, counts),
    )


def arguments(stage, vocab_size: int, rows: int, columns: int = 0):
    """The tensors of a stage that writes, of logits that are part of wider rows."""
    made, slots = tables(rows), torch.arange(rows)
    x = torch.randn(rows, vocab_size + columns)[:, :vocab_size]
    if stage is write_biases:
        return x, x.view(torch.int32), slots, made.lists[0]
    return x, x.view(torch.int32), slots, slots + 3, made.lists[1], made.history


@pytest.mark.parametrize("stage", WRITING)
def test_compiled_stages_write_what_eager_torch_writes_and_take_it_back(stage):
    """Also if torch compiles them for memory that is shared, and what is behind the row stays as it is."""
    run, static, given = CompiledStages(), {"vocab_size": 40, "tells": True}, arguments(stage, 40, 4, columns=3)
    wide = given[0].as_strided((4, 43), (43, 1))
    before, wanted = wide.clone(), wide.clone()
    read = wanted[:, :40]
    told = stage(read, read.view(torch.int32), *given[2:], **static)
    copied = outcome(partial(run, stage, **static), given, writes=True)  # these lie as what the code is for
    made = run(stage, *given, **static)
    assert same_bits(wide, wanted)
    assert not same_bits(wide, before)
    assert same_bits(copied[0], read)
    assert torch.equal(made.token_ids, told.token_ids)
    assert torch.equal(made.added, told.added)
    assert made.added.any()
    run(take_back, given[1], made)
    assert same_bits(wide, before)


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("stage", WRITING)
def test_each_list_is_one_kernel_and_one_more_to_take_it_back(stage, tells):
    """In Triton's code: what is added is not written to memory first, and no operator is left to ATen."""
    given = arguments(stage, 4000, 64)

    def steps(run):
        made = run(stage, *given, vocab_size=4000, tells=tells)
        return run(take_back, given[1], made) if tells else made

    found = listed(generated(steps, "triton"))
    assert not [each.name for each in found if each.kind == FALLBACK]
    assert [each.launches for each in found] == [1] * (1 + tells)


def test_memory_that_is_given_twice_becomes_two_that_lie_alike():
    """Columns of one table are no such memory: copied, they would be aligned as no later ones are."""
    x, table = torch.randn(4, 8)[:, 2:7], torch.zeros(4, 6)
    given = x, x.view(torch.int32), table[:, 1], table[:, 3]
    made = unshared(given, are_read=True)
    assert [each is other for each, other in zip(made, given, strict=True)] == [True, False, True, True]
    assert torch.equal(made[1], given[1])
    assert (made[1].stride(), made[1].storage_offset()) == (x.stride(), x.storage_offset())
    assert made[1].data_ptr() != x.data_ptr()
    unread = unshared(given, are_read=False)[1]
    assert (unread.shape, unread.stride(), unread.storage_offset()) == (x.shape, x.stride(), x.storage_offset())
    assert not unread.untyped_storage().nbytes()


V, R, SLOTS = 129, 12, 3
ROW_IDS = torch.tensor([7, 8, 9, 10, 11, 11, 11])


@dataclass(frozen=True)
class Halved(LogitEdit):
    """An edit that depends on the row."""

    def edit(self, x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
        return torch.where((rows.positions & 1) == 1, 0.5 * x, x)


@pytest.mark.parametrize(
    ("dtype", "run"),
    [(torch.float32, call), (torch.bfloat16, call), (torch.bfloat16, CompiledStages())],
    ids=["float32", "bfloat16", "compiled"],
)
def test_picked_rows_are_edited_as_a_copy_of_them(dtype, run):
    source = torch.Generator().manual_seed(3)
    values = torch.randn(R, V + 4, generator=source).to(dtype)
    words = torch.randint(-(2**31), 2**31, (len(ROW_IDS) + SLOTS, -(-V // 32)), generator=source, dtype=torch.int32)
    slots, positions = torch.tensor([0, 1, 2, 0, 1, -1, -1]), torch.arange(len(ROW_IDS))
    masks = words[SLOTS:], slots, AllowedIds(words[:SLOTS])
    edits = given_to_all([Halved()], SLOTS, V)
    of_edits = words[SLOTS:], slots, positions, None, edits.tables.custom, (), None
    picked, copy = PickedRows(values, ROW_IDS), values[ROW_IDS]
    for stage, read, static in ((copied, (), {}), (masked, masks, {}), (customized, of_edits, {"edits": edits.custom})):
        made = run(stage, picked, *read, vocab_size=V, **static)
        assert torch.equal(made, stage(copy, *read, vocab_size=V, **static))
        assert made.dtype is torch.float32
        assert made.untyped_storage().data_ptr() != values.untyped_storage().data_ptr()


RECORDED, WIDTH, LONG = 8, 3, 1000


@pytest.mark.parametrize("length", tiers([40, 5000], [40, 3000, 5000]))
@pytest.mark.parametrize(("stage", "most"), [(record_draws, 1), (record_drafts, 2), (record_ends, 3)])
def test_a_record_takes_few_kernels(stage, most, length):
    """Whether the history is held in registers whole or looped over, which short and long ones differ in."""
    sampler = Sampler(LONG, RECORDED, backend="eager", history_len=length)
    edits = sampler._edits
    numbers = torch.zeros(RECORDED, dtype=torch.int64)
    one, several, status = numbers + 1, torch.zeros(RECORDED, WIDTH, dtype=torch.int64), numbers.to(torch.int32)
    given = {
        record_draws: (one, status, edits.stops),
        record_drafts: (several, numbers + WIDTH, sampler._requests.staged.table),
        record_ends: (several, numbers + WIDTH - 1, status),
    }[stage]
    static = {record_drafts: {"vocab_size": LONG}, record_draws: {"num_places": length}}.get(stage, {})
    with for_a_gpu():
        code = generated(
            lambda run: run(stage, *edits.history.memory, torch.arange(RECORDED), numbers, *given, **static), "triton"
        )
    found = listed(code)
    assert [each.name for each in found if each.kind == FALLBACK] == []
    assert sum(each.launches for each in found) <= most


@pytest.mark.parametrize("width", [1, 5, 32])
def test_an_end_is_one_in_however_many_places_it_is_looked_for(width):
    source = torch.Generator().manual_seed(width)
    ids = torch.stack([torch.randperm(40, generator=source)[:width] for _ in range(RECORDED)]).to(torch.int32)
    counts = (torch.arange(RECORDED) % (width + 1)).to(torch.int32)
    lists = StopLists(counts, counts, counts, ids)
    slots = torch.tensor([*range(RECORDED), -1])
    tokens, status = torch.arange(40), torch.zeros(1, dtype=torch.int32)
    seen = set()
    for row, token in itertools.product(range(len(slots)), tokens):
        wanted = row < RECORDED and int(token) in ids[row, : counts[row]].tolist()
        for places in (0, width - 1, width, 33, 100):
            found = are_ends(token[None], status, slots[row : row + 1], lists, num_places=places)
            assert found.tolist() == [wanted]
        seen.add(wanted)
    assert seen == {False, True}


# The history of requests that come with tokens.


LENGTH = 12


def walked(text: Text) -> np.ndarray:
    """The entries of one request, token by token."""
    made = np.array([[UNWRITTEN], [0], [NO_SUCCESSOR]], np.int32).repeat(LENGTH, 1)
    last: dict[int, int] = {}
    drawn: dict[int, int] = {}
    for place, token in enumerate(text.token_ids):
        made[TOKEN, place] = token
        if token == UNWRITTEN:
            continue
        drawn[token] = drawn.get(token, 0) + (place >= text.prompt_len)
        made[ORDINAL, place] = drawn[token]
        if token in last:
            made[SUCCESSOR, last[token]] = place
        last[token] = place
    return made


def test_the_histories_of_requests_that_come_together_are_those_of_each():
    """Empty ones, equal ones, unknown tokens, and one token that ends a text and begins the next."""
    numbers = np.random.default_rng(0)
    texts = [
        Text((), 0),
        Text([4, 7, 7, 3, 3], 2),
        Text([3, 3], 0),
        Text([UNWRITTEN, 5, UNWRITTEN, 5], 3),
        Text([5], 1),
    ]
    for _ in range(100):
        tokens = numbers.integers(-1, 4, numbers.integers(0, LENGTH + 1))
        texts.append(Text(np.where(tokens < 0, UNWRITTEN, tokens).tolist(), int(numbers.integers(0, len(tokens) + 1))))
    assert np.array_equal(entries_of(texts, LENGTH), np.stack([walked(text) for text in texts]))


# What the edits declare fits together: parameters of requests, columns of a slot's row, tables, and who names them.


LAW = {"temperature", "top_k", "top_p", "min_p", "seed", "extra_args"}
"""Parameters of every request, and what brings edits of the user."""


def test_each_parameter_is_of_one_edit_or_of_the_law():
    declared = [name for spec in EDIT_SPECS for name in spec.parameters]
    assert Counter([*LAW, *declared]) == Counter(field.name for field in dataclasses.fields(SamplingParams))


def test_defaults_are_stored_as_they_are_and_need_no_edit():
    """The checks run, since a parameter is not the default itself."""
    params = SamplingParams(logit_bias={})
    assert params.edits == ()
    for name, parameter in PARAMETERS.items():
        default = getattr(SamplingParams(), name)
        assert parameter.check(name, default) == default == getattr(params, name)


@pytest.mark.parametrize("sizes", [EditSizes(), EditSizes(biases=1, stops=3, bad_words=5, bad_word_len=7, breakers=17)])
def test_no_word_of_a_row_belongs_to_two_columns(sizes):
    layout, owners = RowLayout(sizes, V), Counter[int]()
    for column, start in layout.starts.items():
        words = column.dtype.itemsize // 4
        assert start % (16 if layout.shapes[column] else words) == 0
        owners.update(range(start, start + words * int(np.prod(layout.shapes[column]))))
    assert set(owners.values()) == {1}
    assert max(owners) < layout.num_words


@pytest.mark.parametrize("name", OF_EDIT)
def test_a_row_differs_from_one_without_edits_in_the_columns_of_its_edits_alone(name):
    layout, params = RowLayout(EditSizes(), V), SamplingParams(temperature=0.7, **OF_EDIT[name])
    assert name in params.edits
    changed = layout.row_of(params, params.edits, 0, False) != layout.row_of(SamplingParams(), (), 0, False)
    for column, start in layout.starts.items():
        words = column.dtype.itemsize // 4 * int(np.prod(layout.shapes[column]))
        if not any(column in spec.columns.values() for spec in EDIT_SPECS if spec.name in params.edits):
            assert not changed[start : start + words].any()
    assert changed.any()


def test_a_greedy_request_has_no_filter_and_writes_none():
    layout, every = (
        RowLayout(EditSizes(), V),
        {"typical_p": 0.5, "xtc_probability": 1.0, "min_k": True, "p_less": True},
    )
    params = SamplingParams(temperature=0.0, top_n_sigma=1.0, **every)
    assert params.edits == ()
    assert np.array_equal(layout.row_of(params, params.edits, 0, False), layout.row_of(SamplingParams(), (), 0, False))


def test_the_page_for_users_names_every_parameter():
    page = (Path(__file__).parents[3] / "docs" / "edits.md").read_text()
    assert set(PARAMETERS) <= set(re.findall(r"\w+", page))
