"""What is timed: logits are as their name says, inputs exceed the cache, phases of a warm-up are told apart."""

import json
import time

import pytest
import torch

from tools import warm_up
from tools.bench.cases import TARGET_VOCAB_SIZE
from tools.measuring import (
    DISTRIBUTIONS,
    ROTATED_BYTES,
    logits_like,
    num_inputs,
    num_rounds,
    queued_time_us,
    repeats_for,
)

CPU = torch.device("cpu")


def test_peaked_rows_follow_zipf_in_shuffled_order():
    rows = logits_like("peaked", 64, 20_000, CPU, torch.float32)
    means = rows.sort(-1, descending=True).values.mean(0)
    slope = (means[2000] - means[200]) / torch.log(torch.tensor(2000.0 / 200.0))
    assert slope.item() == pytest.approx(-2.0, abs=0.1)
    assert torch.softmax(rows, -1).topk(100).values.sum(-1).min() > 0.9
    assert len(set(rows.argmax(-1).tolist())) > 60


def test_ties_are_peaked_rows_rounded_to_bfloat16():
    rounded, plain = (logits_like(kind, 4, 20_000, CPU, torch.float32, seed=3) for kind in ("ties", "peaked"))
    assert torch.equal(rounded, plain.bfloat16().float())
    assert all(len(row.unique()) < 5000 for row in rounded)
    assert torch.equal(logits_like("peaked", 4, 20_000, CPU, torch.bfloat16, seed=3).float(), rounded)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_logits_depend_on_the_seed_alone_and_an_unknown_distribution_is_named(distribution):
    first, again, other = (logits_like(distribution, 2, 100, CPU, torch.float32, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    with pytest.raises(ValueError, match="'spiky'"):
        logits_like("spiky", 1, 10, CPU, torch.float32)


def test_inputs_exceed_the_cache_and_calls_exceed_the_launch():
    cuda = torch.device("cuda")
    for rows in (1, 8, 32, 128, 512):
        size = rows * TARGET_VOCAB_SIZE * 4
        count = num_inputs(size, cuda)
        assert count * size >= ROTATED_BYTES
        assert count >= 2
        assert count * num_rounds(count, cuda) >= 16
    assert num_inputs(1, cuda) == 1024
    assert (repeats_for(1.0), repeats_for(1.0, 51), repeats_for(1e9, 51)) == (7, 51, 3)


@pytest.mark.gpu
def test_a_queued_step_takes_what_the_gpu_takes_for_it_whatever_the_host_does_besides():
    graph, numbers = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        numbers.add_(1.0)

    def slow():
        time.sleep(0.002)
        graph.replay()

    found, alone = queued_time_us(slow), queued_time_us(graph.replay)
    assert found == pytest.approx(alone, rel=0.5)
    assert 0.0 < found < 100.0


@pytest.mark.full
def test_two_processes_are_timed_and_the_next_one_compiles_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COMPILED_SAMPLER_PROCESSES", "1")
    path = tmp_path / "seconds.json"
    warm_up.main(f"--vocab 300 --rows 2 --modes greedy --device cpu --json {path}".split())
    first, after = json.loads(path.read_text())["seconds"].values()
    assert {"listing and the first stage", "runs", "whole process"} <= first.keys()
    assert {"runs", "whole process"} <= after.keys()
    assert "other stages" in first
    assert not {"other stages", "captures"} & after.keys()
    assert "next process" in capsys.readouterr().out
