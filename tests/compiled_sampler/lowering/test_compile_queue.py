"""No call compiles: a stage runs in eager torch until a process has compiled it, or for good, with a reason."""

import ctypes
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor.codecache import CppPythonBindingsCodeCache

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.core.noise import TARGET
from compiled_sampler.core.rows import RowSlots, gather_rows
from compiled_sampler.exact import row_race, triton
from compiled_sampler.exact.row_race import IN_TORCH, race_top_k_in_torch
from compiled_sampler.exact.triton import LOCK
from compiled_sampler.lowering import compile_process, compile_queue
from compiled_sampler.lowering.compile_process import CompileProcess
from compiled_sampler.lowering.compile_queue import (
    HANGS,
    NO_PROCESS,
    NOT_KEPT,
    PROCESSES_VARIABLE,
    QUEUE,
    number_of_processes,
)
from compiled_sampler.lowering.compiled_stages import CompiledStages, StageWarning
from compiled_sampler.lowering.stage_code import StageCode
from compiled_sampler.passes.maxima import order_maxima
from tests.builders.inputs import sample_inputs
from tests.builders.sampler import V, nothing_compiles, stages_stay_eager

CPU = torch.device("cpu")
STATIC = {"vocab_size": 129, "block": 64, "slices": 1, "by_bits": False}
LOGITS = torch.randn(3, 129)


@pytest.fixture(autouse=True)
def calls_wait_for_nothing(monkeypatch):
    """As a user has it, with one process."""
    monkeypatch.setattr(CompiledStages, "compiles_at_calls", False)
    monkeypatch.setenv(PROCESSES_VARIABLE, "1")
    monkeypatch.setattr(compile_process, "_NICENESS", 0)  # beside other tests it would hardly ever run
    monkeypatch.setattr(compile_queue, "_IDLE_SECONDS", 0.0)  # no test finds the process of another


@pytest.fixture
def stages():
    return CompiledStages()


@pytest.fixture
def empty_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


@contextmanager
def compiled_nowhere():
    """In this process."""
    with mock.patch.object(StageCode, "compiled", side_effect=AssertionError("compiled in a caller's process")):
        yield


def is_right(stages):
    return torch.equal(stages(order_maxima, LOGITS, **STATIC).keys, order_maxima(LOGITS, **STATIC).keys)


def settled(stages, seconds=300.0):
    """Whether nothing is queued before long."""
    end = time.monotonic() + seconds
    while stages.status().queued_stages and time.monotonic() < end:
        time.sleep(0.02)
    return not stages.status().queued_stages


def put_on_disk():
    stages = CompiledStages()
    with stages.compiling_at_calls():
        stages(order_maxima, LOGITS, **STATIC)


def test_a_stage_runs_eager_until_a_process_has_compiled_it_and_the_log_says_so(stages, empty_disk, caplog):
    caplog.set_level(logging.INFO, "compiled_sampler")
    with compiled_nowhere():
        assert is_right(stages)
        assert stages.status().queued_stages == {"order_maxima": 1}
        assert is_right(stages)
        assert settled(stages)
        assert is_right(stages)
    with nothing_compiles():
        assert is_right(stages)
        assert torch.equal(stages(order_maxima, LOGITS[:2], **STATIC).keys, order_maxima(LOGITS[:2], **STATIC).keys)
    assert stages.status().eager_stages == {}
    said = [record.message for record in caplog.records if record.name == "compiled_sampler"]
    assert [each.split(" ")[0] for each in said] == ["kernels", "all"]


def test_what_is_on_disk_starts_no_process(stages, empty_disk):
    put_on_disk()
    with mock.patch.object(compile_process, "_started", side_effect=AssertionError("started")), compiled_nowhere():
        assert is_right(stages)
        assert settled(stages)
        assert is_right(stages)
    assert stages.status().eager_stages == {}


def test_a_call_imports_no_compiler():
    code = """
import sys, torch
from compiled_sampler import Sampler, SamplingParams
sampler = Sampler(100, 2)
plan = sampler.plan([sampler.add_request(SamplingParams(seed=1, top_p=0.9))])
sampler.sample(plan, torch.randn(1, 100), torch.tensor([0]))
print([name for name in [*sys.modules] if name.startswith(("torch._dynamo", "torch._inductor", "sympy"))])
"""
    environment = {**os.environ, PROCESSES_VARIABLE: "0"}  # no thread imports any, either
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_warmup_that_begins_while_a_thread_imports_the_compilers_compiles_all():
    code = """
import time, torch
from compiled_sampler import Sampler, SamplingParams
sampler = Sampler(129, 2)
plan = sampler.plan([sampler.add_request(SamplingParams(seed=1, temperature=0.0))])
sampler.sample(plan, torch.randn(1, 129), torch.tensor([0]))
time.sleep(0.2)
sampler.warmup(modes=())
lowering = sampler.statistics().lowering
print({**lowering.eager_stages}, {**lowering.queued_stages})
"""
    ran = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True)
    assert ran.stdout.strip() == "{} {}", ran.stderr


