"""A process that hangs while it starts, and reads nothing of what it is asked, is ended in time."""

import functools
import threading
from multiprocessing import resource_tracker

import pytest
import torch

from compiled_sampler.conformance.processes.worker import ProcessHangs, Worker

CPU = torch.device("cpu")


@pytest.mark.parametrize("sent", [0, 10_000_000], ids=["short", "longer than a pipe"])
def test_a_process_that_hangs_while_it_starts_reads_nothing_and_is_ended(tmp_path, monkeypatch, sent):
    resource_tracker.ensure_running()  # of all processes of this one, which would else start with the first, and hang
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = Worker(1, CPU, 0.5)
    rescue = threading.Timer(20.0, worker.end)
    rescue.start()
    try:
        with pytest.raises(ProcessHangs, match=r"no answer in 0\.5 s and was ended"):
            worker.call(functools.partial(len, bytes(sent)))
        assert not worker.is_sound()
    finally:
        rescue.cancel()
        worker.end()
