"""Numbers of the host that graphs fetch themselves: each replay finds its own, whatever was posted, sent or lost."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from graph_cache import BufferSpec, GraphCache, PinnedRing
from graph_cache.pinned import FetchRing
from tests.graph_cache.recorded import SPECS, RecordingBackend, Scores, Spied, batch, expected, same_bits

CPU = torch.device("cpu")
FETCHED = {**SPECS, "shift": BufferSpec((), torch.int64, 3, fetched=True)}


def fetching(backend: RecordingBackend, fn: Callable[..., Scores] | None = None) -> GraphCache:
    """A warmed-up cache whose shifts are fetched."""
    made = GraphCache("cpu", [2, 4, 8], backend=backend)
    made.register("score", fn or Spied(), FETCHED)
    made.warmup()
    return made


def posted(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The batch with numbers of the host for its shifts."""
    return {**tensors, "shift": tensors["shift"].numpy().tobytes()}


def never_sent(patched: pytest.MonkeyPatch) -> None:
    """Let every send fail."""
    patched.setattr(PinnedRing, "send", lambda *_: 1 / 0)


def test_other_numbers_are_fetched_and_none_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    never_sent(monkeypatch)
    cache = fetching(RecordingBackend())
    for rows in [3, 8, 1, 2, 5, 8, 7] * 30:  # the ring goes round three times
        given = posted(tensors := batch(rows))
        assert same_bits(cache.run("score", given), expected(tensors))


def test_without_a_fetch_the_control_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = fetching(RecordingBackend())
    monkeypatch.setattr(FetchRing, "post", lambda *_: True)  # writes nothing
    assert not same_bits(cache.run("score", posted(tensors := batch(3))), expected(tensors))


def test_numbers_that_are_there_are_not_fetched_again() -> None:
    spied = Spied()
    cache = fetching(RecordingBackend(), spied)
    given = posted(tensors := batch(3))
    cache.run("score", given)
    spied.tensors[-1]["shift"][:3] = 9  # shows whether it is written again
    assert same_bits(cache.run("score", given), expected({**tensors, "shift": torch.full((3,), 9)}))


def test_rows_behind_numbers_hold_the_fill_in_every_bucket() -> None:
    spied = Spied()
    cache = fetching(RecordingBackend(), spied)
    for rows in (8, 3, 1, 5, 8, 3):
        cache.run("score", posted(batch(rows)))
        assert set(spied.values[-1]["shift"].tolist()[rows:]) <= {3}
    given = posted(batch(3))
    cache.run("score", given)
    cache.evict(rows=4)
    cache.run("score", given)  # the same numbers, in a bucket whose last rows had others
    assert spied.values[-1]["shift"].tolist()[3:] == [3] * 5


