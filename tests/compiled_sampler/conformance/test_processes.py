"""Processes of a run: everything arrives, and an error too; one that ends or breaks is replaced by another."""

import contextlib
import errno
import functools
import itertools
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from unittest import mock

import pytest
import torch

from compiled_sampler.conformance import QUICK, Bench, ask, chosen, run
from compiled_sampler.conformance.__main__ import main
from compiled_sampler.conformance.asking import answered
from compiled_sampler.conformance.processes import parallel_run
from compiled_sampler.conformance.processes.crew import ASKED, DEALT, Crew, in_processes
from compiled_sampler.conformance.processes.worker import NotStarted, ProcessEnded, ProcessHangs, Worker
from compiled_sampler.conformance.question import Finding
from compiled_sampler.conformance.questions import QUESTIONS
from tests.compiled_sampler.conformance.adapters.race_adapter import Race

CPU = torch.device("cpu")
LONG = 600.0


class HangsElsewhere(Race):
    """Gives no answer in any process but the one that runs the questions, when it has no rows."""

    def sample(self, logits, params, seeds, positions):
        if len(logits) == 0 and multiprocessing.parent_process() is not None:
            time.sleep(LONG)
        return super().sample(logits, params, seeds, positions)


class DiesElsewhere(Race):
    """Ends every process but the one that runs the questions, when it has no rows."""

    def sample(self, logits, params, seeds, positions):
        if len(logits) == 0 and multiprocessing.parent_process() is not None:
            os._exit(3)
        return super().sample(logits, params, seeds, positions)