def test_a_draw_imports_its_kernels_after_a_thread_that_imports_the_compilers(monkeypatch):
    imported = mock.Mock()
    monkeypatch.setattr(triton.importlib, "import_module", imported)
    monkeypatch.delitem(sys.modules, "compiled_sampler.exact.triton.operators", raising=False)
    draw = threading.Thread(target=triton.triton_operators)
    with LOCK:
        draw.start()
        draw.join(0.2)
        assert not imported.called
    draw.join()
    imported.assert_called_once_with("compiled_sampler.exact.triton.operators")


FAILURES = {
    "it ends": (compile_process, "_PROGRAM", "pass", "the process that compiles it ended"),
    "it cannot be started": (compile_process.sys, "executable", "/nowhere/python", "no process can be started"),
    "its stage cannot be sent": (compile_process.pickle, "dumps", mock.Mock(side_effect=pickle.PicklingError), "ask"),
    "it fails": (CompileProcess, "compile", lambda *_: "it fails with OSError: no space left", "no space left"),
    "it keeps nothing": (CompileProcess, "compile", lambda *_: "", "it cannot be read in"),
    "we fail": (compile_queue, "import_compilers", mock.Mock(side_effect=ImportError("planted")), "ImportError: plant"),
}


@pytest.mark.parametrize("why", FAILURES)
def test_a_stage_that_no_process_compiles_stays_eager_for_a_reason_and_a_warmup_compiles_it(stages, why, empty_disk):
    owner, name, planted, reason = FAILURES[why]
    with mock.patch.object(owner, name, planted):
        assert is_right(stages)
        assert settled(stages)
    assert reason in stages.status().eager_stages["order_maxima"]
    with pytest.warns(StageWarning, match=r"order_maxima runs in eager torch.*C\+\+ compiler.*TORCHINDUCTOR_CACHE_DIR"):
        assert is_right(stages)
    assert is_right(stages)  # warns once
    with stages_stay_eager(), stages.compiling_at_calls():
        assert is_right(stages)
    assert stages.status().eager_stages == {}


def test_a_process_that_hangs_is_stopped(stages, empty_disk, monkeypatch):
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    monkeypatch.setattr(compile_process, "_started", lambda environment: started)
    monkeypatch.setattr(compile_process, "_PATIENCE", 0.2)
    assert is_right(stages)
    assert settled(stages, 60.0)
    assert started.wait(60) is not None
    assert "ended" in stages.status().eager_stages["order_maxima"]


def test_a_process_that_works_for_long_is_waited_for(monkeypatch):
    works = "import pickle, sys, time\nwhile time.process_time() < 2: pass\nsys.stdout.buffer.write(pickle.dumps(''))"
    command, pipes = [sys.executable, "-c", works], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = subprocess.Popen(command, start_new_session=True, **pipes)
    monkeypatch.setattr(compile_process, "_started", lambda environment: started)
    monkeypatch.setattr(compile_process, "_PATIENCE", 0.5)
    process = compile_process.CompileProcess()
    assert process.compile(StageCode.of(order_maxima, (LOGITS,), STATIC), Path("nowhere")) == ""
    process.end()


def test_what_cannot_be_kept_stays_eager_without_a_warning(stages):
    def local(x):
        return x + 1

    for _ in range(2):
        assert torch.equal(stages(local, LOGITS), LOGITS + 1)
        assert settled(stages)
    assert stages.status().eager_stages == {"local": NOT_KEPT}


@pytest.fixture
def launches(monkeypatch):
    """The rows of each call of a stage whose kernels are written by hand, as they are on a GPU."""
    found = []

    def launched(logits, rows, *, vocab_size):
        if type(logits) is not Tensor:  # asked for its shapes
            return rows.top_k[:, None], rows.idle[:, None]
        found.append(logits.shape[0])
        return race_top_k_in_torch(logits, rows, vocab_size=vocab_size)

    monkeypatch.setattr(row_race, "race_top_k", launched)
    monkeypatch.setitem(IN_TORCH, launched, race_top_k_in_torch)
    return found


