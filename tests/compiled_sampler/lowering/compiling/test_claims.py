"""Several processes that need one stage: one compiles it, the others find it, and none is in the way for good."""

import multiprocessing
import threading
import time
from unittest import mock

import pytest
import torch
from filelock import FileLock

from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.lowering.compiling import disk_cache
from compiled_sampler.lowering.compiling.compile_processes import VARIABLE
from compiled_sampler.lowering.compiling.disk_cache import CompiledElsewhere, claimed
from compiled_sampler.lowering.compiling.stage_code import StageCode
from compiled_sampler.passes.maxima import order_maxima

CPU = torch.device("cpu")
LOGITS = torch.randn(3, 129)
STATICS = [{"vocab_size": 129, "block": 64, "slices": 1, "by_bits": False}, {"vocab_size": 129, "block": 32}]
STATICS[1] |= {"slices": 1, "by_bits": False}


@pytest.fixture
def empty_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "0")
    return tmp_path


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


def test_a_stage_that_is_not_kept_is_everybody_s():
    with claimed(None, waits=False), claimed(None, waits=False):
        pass


def test_who_fails_lets_go(place):
    with pytest.raises(ValueError, match="planted"), claimed(place, waits=False):
        raise ValueError("planted")
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
