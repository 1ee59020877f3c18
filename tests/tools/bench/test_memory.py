"""The peak memory of a step: what is held at once is counted, whatever was held before or comes after."""

import gc
import json
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from compiled_sampler.core.stage import call
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.modes import mode_table
from tests.builders.sampler import nothing_compiles
from tools.bench import __main__ as bench
from tools.bench import memory
from tools.bench.memory import MemoryCell, held_by_graphs, measured, precompile, scratch_bytes, table_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def frozen_objects():
    """Each cell collects garbage first, 2 s among the objects of torch and other tests, which are no cell's."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Result(NamedTuple):
    """A result."""

    kept: Tensor


@pytest.mark.parametrize("device", DEVICES)
def test_the_peak_counts_what_is_held_at_once_and_no_result(device):
    size = 2**20

    def work():
        for _ in range(3):
            first = torch.ones(size, device=device)
            second = first + 1.0
            del first, second
        return Result(torch.zeros(size, device=device))

    held = scratch_bytes(work, torch.device(device))
    assert 4 * size <= held < 4 * size + 2**16  # two at once, one of which is where the result is later


@pytest.mark.parametrize("device", DEVICES)
def test_every_mode_has_cells_of_sampling_probabilities_and_verification(device):
    cells = list(measured(torch.randn(8, 300, device=device), call, verifies=True))
    assert len({(cell.step, cell.mode) for cell in cells}) == len(cells) == 6 * 7
    assert all(cell.scratch_bytes > 0 for cell in cells)


@pytest.mark.gpu
def test_graphs_hold_no_logits_where_these_are_bound():
    logits = torch.randn(64, 5000, device="cuda")
    held = {cell.step: cell.scratch_bytes for cell in held_by_graphs(logits)}
    assert held["static buffers"] < logits.nbytes
    assert held["the pool of graphs"] > 0


def test_the_tool_stores_its_cells_and_prints_them(tmp_path, capsys):
    path = tmp_path / "memory.json"
    bench.main(f"--memory --device cpu --backend eager --rows 4 --vocab 100 --json {path}".split())
    stored = [MemoryCell(**cell) for cell in json.loads(path.read_text())["table"]]
    assert [cell.step for cell in stored] == ["sample", "probs"] * 6 + [memory.EDITED, memory.WITH_LOGPROBS] * 6
    assert "full" in capsys.readouterr().out
    assert table_of(stored).row_count == 24


@pytest.mark.full
def test_everything_is_precompiled_before_anything_is_measured(monkeypatch):
    modes = mode_table(300, "top_k")[1:2]
    monkeypatch.setattr(memory, "mode_table", lambda *_: modes)
    logits, stages = torch.randn(4, 300), CompiledStages()
    precompile(logits, [2, 4], stages, verifies=False)
    with nothing_compiles():
        cells = [cell for rows in (2, 4) for cell in measured(logits[:rows], stages, verifies=False)]
    assert len(cells) == 2 * 2