def rows_to_race():
    inputs = sample_inputs(LOGITS, [SamplingParams(seed=seed, top_k=5 + 60 * seed) for seed in range(3)])
    return gather_rows(RowSlots(inputs.table, inputs.slots, inputs.positions), stream=TARGET)


def races_right(stages):
    arguments, static = (LOGITS, rows_to_race()), {"vocab_size": 129}
    found, wanted = stages(row_race.race_top_k, *arguments, **static), race_top_k_in_torch(*arguments, **static)
    return all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("reason", ["", "it fails with RuntimeError: no C compiler"])
def test_torch_stands_in_for_hand_written_kernels_until_a_process_has_compiled_them(launches, reason):
    stages, may_end = CompiledStages(), threading.Event()

    def compile_in_a_process(*_):
        may_end.wait()
        return reason

    with mock.patch.object(CompileProcess, "compile", side_effect=compile_in_a_process):
        assert races_right(stages)
        assert stages.status().queued_stages == {"launched": 1}
        may_end.set()
        assert settled(stages)
    assert not launches
    if reason:
        with pytest.warns(StageWarning, match="no C compiler"):
            assert races_right(stages)
    assert races_right(stages)
    assert launches == ([] if reason else [3])
    assert stages.status().eager_stages == ({"launched": reason} if reason else {})


def test_a_warmup_launches_hand_written_kernels_which_no_process_compiled(stages, launches, monkeypatch):
    monkeypatch.setenv(PROCESSES_VARIABLE, "0")
    assert races_right(stages)
    assert stages.status().eager_stages == {"launched": NO_PROCESS}
    with stages.precompiling(CPU):
        assert not stages(row_race.race_top_k, LOGITS, rows_to_race(), vocab_size=129)[0].any()
    launches.clear()
    assert races_right(stages)
    assert launches == [3]
    assert stages.status().eager_stages == {}


def test_kernels_that_do_not_compile_are_left_to_torch_and_a_capture_is_refused(stages, launches, monkeypatch):
    monkeypatch.setattr(StageCode, "compiled", mock.Mock(side_effect=RuntimeError("no C compiler")))
    with stages.compiling_at_calls(), pytest.warns(StageWarning, match="no C compiler"):
        assert races_right(stages)
    assert not launches
    assert stages.status().eager_stages == {"launched": "it fails with RuntimeError: no C compiler"}
    assert stages.lacks_kernels
    monkeypatch.setattr(StageCode, "check_not_capturing", mock.Mock(side_effect=RuntimeError("not compiled")))
    with pytest.raises(RuntimeError, match="not compiled"):
        races_right(stages)


def test_numbers_of_rows_whose_kernels_differ_are_compiled_apart():
    def key(rows):
        tensors = torch.zeros(rows, 129), torch.zeros(rows)
        return StageCode.of(row_race.race_top_k, tensors, {"vocab_size": 129}).key

    assert len({key(rows) for rows in (2, 8, 40, 300)}) == 4
    assert key(40) == key(41)


def test_code_that_comes_while_a_call_looks_for_it_is_taken_by_the_next(stages, launches):
    with mock.patch.object(QUEUE, "put"):  # no thread takes it
        assert races_right(stages)
    (wanted,) = stages._wanted.values()
    stages._called.clear()

    def looked(code):
        wanted.compiled, wanted.state = code.hand_written(), "ready"  # by a thread

    with mock.patch.object(StageCode, "check_not_capturing", autospec=True, side_effect=looked):
        assert races_right(stages)
    assert races_right(stages)
    assert launches == [3, 3]


def test_without_processes_stages_stay_eager(stages, monkeypatch):
    monkeypatch.setenv(PROCESSES_VARIABLE, "0")
    with mock.patch.object(QUEUE, "_serve", side_effect=AssertionError("a thread")):
        assert is_right(stages)
    assert stages.status().eager_stages == {"order_maxima": NO_PROCESS}


def test_an_outer_capture_of_what_is_not_compiled_is_refused(stages, monkeypatch):
    monkeypatch.setattr(StageCode, "check_not_capturing", mock.Mock(side_effect=RuntimeError("not compiled")))
    with pytest.raises(RuntimeError, match="not compiled"):
        is_right(stages)
    assert stages.status().queued_stages == {}


def test_a_warmup_that_does_not_wait_puts_its_stages_before_those_of_calls():
    sampler = Sampler(V, 2, backend="compiled")
    plan = sampler.plan([sampler.add_request(SamplingParams(seed=1, min_p=0.1))])
    with mock.patch.object(QUEUE, "_start_threads"):
        sampler.sample(plan, torch.randn(1, V), torch.tensor([0]))
        of_call = len(QUEUE._waiting)
        sampler.warmup(modes=["greedy"], wait=False)
    names = [wanted.name for wanted in QUEUE._waiting]
    QUEUE._waiting.clear()
    assert of_call
    assert "first_from_blocks" in names[:-of_call]


