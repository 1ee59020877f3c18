"""A table whose changes travel with fetches: every run reads what the host wrote last, and nothing of before."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graph_cache import BufferSpec, GraphCache, HostTable, PinnedRing
from graph_cache.pinned import FetchRing
from tests.graph_cache.recorded import SPECS, RecordingBackend, Scores, Spied, batch, expected, same_bits

CPU = torch.device("cpu")
ENTRIES, WIDTH = 10, 2


class Served:
    """A cache whose callable adds all words of a table, weighted by their places, and the host's copy of the words."""

    def __init__(self, brings: str | None = "shift") -> None:
        """Captured in all buckets."""
        self.words, self.backend = np.zeros(ENTRIES * WIDTH, np.int32), RecordingBackend()
        self.table = HostTable(self.words, WIDTH, CPU)
        weights = torch.arange(1, len(self.words) + 1) ** 2

        def read(logits: Tensor, scale: Tensor, shift: Tensor) -> Scores:
            return Spied()(logits, scale, shift + (self.table.there[:-1] * weights).sum())

        self.weights = weights
        brought = None if brings is None else (brings, self.table)
        self.cache = GraphCache("cpu", [2, 4, 8], backend=self.backend, brings=brought)
        self.cache.register("score", read, {**SPECS, "shift": BufferSpec((), torch.int64, 3, fetched=True)})
        self.cache.warmup()

    def change(self, entry: int, number: int) -> None:
        """Write an entry on the host and note it."""
        places = np.arange(entry * WIDTH, (entry + 1) * WIDTH)
        self.words[places] = values = np.array([number, -number], np.int32)
        self.table.change(places.tobytes(), values.tobytes())

    def is_right(self, tensors: dict[str, Tensor], on_host: bool) -> bool:
        """Whether a run gives what a direct call gives that reads the host's copy."""
        given: dict[str, Any] = dict(tensors)
        if on_host:
            given["shift"] = tensors["shift"].numpy().tobytes()
        total = (torch.from_numpy(self.words) * self.weights).sum()
        return same_bits(self.cache.run("score", given), expected({**tensors, "shift": tensors["shift"] + total}))


def test_any_sequence_of_changes_and_runs_reads_what_the_host_wrote_last(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = np.random.default_rng(7)
    turn = FetchRing._turn
    monkeypatch.setattr(FetchRing, "_turn", lambda ring: chance.random() < 0.8 and turn(ring))
    served, kept = Served(), batch(3)
    for i in range(1000):  # the ring goes round many times
        if i % 90 == 50:  # more captures, whose fetches must find no patch of before
            served.backend.outer = False
            served.cache.capture_seen()
            served.cache.evict(rows=2)
            served.cache.warmup()
        for _ in range(int(chance.choice([0, 0, 0, 1, 1, 2, 4, 5, 9]))):
            served.change(int(chance.integers(ENTRIES)), int(chance.integers(-99, 99)))
        tensors = kept if chance.random() < 0.4 else batch(int(chance.integers(1, 9)))
        served.backend.outer = chance.random() < 0.1  # a direct call
        assert served.is_right(tensors, bool(chance.random() < 0.8))
        assert not served.table.is_pending


def test_a_patch_is_written_once() -> None:
    served = Served()
    served.change(3, 5)
    assert served.is_right(batch(2), True)
    for entry in range(ENTRIES):
        served.change(entry, 8)  # too many for a patch
    for _ in range(200):
        assert served.is_right(batch(2), True)


def test_a_cache_that_does_not_bring_the_table_is_the_control() -> None:
    served = Served(brings=None)
    served.change(3, 5)
    assert not served.is_right(batch(2), True)


def test_few_changes_are_sent_by_no_copy_and_many_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(PinnedRing, "send", lambda ring, numbers, target: sent.append(len(numbers)))
    served = Served()
    for count, copies in ((1, 0), (4, 0), (5, 1)):
        sent.clear()
        for entry in range(count):
            served.change(entry, 1)
            served.change(entry, 0)  # the same entry again
        assert served.is_right(batch(3), True)
        assert len(sent) == copies


def test_changes_of_a_run_that_fails_come_with_the_next_one() -> None:
    served = Served()
    assert served.is_right(first := batch(2), True)
    served.change(1, 4)
    for variant in served.cache._variants.values():
        object.__setattr__(variant, "fetching", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        served.is_right(batch(2), True)
    assert served.table.is_pending
    assert served.is_right(first, False)
    assert not served.table.is_pending


@pytest.mark.parametrize("moment", ["before", "behind"])
def test_changes_that_are_taken_when_an_interrupt_comes_are_brought_again(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    served, taken = Served(), HostTable.taken
    assert served.is_right(batch(2), True)  # a post without a patch
    served.change(4, 6)

    def interrupted(table: HostTable) -> None:
        if moment == "behind":
            taken(table)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(HostTable, "taken", interrupted)
        with pytest.raises(KeyboardInterrupt):
            served.is_right(batch(3), True)
    assert served.table.is_pending
    for _ in range(3):
        assert served.is_right(batch(3), True)


def test_a_table_says_whether_its_changes_travel() -> None:
    served = Served()
    travels = []
    for as_bytes, outer in ((False, False), (True, False), (False, False), (True, True), (True, False)):
        served.change(0, len(travels))
        served.backend.outer = outer
        assert served.is_right(batch(3), as_bytes)
        travels.append(served.table.travels)
    assert travels == [False, True, False, False, True]


def test_changes_come_though_the_input_that_brings_them_is_bound() -> None:
    """Another input is fetched then, by a graph that does not know of the table."""
    words = np.zeros(4, np.int32)
    table, bound = HostTable(words, 2, CPU), torch.arange(4)

    def read(logits: Tensor, scale: Tensor, shift: Tensor, second: Tensor) -> Scores:
        return Spied()(logits, scale, shift + second + table.there[:-1].sum())

    fetched = BufferSpec((), torch.int64, 0, fetched=True)
    cache = GraphCache("cpu", [4], backend=RecordingBackend(), brings=("shift", table))
    cache.register("score", read, {**SPECS, "shift": fetched, "second": fetched})
    cache.bind("shift", bound)
    cache.warmup()
    for number in range(1, 70):
        words[:2] = number
        table.change(np.arange(2).tobytes(), words[:2].tobytes())
        tensors = {**batch(4), "shift": bound}
        made = cache.run("score", {**tensors, "second": np.full(4, number).tobytes()})
        assert same_bits(made, expected({**tensors, "shift": bound + 3 * number}))


def test_an_input_that_brings_a_table_is_fetched() -> None:
    cache = GraphCache("cpu", [4], brings=("shift", HostTable(np.zeros(4, np.int32), 2, CPU)))
    with pytest.raises(ValueError, match=r"input 'shift' must be fetched to bring a table"):
        cache.register("score", Spied(), SPECS)