def test_any_sequence_of_bytes_tensors_lent_rows_and_full_rings_gives_what_a_direct_call_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And rows behind a batch hold the fill, unless the caller has the buffer."""
    generator = torch.Generator().manual_seed(5)

    def one_of(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    turn, post = FetchRing._turn, FetchRing.post
    monkeypatch.setattr(FetchRing, "_turn", lambda ring: one_of(3) > 0 and turn(ring))
    monkeypatch.setattr(FetchRing, "post", lambda *given: one_of(5) > 0 and post(*given))
    for lends in (False, True):
        spied = Spied()
        cache, given, tensors = fetching(RecordingBackend(), spied), {}, batch(4)
        for _ in range(300):
            what, rows = one_of(6), 1 + one_of(8)
            if what < 4 or not given:
                tensors = batch(8)
                given = posted(tensors) if what < 3 else tensors
            elif lends:
                cache.input_buffer("shift")[:] = 77
            assert same_bits(cache.run("score", given, rows=rows), expected(tensors, rows))
            assert set(spied.values[-1]["shift"][rows:].tolist()) <= {3}


@pytest.mark.parametrize("rows", [(8, 3), (3, 8), (8, 8)])
def test_fewer_rows_of_the_same_bytes_leave_the_fill_behind_them(rows: tuple[int, int]) -> None:
    spied = Spied()
    cache, given = fetching(RecordingBackend(), spied), posted(batch(8))
    for each in rows:
        cache.run("score", given, rows=each)
        assert set(spied.values[-1]["shift"][each:].tolist()) <= {3}


@pytest.mark.parametrize("launched", [True, False])
def test_an_interrupt_about_a_launch_moves_nothing(launched: bool) -> None:
    cache = fetching(RecordingBackend())
    for variant in cache._variants.values():
        replay = variant.fetching

        def interrupted(replay: Any = replay) -> None:
            if launched:
                replay()
            raise KeyboardInterrupt

        object.__setattr__(variant, "fetching", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.run("score", posted(batch(variant.key.rows)))
        object.__setattr__(variant, "fetching", replay)
        for _ in range(3):
            given = posted(tensors := batch(3))
            assert same_bits(cache.run("score", given), expected(tensors))


def test_a_replay_that_fails_moves_nothing() -> None:
    backend, fails = RecordingBackend(), [False]

    def failing(**tensors: Tensor) -> Scores:
        if fails[0]:
            raise RuntimeError("no launch")
        return Spied()(**tensors)

    cache = fetching(backend, failing)
    cache.run("score", posted(first := batch(3)))
    fails[0] = True
    with pytest.raises(RuntimeError, match="no launch"):
        cache.run("score", posted(batch(3)))
    fails[0] = False
    for tensors in (first, batch(3), first, batch(5)):
        assert same_bits(cache.run("score", posted(tensors)), expected(tensors))


def test_numbers_are_sent_where_the_device_cannot_read_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, cache = [], fetching(RecordingBackend())
    send = PinnedRing.send
    monkeypatch.setattr(PinnedRing, "send", lambda *given: sent.append(1) or send(*given))
    for _, buffer in next(iter(cache._variants.values())).fetched:
        monkeypatch.setattr(buffer.ring, "_is_mapped", False)
    for rows in (3, 8, 3, 1):
        assert same_bits(cache.run("score", posted(tensors := batch(rows))), expected(tensors))
    assert len(sent) == 4


def test_captures_between_runs_move_nothing() -> None:
    cache = fetching(RecordingBackend())
    for _ in range(5):
        given = posted(tensors := batch(4))
        for _ in range(2):
            assert same_bits(cache.run("score", given), expected(tensors))
        cache.capture_seen()
        cache.evict(rows=2)
        cache.warmup()


def test_two_inputs_are_fetched_together_though_one_of_them_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(logits: Tensor, scale: Tensor, shift: Tensor, second: Tensor) -> Scores:
        return Spied()(logits, scale, shift + second)

    cache = GraphCache("cpu", [4], backend=RecordingBackend())
    cache.register("score", shifted, {**FETCHED, "second": BufferSpec((), torch.int64, 0, fetched=True)})
    cache.register("first", Spied(), FETCHED)  # moves one of the two rings alone
    cache.warmup()
    first, second = batch(3), batch(3)
    post, calls = FetchRing.post, [0]

    def second_fails(*given: Any) -> bool:
        calls[0] += 1
        return post(*given) if calls[0] % 2 else 1 / 0 > 0

    with monkeypatch.context() as patched:
        patched.setattr(FetchRing, "post", second_fails)
        with pytest.raises(ZeroDivisionError):
            cache.run("score", {**posted(first), "second": second["shift"].numpy().tobytes()})
    for a, b in ((first, first), (first, second), (second, second), (second, first)):
        cache.run("first", posted(batch(2)))
        for as_bytes in (True, False):
            given: dict[str, Any] = {**posted(a), "second": b["shift"].numpy().tobytes() if as_bytes else b["shift"]}
            assert same_bits(cache.run("score", given), expected({**a, "shift": a["shift"] + b["shift"]}))


def test_what_is_no_int64_a_row_cannot_be_fetched() -> None:
    for spec in (((2,), torch.int64, 0, 1), ((), torch.int32, 0, 1), ((), torch.int64, 0, 2)):
        with pytest.raises(ValueError, match="fetched must be an input of one int64 a row"):
            BufferSpec(*spec, fetched=True)


class Events:
    """Events of a device that is behind by as many records as a test says."""

    done: ClassVar[list["Events"]] = []

    def record(self, stream: object) -> None:
        """Not done yet."""

    def query(self) -> bool:
        """Whether the test says so."""
        return self in Events.done


def test_an_entry_is_written_again_only_when_the_device_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = FetchRing(3, 0, CPU)
    monkeypatch.setattr(torch.cuda, "Event", Events)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(ring._halves, "_device", torch.device("cuda"))
    entries = 2 * ring._half
    for i in range(entries):
        assert ring.post(bytes([i] * 8), b"")
    held = bytes(ring._bytes)
    for _ in range(3):
        assert not ring.post(bytes(8), b"")  # behind: nothing was read
    assert bytes(ring._bytes) == held
    monkeypatch.setattr(Events, "done", [ring._halves._events[0]])
    for i in range(ring._half):
        assert ring.post(bytes([100 + i] * 8), b"")
    assert not ring.post(bytes(8), b"")  # the second half was not read


def test_a_paused_ring_finds_the_fill_and_goes_on_where_it_was() -> None:
    ring = FetchRing(3, 7, CPU)
    for i in range(200):
        ring.pause()
        for _ in range(2):
            ring.fetch(3)
            ring.cursor.copy_(ring.following)
            assert ring.target.tolist() == [7, 7, 7]
        ring.resume()
        assert ring.post(torch.arange(i, i + 3).numpy().tobytes(), b"")
        ring.fetch(3)
        ring.cursor.copy_(ring.following)
        assert ring.target.tolist() == [i, i + 1, i + 2]


def test_rings_of_large_arrays_have_few_entries() -> None:
    assert FetchRing(1 << 19, 0, CPU)._half == 1
    assert FetchRing(8, 0, CPU)._half == 32


@pytest.mark.parametrize("size", [1, 15, 16, 17, 100])
def test_a_target_is_aligned_and_has_all_rows(size: int) -> None:
    ring = FetchRing(size, 0, CPU)
    numbers = torch.arange(5, 5 + size)
    assert ring.post(numbers.numpy().tobytes(), b"")
    ring.fetch(size)
    assert torch.equal(ring.target, numbers)
    assert int(ring.following) == 1
    assert (ring.target.data_ptr() - ring._there.data_ptr()) % 128 == 0