class Unsendable(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def number(first: int) -> tuple[int, int]:
    return first, torch.get_num_threads()


def failing(error: Exception) -> None:
    raise error


def of_lambda() -> object:
    return lambda: None


def test_what_every_function_returns_arrives():
    made = list(in_processes([functools.partial(number, n) for n in (0, 10, 20)], None, CPU, LONG))
    assert [first for first, _ in made] == [0, 10, 20]
    assert all(threads >= 1 for _, threads in made)


def test_what_a_function_raises_is_raised():
    functions = [functools.partial(failing, ArithmeticError("planted")), functools.partial(number, 0)]
    with pytest.raises(ArithmeticError, match="planted"):
        list(in_processes(functions, None, CPU, LONG))


@pytest.fixture
def worker():
    made = Worker(1, CPU, LONG)
    yield made
    made.end()


def test_a_process_outlives_what_cannot_be_sent(worker):
    with pytest.raises(AttributeError, match="lambda"):
        worker.call(of_lambda)
    with pytest.raises(RuntimeError, match="Unsendable: planted 2"):
        worker.call(functools.partial(make_and_raise, "planted"))
    with pytest.raises(Exception, match="lambda"):
        worker.call(lambda: None)
    assert worker.call(functools.partial(number, 3)) == (3, 1)
    assert worker.is_sound()


def make_and_raise(text: str) -> None:
    raise Unsendable(text, 2)


def test_a_process_that_ends_says_so(worker):
    with pytest.raises(ProcessEnded, match="status 7"):
        worker.call(functools.partial(os._exit, 7))
    assert not worker.is_sound()


def test_a_process_that_gives_no_answer_in_time_says_so_and_can_be_ended():
    worker = Worker(1, CPU, 0.2)
    try:
        with pytest.raises(ProcessHangs, match=r"no answer in 0\.2 s and was ended; --limit"):
            worker.call(functools.partial(time.sleep, LONG))
        before = time.monotonic()
        assert not worker.is_sound()
        assert time.monotonic() - before < 1.0  # what hangs is not asked again
    finally:
        worker.end()


@pytest.fixture
def starts_few(monkeypatch):
    """A function that lets the system start so many processes more, and those that are running before the test."""

    def allow(most):
        start, starts = SpawnProcess.start, itertools.count()

        def limited(process):
            if next(starts) >= most:
                raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
            start(process)

        monkeypatch.setattr(SpawnProcess, "start", limited)

    return allow


def test_processes_before_one_that_cannot_be_started_are_ended(starts_few, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    before, threads = {*multiprocessing.active_children()}, {*threading.enumerate()}
    starts_few(2)
    with pytest.raises(NotStarted, match=r"could not be started: .*Resource temporarily unavailable"):
        Crew(3, CPU, LONG)
    assert {*multiprocessing.active_children()} <= before
    for each in {*threading.enumerate()} - threads:
        each.join(timeout=20)
    assert {*threading.enumerate()} <= threads


def test_work_fails_when_no_process_can_replace_one_that_ended(starts_few, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    starts_few(1)
    with Crew(1, CPU, LONG) as crew:
        first = crew.submit(lambda worker: worker.call(functools.partial(os._exit, 5)), ASKED)
        waiting = crew.submit(lambda worker: worker.call(os.getpid), ASKED)
        assert isinstance(first.exception(timeout=60), ProcessEnded)
        assert isinstance(waiting.exception(timeout=20), NotStarted)
        assert isinstance(crew.submit(lambda worker: worker.call(os.getpid), ASKED).exception(timeout=20), NotStarted)


def test_a_run_that_cannot_start_its_processes_ends_with_an_error(starts_few, monkeypatch, capsys):
    monkeypatch.setattr(parallel_run, "has_many_processors", lambda: True)
    starts_few(1)
    before = {*multiprocessing.active_children()}
    words = [
        "--target",
        "tests.compiled_sampler.conformance.adapters.race_adapter:Race",
        "--device",
        "cpu",
        "--only",
        "robustness",
    ]
    assert main(words) == 2
    assert "error: a process could not be started" in capsys.readouterr().err
    assert {*multiprocessing.active_children()} <= before


def test_a_process_that_ends_takes_what_it_started_along(worker):
    child = worker.call(started)
    worker.end()
    for _ in range(100):
        if not is_running(child):
            return
        time.sleep(0.05)
    pytest.fail("its child runs on")


def started() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_most_urgent_work_goes_first_and_a_process_that_ended_is_replaced(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    begun, all_wait, order = threading.Event(), threading.Event(), []

    def waits(worker):
        begun.set()
        all_wait.wait()
        return worker.call(functools.partial(os._exit, 5))

    with Crew(1, CPU, LONG) as crew:
        first = crew.submit(waits, ASKED)
        begun.wait()
        others = [crew.submit(lambda worker, n=n: order.append((n, worker.call(os.getpid))), n) for n in (ASKED, DEALT)]
        all_wait.set()
        with pytest.raises(ProcessEnded):
            first.result()
        for each in others:
            each.result()
    assert [rank for rank, _ in order] == [DEALT, ASKED]
    assert len({pid for _, pid in order}) == 1


def test_work_is_cancelled_when_the_crew_ends(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    begun = threading.Event()

    def sleeps(worker):
        begun.set()
        worker.call(functools.partial(time.sleep, LONG))

    with contextlib.suppress(KeyboardInterrupt), Crew(1, CPU, LONG) as crew:
        going_on, waiting = crew.submit(sleeps, ASKED), crew.submit(sleeps, ASKED)
        begun.wait()
        raise KeyboardInterrupt
    assert isinstance(going_on.exception(timeout=20), ProcessEnded)
    assert waiting.cancelled()
    assert crew.submit(sleeps, ASKED).cancelled()


def test_no_thread_is_left_behind_a_crew():
    before = set(threading.enumerate())
    with Crew(2, CPU, LONG) as crew:
        ((found, _),) = crew.each([functools.partial(number, 3)])
        assert found == 3
        started = set(threading.enumerate()) - before
    for each in started:
        each.join(timeout=20)
    assert len([each for each in started if not isinstance(each, threading.Timer)]) == 2
    assert not any(each.is_alive() for each in started)


def test_parts_behind_one_that_raised_are_not_done(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    marks = [tmp_path / "first", tmp_path / "second"]
    parts = [functools.partial(failing, ArithmeticError("planted")), functools.partial(time.sleep, 2)]
    with Crew(1, CPU, LONG) as crew:
        with pytest.raises(ArithmeticError, match="planted"):
            list(crew.each([*parts, *(each.touch for each in marks)]))
        assert crew.submit(lambda worker: worker.call(os.getpid), ASKED).result() != os.getpid()
    assert not any(each.exists() for each in marks)


def test_a_question_whose_process_ends_has_failed_and_the_run_goes_on(monkeypatch):
    monkeypatch.setattr(parallel_run, "has_many_processors", lambda: True)
    bench = Bench(DiesElsewhere, f"{__name__}:DiesElsewhere", CPU, QUICK)
    results = run(bench, chosen(["robustness.single_token", "robustness.empty_batch", "robustness.status"]))
    assert [each.outcome for each in results] == ["passed", "failed", "passed"]
    assert "ended without an answer, with status 3" in results[1].detail


def test_a_question_whose_process_hangs_has_failed_and_the_run_goes_on(monkeypatch):
    monkeypatch.setattr(parallel_run, "has_many_processors", lambda: True)
    effort = replace(QUICK, limit_s=40.0)  # a process that starts takes some of it
    bench = Bench(HangsElsewhere, f"{__name__}:HangsElsewhere", CPU, effort)
    results = run(bench, chosen(["robustness.single_token", "robustness.empty_batch", "robustness.status"]))
    assert [each.outcome for each in results] == ["passed", "failed", "passed"]
    assert "no answer in 40 s" in results[1].detail
    assert results[1].repeat.endswith("--quick --limit 40")


def test_a_new_process_that_hangs_is_ended():
    bench = Bench(
        Race, "tests.compiled_sampler.conformance.adapters.race_adapter:Race", CPU, replace(QUICK, limit_s=0.1)
    )
    result = ask(bench, *chosen(["determinism.new_process"]))
    assert result.outcome == "failed"
    assert "a new process gave no tokens in 0.1 s and was ended" in result.detail


def test_a_process_that_cannot_start_answers_no_question():
    """It ends the run, and is no fault of the sampler that is asked about."""

    def cannot() -> Finding:
        raise NotStarted("no memory")

    with pytest.raises(NotStarted):
        answered(mock.Mock(), QUESTIONS[0], cannot)