def test_where_no_thread_can_start_a_stage_runs_eager_and_the_next_call_tries_again(stages):
    put_on_disk()
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        assert is_right(stages)
        assert is_right(stages)
    assert stages.status().queued_stages == {"order_maxima": 1}
    assert is_right(stages)
    assert settled(stages, 60.0)


def test_a_child_that_is_forked_reads_what_is_there_from_a_disk_that_it_must_not_write(monkeypatch, kept_threads):
    torch.set_num_threads(1)
    CppPythonBindingsCodeCache.cache.clear()  # else a library that another test built is not written here
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        put_on_disk()
        folders = [Path(folder), *(each for each in Path(folder).rglob("*") if each.is_dir())]
        for each in folders:
            each.chmod(0o555)
        try:
            assert in_child(reads_what_is_there) == 0
        finally:
            for each in folders:
                each.chmod(0o755)


def reads_what_is_there():
    ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())  # root may write anywhere
    assert not os.access(os.environ["TORCHINDUCTOR_CACHE_DIR"], os.W_OK)
    CppPythonBindingsCodeCache.cache.clear()
    stages = CompiledStages()
    with mock.patch.object(CompileProcess, "compile", return_value="a process was started"):
        return is_right(stages) and settled(stages) and is_right(stages) and not stages.status().eager_stages


def test_in_a_child_with_several_threads_compiled_stages_run_eager(stages, kept_threads):
    torch.set_num_threads(2)
    put_on_disk()
    assert is_right(stages)
    assert settled(stages)
    assert is_right(stages)
    assert in_child(lambda: is_right(stages) and stages.status().eager_stages == {"order_maxima": HANGS}) == 0


def test_a_fork_while_a_stage_is_compiled_neither_hangs_nor_loses_it(stages, empty_disk):
    with mock.patch.object(CompileProcess, "compile", side_effect=lambda *_: time.sleep(2.0) or "planted"):
        assert is_right(stages)
        while QUEUE._waiting:
            time.sleep(0.01)
        assert in_child(lambda: is_right(stages) and settled(stages, 60.0)) == 0
        assert settled(stages, 60.0)


def in_child(work, seconds=120.0):
    """The exit status of a forked child, 0 where the work is done."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are threads
        child = os.fork()
    if not child:
        try:
            os._exit(0 if work() else 1)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(2)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -1


def test_without_a_compiler_stages_stay_eager(stages, empty_disk, monkeypatch):
    monkeypatch.setenv("PATH", str(empty_disk))
    monkeypatch.delenv("CXX", raising=False)
    assert is_right(stages)
    assert settled(stages)
    assert "C++" in stages.status().eager_stages["order_maxima"]


def test_the_number_of_processes_follows_cores_memory_and_the_variable(monkeypatch):
    monkeypatch.delenv(PROCESSES_VARIABLE)
    for count, wanted in ((2, 1), (8, 6), (16, 12), (64, 12)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=count: {*range(count)})
        assert number_of_processes(CPU) == wanted
    for beside, wanted in (("4", 12), ("8", 6), ("16", 1), ("0", 12), ("", 12), ("many", 12)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", beside)
        assert number_of_processes(CPU) == wanted
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    for free, wanted in ((5, 2), (1, 0)):
        with mock.patch.object(torch.cuda, "mem_get_info", return_value=(free * 2**30, 80 * 2**30)):
            assert number_of_processes(torch.device("cuda")) == wanted
    with mock.patch.object(compile_queue.multiprocessing, "parent_process", return_value=object()):
        assert number_of_processes(CPU) == 1
    monkeypatch.setenv(PROCESSES_VARIABLE, "3")
    assert number_of_processes(CPU) == 3
    monkeypatch.setenv(PROCESSES_VARIABLE, "-1")
    with pytest.raises(ValueError, match="must be a number of processes, got '-1'; 0 starts none"):
        number_of_processes(CPU)


def test_that_memory_is_too_short_to_compile_is_said_once(monkeypatch, caplog):
    monkeypatch.delenv(PROCESSES_VARIABLE)
    monkeypatch.setattr(compile_queue, "number_of_processes", lambda _: 0)
    queue = compile_queue.CompileQueue()
    for _ in range(2):
        queue.put([], CPU)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
