"""Stages that other processes compile are found on disk; what fails there is compiled here, and no claim lasts."""

import functools
import multiprocessing
import pickle
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from filelock import FileLock

from compiled_sampler.batch import DraftTable
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.lowering.compiling import compile_processes, disk_cache, parallel_compile
from compiled_sampler.lowering.compiling.compile_processes import VARIABLE, number_of_processes
from compiled_sampler.lowering.compiling.disk_cache import CompiledElsewhere, claimed
from compiled_sampler.lowering.compiling.parallel_compile import Listing
from compiled_sampler.lowering.compiling.stage_code import StageCode
from compiled_sampler.lowering.stages.stage_call import StageCall, TensorSpec
from compiled_sampler.passes.maxima import order_maxima
from tests.tiers import tiers

CPU = torch.device("cpu")
STATIC = {"vocab_size": 129, "block": 64, "slices": 1, "by_bits": False}
LOGITS = torch.randn(3, 129)


@pytest.fixture
def empty_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "0")
    return tmp_path


def maxima_of(stages: CompiledStages, processes: int, monkeypatch) -> torch.Tensor:
    """The keys of a compiled stage that was precompiled with so many processes."""
    monkeypatch.setenv(VARIABLE, str(processes))
    with stages.precompiling(CPU):
        assert not stages(order_maxima, LOGITS, **STATIC).keys.any()
    return stages(order_maxima, LOGITS, **STATIC).keys


def test_a_stage_is_compiled_by_another_process_and_found_here(empty_disk, monkeypatch):
    with mock.patch.object(StageCode, "compiled", side_effect=AssertionError("compiled here")):
        found = maxima_of(CompiledStages(), 1, monkeypatch)
    assert torch.equal(found, order_maxima(LOGITS, **STATIC).keys)


def test_what_is_on_disk_starts_no_process(empty_disk, monkeypatch):
    maxima_of(CompiledStages(), 0, monkeypatch)
    with mock.patch.object(compile_processes, "_started", side_effect=AssertionError("started")):
        maxima_of(CompiledStages(), 1, monkeypatch)


FAILURES: dict[str, tuple[Any, str, Any]] = {
    "it fails": (compile_processes, "_WORKER", "compileall"),
    "it cannot be started": (compile_processes.sys, "executable", "/nowhere/python"),
    "its stage cannot be sent": (StageCall, "portable", mock.Mock(side_effect=pickle.PicklingError("planted"))),
    "it is no module": (compile_processes, "_WORKER", "compiled_sampler.no_such_module"),
    "its folder is gone": (compile_processes.os, "getcwd", mock.Mock(side_effect=FileNotFoundError)),
}


@pytest.mark.parametrize("why", tiers([*FAILURES][:3], FAILURES))
def test_what_another_process_cannot_compile_is_compiled_here(why, empty_disk, monkeypatch):
    if why == "its folder is gone":
        monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(*FAILURES[why])
    found = maxima_of(CompiledStages(), 1, monkeypatch)
    assert torch.equal(found, order_maxima(LOGITS, **STATIC).keys)


@pytest.mark.full
def test_a_path_may_be_no_text(empty_disk, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, empty_disk])
    with mock.patch.object(StageCode, "compiled", side_effect=AssertionError("compiled here")):
        maxima_of(CompiledStages(), 1, monkeypatch)


@pytest.mark.full
def test_settings_of_this_process_make_others_end_at_once(empty_disk, monkeypatch):
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        found = maxima_of(CompiledStages(), 1, monkeypatch)
    assert torch.equal(found, order_maxima(LOGITS, **STATIC).keys)
    assert len([path for path in (empty_disk / "compiled_sampler").rglob("*") if path.is_file()]) == 1


def test_a_process_that_hangs_is_stopped_and_its_stages_compiled_here(empty_disk, monkeypatch):
    started: list[subprocess.Popen[bytes]] = []

    def hanging(environment):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], **pipes))
        return started[-1]

    monkeypatch.setattr(compile_processes, "_started", hanging)
    monkeypatch.setattr(compile_processes, "_PATIENCE", 0.2)
    found = maxima_of(CompiledStages(), 1, monkeypatch)
    assert torch.equal(found, order_maxima(LOGITS, **STATIC).keys)
    assert [each.poll() is None for each in started] == [False]


@pytest.mark.full
def test_processes_start_before_it_is_known_what_they_compile(empty_disk, monkeypatch):
    monkeypatch.setenv(VARIABLE, "2")
    started, begun = compile_processes._started, list[bool]()

    def noted(environment):
        begun.append(True)
        return started(environment)

    monkeypatch.setattr(compile_processes, "_started", noted)
    stages = CompiledStages()
    with mock.patch.object(StageCode, "compiled", side_effect=AssertionError("compiled here")):
        with stages.precompiling(CPU, runs=1):
            assert len(begun) == 2
            stages(order_maxima, LOGITS, **STATIC)
        assert len(begun) == 2
    assert torch.equal(stages(order_maxima, LOGITS, **STATIC).keys, order_maxima(LOGITS, **STATIC).keys)


