"""Compiled stages on disk: found again, never out of date, and nothing is lost where they cannot be kept."""

import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from filelock import FileLock
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor.runtime import cache_dir_utils

import compiled_sampler
from compiled_sampler import Sampler
from compiled_sampler.batch import RowEntries, SampleOutputs, VerifyOutputs
from compiled_sampler.core.rows import RowSlots, gather_rows
from compiled_sampler.edits.bias import write_biases
from compiled_sampler.edits.min_tokens import StopLists
from compiled_sampler.edits.penalties import write_penalties
from compiled_sampler.edits.recording import cut_at_stop, record_draws, with_finished
from compiled_sampler.lowering import stage_code
from compiled_sampler.lowering.comparison import difference, outcome
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.lowering.inductor import disk_cache
from compiled_sampler.lowering.inductor.compilation import Compiled
from compiled_sampler.lowering.inductor.disk_cache import claimed
from compiled_sampler.lowering.stage_code import EXACT_OPTIONS, StageCode
from compiled_sampler.params import SamplingParams
from tests.builders.inputs import slot_table
from tests.builders.sampler import nothing_compiles

CPU = torch.device("cpu")


def scaled(x, *, factor):
    return x * factor + 1


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_dir_utils, "cache_dir", lambda: str(tmp_path))
    return tmp_path / "compiled_sampler"


def kept(folder):
    return [file for file in folder.rglob("*") if file.is_file()]


def compilations(x, factor=2, run=None):
    """How often ``torch.compile`` is called for a stage, by compiled stages that know none unless they are given."""
    with mock.patch.object(torch, "compile", wraps=torch.compile) as compiling:
        assert torch.equal((run or CompiledStages())(scaled, x, factor=factor), scaled(x, factor=factor))
    return int(compiling.call_count)


def test_what_one_compiled_the_next_loads(folder):
    assert compilations(torch.randn(3, 5)) == 1
    assert len(kept(folder)) == 1
    for rows in (2, 3, 70):
        assert compilations(torch.randn(rows, 5)) == 0
    assert len(kept(folder)) == 1


@pytest.mark.parametrize(
    ("x", "factor"),
    [
        (torch.randn(1, 5), 2),
        (torch.randn(3, 6), 2),
        (torch.randn(3, 9)[:, :5], 2),
        (torch.randn(5, 3).T, 2),
        (torch.randn(1, 5).expand(3, 5), 2),
        (torch.randn(3, 5).double(), 2),
        (torch.randn(3, 5), 3),
    ],
)
def test_another_layout_or_argument_is_compiled_and_kept_apart(folder, x, factor):
    run = CompiledStages()
    assert compilations(torch.randn(3, 5), run=run) == 1
    assert compilations(x, factor, run) == 1
    assert len(kept(folder)) == 2


@pytest.mark.parametrize("are_entries", [False, True], ids=["slots", "entries of rows, which nothing marks"])
def test_tables_of_any_number_of_slots_share_the_code_of_their_stage(folder, are_entries):
    """Torch marks what compiled code returns, so that a table made by a stage was of any size only by that."""
    params = [SamplingParams(seed=seed, top_k=seed + 1) for seed in range(70)]
    for expected, count in ((1, 8), (0, 5), (0, 70), *(() if are_entries else ((0, 1),))):
        table = slot_table(params[:count], 100)
        rows = torch.arange(count if are_entries else 9)
        if are_entries:
            table = RowEntries(
                *(column.clone() for column in table[:-2])
            )  # each from its own start, as stages make them
        row_slots = RowSlots(table, rows % count, rows)
        with mock.patch.object(torch, "compile", wraps=torch.compile) as compiling:
            found = CompiledStages()(gather_rows, row_slots, stream=0)
        assert compiling.call_count == expected
        assert not difference(found, gather_rows(row_slots, stream=0))
    assert len(kept(folder)) == 1


def test_lists_and_histories_of_more_requests_share_the_code_of_their_stages(folder):
    params = SamplingParams(repetition_penalty=1.5, logit_bias={3: 1.0}, stop_token_ids=(4,))
    for expected, count in ((3, 4), (0, 9)):
        sampler = Sampler(100, count, backend="eager", history_len=40)
        slots = torch.tensor([sampler.add_request(params, [1, 2, 3]) for _ in range(count)])
        sampler._edits.upload()
        biases, penalties, stops = sampler._edits.inputs(
            ("logit_bias", "penalties", "min_tokens"), {}, None
        ).tables.lists
        history, rows = sampler._edits.history.memory
        x, numbers = torch.randn(count, 100), torch.full((count,), 3)
        drawn = history, rows, slots, numbers, numbers + 1, numbers.to(torch.int32) * 0, stops
        calls = [
            (write_biases, (x, x.view(torch.int32), slots, biases), {"vocab_size": 100}),
            (write_penalties, (x, x.view(torch.int32), slots, numbers, penalties, history), {"vocab_size": 100}),
            (record_draws, drawn, {}),
        ]
        for stage, given, static in calls:
            wanted = outcome(partial(stage, **static), given, writes=True)
            with mock.patch.object(StageCode, "compiled", autospec=True, side_effect=StageCode.compiled) as compiling:
                found = outcome(partial(CompiledStages(), stage, **static), given, writes=True)
            assert compiling.call_count == (expected > 0)
            assert not difference(found, wanted)
    assert len(kept(folder)) == 3


