"""Numbers of the host: every run reads what the host wrote last, in its inputs and in a table beside them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graph_cache import BufferSpec, GraphCache, HostMirror, PinnedRing
from tests.graph_cache.recorded import SPECS, RecordingBackend, Scores, Spied, batch, expected, same_bits

CPU = torch.device("cpu")
ON_HOST = {**SPECS, "shift": BufferSpec((), torch.int64, 3, on_host=True)}
TABLE = 20  # words


class Served:
    """A cache whose callable adds all words of a table, weighted by their places, to shifts that the host brings."""

    def __init__(self) -> None:
        """Captured in all buckets; the table is zero."""
        self.mirror, self.backend, self.spied = HostMirror(64, CPU), RecordingBackend(), Spied()
        self.start = self.mirror.take(TABLE)
        self.words = self.mirror.here[self.start : self.start + TABLE]
        self.weights = torch.arange(1, TABLE + 1) ** 2

        def read(logits: Tensor, scale: Tensor, shift: Tensor) -> Scores:
            table = self.mirror.there[self.start : self.start + TABLE]
            return self.spied(logits, scale, shift)._replace(
                best=logits.argmax(-1) + shift + (table * self.weights).sum()
            )

        self.cache = GraphCache("cpu", [2, 4, 8], backend=self.backend, mirror=self.mirror)
        self.cache.register("score", read, ON_HOST)
        self.cache.warmup()

    def change(self, place: int, number: int) -> None:
        self.words[place] = number
        self.mirror.note(self.start + place, self.start + place + 1)

    def run(self, tensors: dict[str, Tensor], on_host: bool = True, rows: int | None = None) -> bool:
        given = of_host(tensors) if on_host else tensors
        total = (torch.from_numpy(self.words) * self.weights).sum()
        wanted = expected({**tensors, "shift": tensors["shift"] + total}, rows)
        return same_bits(self.cache.run("score", given, rows=rows), wanted)


def of_host(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {**tensors, "shift": tensors["shift"].numpy().tobytes()}


@pytest.fixture
def served() -> Served:
    return Served()


def test_any_sequence_of_changes_bytes_tensors_and_captures_reads_what_came_last(served):
    """And rows behind a batch hold the fill, in every bucket."""
    chance, kept = np.random.default_rng(7), batch(3)
    for i in range(600):
        if i % 90 == 50:
            served.backend.outer = False
            served.cache.evict(rows=2)
            served.cache.warmup()
        for _ in range(int(chance.choice([0, 0, 0, 1, 2, 9]))):
            served.change(int(chance.integers(TABLE)), int(chance.integers(-99, 99)))
        tensors = kept if chance.random() < 0.4 else batch(int(chance.integers(1, 9)))
        rows = int(chance.integers(1, len(tensors["shift"]) + 1))
        served.backend.outer = chance.random() < 0.1  # a direct call
        assert served.run(tensors, bool(chance.random() < 0.7), rows)
        assert served.backend.outer or set(served.spied.values[-1]["shift"][rows:].tolist()) <= {3}
        assert not served.mirror.is_pending


def test_words_that_are_not_noted_are_the_control(served):
    served.words[3] = 5
    assert not served.run(batch(2), on_host=False)


def test_one_copy_brings_what_changed_and_nothing_what_did_not(served, monkeypatch):
    sent: list[int] = []
    send = PinnedRing.send
    monkeypatch.setattr(PinnedRing, "send", lambda ring, *given: (sent.append(len(given[0])), send(ring, *given)))
    tensors = batch(3)
    for change, bytes_sent in ((False, [4 * 8]), (False, []), (True, [4])):  # a bucket of shifts; a word
        if change:
            served.change(2, 1)
        assert served.run(tensors)
        assert sent == bytes_sent
        sent.clear()
    served.change(TABLE - 1, 4)
    assert served.run(batch(3))
    assert len(sent) == 1  # of both


def test_a_copy_that_fails_is_made_by_the_next_run(served, monkeypatch):
    tensors = batch(3)
    served.change(1, 4)
    with monkeypatch.context() as patched:
        patched.setattr(PinnedRing, "send", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            served.run(tensors)
    assert served.mirror.is_pending
    assert served.run(tensors)


def test_a_replay_that_fails_moves_nothing(served):
    first = batch(3)
    assert served.run(first)
    for variant in served.cache._variants.values():
        replay = variant.replay
        object.__setattr__(variant, "replay", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            served.run(batch(variant.key.rows))
        object.__setattr__(variant, "replay", replay)
        assert served.run(first)


def test_an_interrupt_while_numbers_are_written_moves_nothing(served, monkeypatch):
    class Interrupting:
        def __getitem__(self, part: slice) -> bytes:
            raise KeyboardInterrupt

    first = batch(3)
    assert served.run(first)
    with monkeypatch.context() as patched:
        patched.setattr(served.cache._statics.owned("shift"), "_fills", Interrupting())
        with pytest.raises(KeyboardInterrupt):
            served.run(batch(3))
    behind = served.mirror.take(2)
    served.mirror.note(behind, behind + 2)
    served.change(1, 4)  # an upload of both brings what lies between
    assert served.run(first)


def test_a_warm_up_finds_padding_whatever_a_bound_buffer_says_of_live_rows():
    spied, bound = Spied(), torch.arange(8)
    cache = GraphCache("cpu", [8], backend=RecordingBackend(), mirror=HostMirror(16, CPU))
    cache.register("score", spied, ON_HOST)
    cache.bind("shift", bound)
    cache.warmup()
    assert [each["shift"].tolist() for each in spied.values[:2]] == [[3] * 8] * 2
    tensors = {**batch(8), "shift": bound}
    assert same_bits(cache.run("score", tensors), expected(tensors))


def test_two_inputs_of_the_host_are_each_as_they_were_brought():
    def shifted(logits: Tensor, scale: Tensor, shift: Tensor, second: Tensor) -> Scores:
        return Spied()(logits, scale, shift + second)

    cache = GraphCache("cpu", [4], backend=RecordingBackend(), mirror=HostMirror(32, CPU))
    cache.register("score", shifted, {**ON_HOST, "second": BufferSpec((), torch.int64, 0, on_host=True)})
    cache.warmup()
    first, second = batch(3), batch(3)
    for a, b in ((first, first), (first, second), (second, second), (second, first)):
        for as_bytes in (True, False):
            given: dict[str, Any] = {**of_host(a), "second": b["shift"].numpy().tobytes() if as_bytes else b["shift"]}
            assert same_bits(cache.run("score", given), expected({**a, "shift": a["shift"] + b["shift"]}))


@pytest.mark.parametrize(
    ("name", "given", "error", "words"),
    [
        ("scale", bytes(12), TypeError, "got bytes; bytes have one torch.float32 .*on_host"),
        ("shift", bytes(11), TypeError, "got bytes; bytes have one torch.int64 for each row"),
        ("shift", bytes(8), ValueError, "the same number of rows"),
        ("shift", b"", ValueError, "the same number of rows"),
        ("shift", np.zeros(3, np.int64), TypeError, r"must be a tensor, got ndarray; .* array\.tobytes"),
    ],
)
def test_what_does_not_fit_is_refused(served, name, given, error, words):
    tensors = batch(3)
    with pytest.raises(error, match=words):
        served.cache.run("score", {**tensors, name: given})
    assert served.run(tensors)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BufferSpec((2,), torch.int64, 0, on_host=True), "on_host must be an input of one int64 a row"),
        (lambda: BufferSpec((), torch.int32, 0, on_host=True), "on_host must be an input of one int64 a row"),
        (lambda: GraphCache("cpu", [4]).register("score", Spied(), ON_HOST), "'shift' on the host must have a mirror"),
        (lambda: HostMirror(16, CPU).take(17), "a mirror must have 32 words, got 16"),
        (lambda: Served().cache.input_buffer("shift"), "an input of the host must not be lent"),
    ],
)
def test_what_has_no_place_in_a_mirror_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


class Pretended:
    """An event of a device that has read what was sent, or not."""

    done = True

    def record(self, stream: object) -> None:
        """Nothing to record."""

    def query(self) -> bool:
        return Pretended.done


@pytest.mark.parametrize("done", [True, False], ids=["the device keeps up", "the device is behind"])
def test_a_ring_overwrites_only_what_was_read(monkeypatch, done):
    def unpinned(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.zeros(*shape, **options)

    monkeypatch.setattr(Pretended, "done", done)
    monkeypatch.setattr(torch.cuda, "Event", Pretended)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    ring, memories = PinnedRing(4, CPU), []
    monkeypatch.setattr(ring, "_is_cpu", False)
    monkeypatch.setattr(torch, "empty", unpinned)
    for i in range(200):
        numbers = torch.arange(i, i + i % 4 + 1, dtype=torch.int32)
        target = torch.zeros_like(numbers)
        ring.send(numbers.numpy().tobytes(), target)
        assert torch.equal(target, numbers)
        if all(ring._memory is not each for each in memories):
            memories.append(ring._memory)
    assert len(memories) == (1 if done else -(-200 // 32))
    assert (PinnedRing(1 << 30, CPU)._half, PinnedRing(8, CPU)._half) == (1, 16)