def test_the_longest_stage_is_handed_out_first(monkeypatch):
    listing, seconds = Listing(mock.Mock()), (1, 3, 2)

    def stage(x, *, seconds):
        return x

    clock = iter([0, 1, 0, 3, 0, 2, 0, 9])
    monkeypatch.setattr(parallel_compile, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    for number, each in enumerate(seconds):
        listing.add(number, stage, (LOGITS,), {"seconds": each})
    listing.add(3, stage, (LOGITS[:2],), {"seconds": 1})  # the same code as that of the first
    assert [call.static["seconds"] for _, call in listing.longest_first()] == [3, 2, 1]
    assert [len(code.tensors[0]) for code, _ in listing.longest_first()] == [3, 3, 3]


def test_a_record_says_whether_all_stages_of_some_steps_are_on_disk(empty_disk, monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    stages, steps = CompiledStages(), ("sample", 3)
    assert not stages.are_on_disk(CPU, *steps)
    with stages.precompiling(CPU, None, *steps):
        stages(order_maxima, LOGITS, **STATIC)
    others = CompiledStages()
    assert others.are_on_disk(CPU, *steps)
    assert not others.are_on_disk(CPU, "sample", 4)
    assert not CompiledStages({}).are_on_disk(CPU, *steps)
    with mock.patch.object(StageCode, "compiled", side_effect=AssertionError("compiled again")):
        assert torch.equal(others(order_maxima, LOGITS, **STATIC).keys, order_maxima(LOGITS, **STATIC).keys)
    (kept,) = (path for path in (empty_disk / "compiled_sampler").rglob("*") if path.is_file())
    kept.unlink()
    assert not others.are_on_disk(CPU, *steps)


def test_a_record_passes_over_what_is_never_kept(empty_disk, monkeypatch):
    def of_the_user(x):
        return x + 1

    monkeypatch.setenv(VARIABLE, "0")
    stages = CompiledStages()
    for number, listed in enumerate(([of_the_user], [of_the_user, order_maxima])):
        with stages.precompiling(CPU, None, number):
            for stage in listed:
                stages(stage, LOGITS, **(STATIC if stage is order_maxima else {}))
    assert [CompiledStages().are_on_disk(CPU, number) for number in range(2)] == [False, True]


def test_the_number_of_processes_follows_cores_calls_and_the_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    cores = functools.partial(monkeypatch.setattr, compile_processes.os, "sched_getaffinity")
    for count, calls, wanted in ((2, 100, 0), (8, 100, 6), (16, 100, 12), (64, 100, 12), (64, 9, 2), (64, 3, 0)):
        cores(lambda _, count=count: set(range(count)))
        assert number_of_processes(calls, CPU) == wanted
    for beside, wanted in (("4", 12), ("8", 6), ("16", 0), ("0", 12), ("", 12), ("many", 12)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", beside)
        assert number_of_processes(100, CPU) == wanted
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    gpu = torch.device("cuda")
    with mock.patch.object(torch.cuda, "mem_get_info", return_value=(5 * 2**30, 80 * 2**30)):
        assert (number_of_processes(100, gpu), number_of_processes(100, CPU)) == (2, 12)
    with mock.patch.object(compile_processes.multiprocessing, "parent_process", return_value=object()):
        assert number_of_processes(100, CPU) == 0
    monkeypatch.setenv(VARIABLE, "3")
    assert (number_of_processes(100, CPU), number_of_processes(2, CPU)) == (3, 2)
    monkeypatch.setenv(VARIABLE, "-1")
    with pytest.raises(ValueError, match="must be a number of processes, got '-1'; 0 starts none"):
        number_of_processes(100, CPU)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 5),
        torch.zeros(7, 9)[1:4, 2:5],
        torch.zeros(0, 4),
        torch.zeros(40, dtype=torch.int32)[5:],
        torch.zeros(()),
    ],
)
def test_a_spec_is_everything_but_the_numbers(tensor):
    made = TensorSpec.of(tensor).made()
    assert (made.shape, made.stride(), made.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert made.storage_offset() % 16 == tensor.storage_offset() % 16
    assert made.untyped_storage().nbytes() == 0


def test_a_call_keeps_the_form_of_its_arguments():
    call = StageCall.of(order_maxima, (LOGITS, None, (LOGITS[:1],)), STATIC)
    first, nothing, (second,) = call.made()
    assert (first.shape, nothing, second.shape) == ((3, 129), None, (1, 129))


def test_tables_stay_where_they_are_and_go_to_other_processes_without_their_memory():
    table = DraftTable(torch.zeros(5, 2, 7))
    call = StageCall.of(order_maxima, (table, LOGITS), STATIC)
    assert call.made()[0].logits is table.logits
    sent = pickle.loads(pickle.dumps(call.portable())).made()[0]
    assert isinstance(sent, DraftTable)
    assert (sent.logits.shape, sent.logits.untyped_storage().nbytes()) == ((5, 2, 7), 0)


STATICS = [STATIC, STATIC | {"block": 32}]


@pytest.fixture
def place(tmp_path):
    return tmp_path / "compiled_sampler" / "ab" / "abcd"


def code_of(number: int = 0) -> StageCode:
    return StageCode.of(order_maxima, (LOGITS,), STATICS[number])


def path_of(number: int = 0):
    path = code_of(number).path(CompiledStages()._options)
    assert path is not None
    return path


def is_free(path) -> bool:
    try:
        with claimed(path, waits=False):
            return True
    except CompiledElsewhere:
        return False


def hold(path, held, ends) -> None:
    with claimed(path, waits=True):
        held.set()
        ends.wait(60)


def test_a_stage_is_one_process_s_and_another_stage_is_free(place):
    with claimed(place, waits=False):
        assert not is_free(place)
        assert is_free(place.with_name("abce"))
    assert is_free(place)


def test_who_waits_goes_on_when_the_other_is_done(place):
    held, ends = threading.Event(), threading.Event()
    other = threading.Thread(target=hold, args=(place, held, ends))
    other.start()
    assert held.wait(60)
    threading.Timer(0.3, ends.set).start()
    with claimed(place, waits=True):
        assert ends.is_set()
    other.join()


def test_a_process_that_is_killed_lets_go(place):
    context = multiprocessing.get_context("spawn")
    held, ends = context.Event(), context.Event()
    other = context.Process(target=hold, args=(place, held, ends))
    other.start()
    assert held.wait(60)
    assert not is_free(place)
    other.kill()
    other.join()
    assert is_free(place)


def test_nobody_waits_for_ever(place, monkeypatch):
    monkeypatch.setattr(disk_cache, "PATIENCE", 0.2)
    start = time.perf_counter()
    with claimed(place, waits=True), claimed(place, waits=True):
        assert 0.2 <= time.perf_counter() - start < 10


@pytest.mark.parametrize("error", [OSError("no locks here"), NotImplementedError("flock"), PermissionError("not ours")])
def test_where_no_file_can_be_locked_every_process_compiles(error, place):
    with mock.patch.object(FileLock, "acquire", side_effect=error), claimed(place, waits=False):
        pass


def test_where_no_folder_can_be_made_every_process_compiles(tmp_path):
    (tmp_path / "compiled_sampler_locks").write_text("a file")
    with claimed(tmp_path / "compiled_sampler" / "ab" / "abcd", waits=False):
        pass


def test_of_stages_that_others_compile_the_last_are_waited_for(empty_disk):
    """Another process has the first stage: this one compiles the second meanwhile, and then finds the first on disk."""
    other, stages, made = CompiledStages(), CompiledStages(), list[int]()
    compiled = StageCode.compiled

    def noted(code, exact):
        made.append(code.static["block"])
        if code.static["block"] == 32:
            first_is_claimed.__exit__(None, None, None)
            other.compile(code_of(0))
        return compiled(code, exact)

    first_is_claimed = claimed(path_of(0), waits=False)
    first_is_claimed.__enter__()
    with mock.patch.object(StageCode, "compiled", noted), stages.precompiling(CPU):
        for static in STATICS:
            stages(order_maxima, LOGITS, **static)
    assert made == [32, 64]
    for static in STATICS:
        assert torch.equal(stages(order_maxima, LOGITS, **static).keys, order_maxima(LOGITS, **static).keys)


def test_a_call_during_a_warmup_of_another_thread_is_not_waited_for(empty_disk, monkeypatch):
    """Which once held the claim of a stage that the warm-up then waited for, and waited for the warm-up's lock."""
    monkeypatch.setattr(disk_cache, "PATIENCE", 600.0)
    warming, calling, begun, ended = CompiledStages(), CompiledStages(), threading.Event(), list[float]()

    def call() -> None:
        begun.wait(60)
        calling(order_maxima, LOGITS, **STATICS[0])
        ended.append(time.perf_counter())

    other = threading.Thread(target=call)
    other.start()
    with warming.precompiling(CPU):
        warming(order_maxima, LOGITS, **STATICS[0])
        begun.set()
        time.sleep(1.0)
        start = time.perf_counter()
    assert time.perf_counter() - start < 120
    other.join(120)
    assert ended


def test_a_call_waits_for_the_process_that_compiles_its_stage(empty_disk):
    stages, held, ends = CompiledStages(), threading.Event(), threading.Event()
    other = threading.Thread(target=hold, args=(path_of(), held, ends))
    other.start()
    assert held.wait(60)
    assert not stages.compile(code_of(), waits=False)
    threading.Timer(0.3, ends.set).start()
    assert torch.equal(stages(order_maxima, LOGITS, **STATICS[0]).keys, order_maxima(LOGITS, **STATICS[0]).keys)
    assert ends.is_set()
    other.join()