def test_stages_that_return_the_class_of_an_argument_are_loaded(folder):
    numbers, slots = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    counts = torch.ones(3, dtype=torch.int32)
    stops = StopLists(counts, counts, counts, torch.zeros(3, 2, dtype=torch.int32))
    drawn, made = SampleOutputs(numbers, counts), VerifyOutputs(numbers[:, None] + 1, *[numbers] * 3, counts)
    wanted = with_finished(drawn, slots, stops), cut_at_stop(made, slots, stops)
    for expected in (2, 0):
        stages = CompiledStages()
        with mock.patch.object(torch, "compile", wraps=torch.compile) as compiling:
            found = stages(with_finished, drawn, slots, stops), stages(cut_at_stop, made, slots, stops)
        assert compiling.call_count == expected
        assert not difference(found, wanted)


def test_the_name_of_a_file_tells_all_that_it_depends_on(folder, monkeypatch):
    def path(**changes):
        given = {"stage": scaled, "device": CPU, "options": EXACT_OPTIONS, "key": (1,), **changes}
        return disk_cache.path_of(given["stage"], given["device"], given["options"], *given["key"])

    first = path()
    assert first == path()
    assert first != path(stage=nothing_compiles)
    assert first != path(options={**EXACT_OPTIONS, "split_reductions": True})
    assert first != path(key=(2,))
    with torch._inductor.config.patch(max_autotune=True):
        assert first != path()
    for name, value in (("_library", lambda: "x"), ("_machine", lambda device: "x"), ("hash_of", lambda file: "x")):
        with mock.patch.object(disk_cache, name, value):
            assert first != path()
    assert first == path()


def test_a_source_in_a_subfolder_changes_the_key_which_holds_the_hash_of_this_package(tmp_path):
    package, hashes = tmp_path / "package", set()
    source = package / "exact" / "triton" / "race.py"
    source.parent.mkdir(parents=True)
    for place, text in ((source, "x = 1"), (source, "x = 2"), (package / "race.py", "x = 2")):
        place.write_text(text, encoding="utf-8")
        disk_cache.hash_of.cache_clear()  # a process reads a source once
        hashes.add(disk_cache.library_hash(package))
    assert len(hashes) == 3
    assert disk_cache.library_hash(Path(compiled_sampler.__file__).parent) in disk_cache._library()


@pytest.mark.parametrize("setting", [{"fx_graph_cache": False}, {"force_disable_caches": True}])
def test_where_inductor_may_keep_nothing_neither_does_this(folder, setting):
    with torch._inductor.config.patch(setting):
        assert [compilations(torch.randn(3, 5)) for _ in range(2)] == [1, 1]
    assert kept(folder) == []


@pytest.mark.parametrize("kept_bytes", [0, 1000, None])
def test_a_damaged_file_is_compiled_again_and_mended(folder, kept_bytes):
    assert compilations(torch.randn(3, 5)) == 1
    (file,) = kept(folder)
    file.write_bytes(b"\x80\x04N." if kept_bytes is None else file.read_bytes()[:kept_bytes])
    assert compilations(torch.randn(3, 5)) == 1
    assert compilations(torch.randn(3, 5)) == 0


def test_other_triton_kernels_of_the_process_are_neither_stored_nor_replaced(folder):
    def kernel_of_an_engine():
        """Of no module, so that it cannot be stored."""

    with mock.patch.multiple(
        kernel_side_table, id_to_kernel={0: kernel_of_an_engine}, constant_args={0: {"x": object()}}
    ):
        for expected in (1, 0):
            assert compilations(torch.randn(3, 5)) == expected
            assert kernel_side_table.id_to_kernel == {0: kernel_of_an_engine}
    assert len(kept(folder)) == 1


@pytest.mark.parametrize(
    ("owner", "name", "planted"),
    [
        (disk_cache, "_no_triton_kernels", mock.Mock(side_effect=RuntimeError("cannot be serialised"))),
        (disk_cache, "tempfile", mock.Mock(TemporaryDirectory=mock.Mock(side_effect=OSError("no space left")))),
    ],
    ids=["not serialised", "a full disk"],
)
def test_what_cannot_be_stored_is_compiled_all_the_same(folder, owner, name, planted):
    with mock.patch.object(owner, name, planted):
        assert compilations(torch.randn(3, 5)) == 1
    assert kept(folder) == []


def test_a_file_for_other_numbers_of_rows_is_left_alone(folder):
    assert compilations(torch.randn(3, 5)) == 1
    loaded = Compiled(mock.Mock(), lambda *tensors: False)
    (file,) = kept(folder)
    before = file.read_bytes()
    with mock.patch.object(stage_code, "load", return_value=loaded):
        assert compilations(torch.randn(3, 5)) == 1
    assert not loaded.function.called
    assert file.read_bytes() == before


def test_shapes_that_a_stage_was_not_made_for_are_compiled_anew():
    def pairwise(x, y):
        return x + y  # makes their numbers of rows equal

    run, x = CompiledStages(), torch.randn(3, 5)
    assert torch.equal(run(pairwise, x, x), x + x)
    with pytest.raises(Exception, match=r"(?i)match|size"):
        run(pairwise, x, torch.randn(4, 5))
    assert torch.equal(run(pairwise, x[:2], x[:2]), 2 * x[:2])


@pytest.mark.parametrize("error", [OSError("no locks here"), NotImplementedError("flock"), PermissionError("not ours")])
def test_where_no_file_can_be_locked_every_process_compiles(error, tmp_path):
    with mock.patch.object(FileLock, "acquire", side_effect=error), claimed(tmp_path / "compiled_sampler" / "ab" / "c"):
        pass


def test_of_two_processes_that_compile_a_stage_one_waits_but_not_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache, "_PATIENCE", 0.2)
    place, start = tmp_path / "compiled_sampler" / "ab" / "abcd", time.perf_counter()
    with claimed(place), claimed(place.with_name("abce")):
        assert time.perf_counter() - start < 0.2
        with claimed(place):
            assert time.perf_counter() - start >= 0.2
