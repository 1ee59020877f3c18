"""Numbers of the host, sent or fetched by graphs: each replay reads its own, whatever was posted, sent or lost."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from graph_cache import BufferSpec, GraphCache, PinnedRing
from graph_cache.pinned import FetchRing
from tests.graph_cache.recorded import SPECS, RecordingBackend, Scores, Spied, batch, cache_of, expected, same_bits

CPU = torch.device("cpu")
FETCHED = {**SPECS, "shift": BufferSpec((), torch.int64, 3, fetched=True)}


def serving(fn: Callable[..., Scores], specs: dict[str, BufferSpec] = FETCHED, **options: Any) -> GraphCache:
    """A warmed-up cache."""
    made = GraphCache("cpu", [2, 4, 8], backend=RecordingBackend(), **options)
    made.register("score", fn, specs)
    made.warmup()
    return made


@pytest.fixture(params=[SPECS, FETCHED], ids=["sent", "fetched"])
def cache(request: pytest.FixtureRequest, spied: Spied) -> GraphCache:
    """One whose shifts are sent, and one whose shifts are fetched."""
    return serving(spied, request.param)


@pytest.fixture
def fetching(spied: Spied) -> GraphCache:
    return serving(spied)


def posted(tensors: dict[str, Tensor], name: str = "shift") -> dict[str, Any]:
    """The batch with numbers of the host for one input."""
    return {**tensors, name: tensors[name].view(torch.uint8).numpy().tobytes()}


def test_numbers_that_are_there_are_not_written_again(cache: GraphCache, spied: Spied) -> None:
    given = posted(tensors := batch(3))
    cache.run("score", given)
    spied.tensors[-1]["shift"][:3] = 9  # shows whether it is written again
    again = cache.run("score", given)
    assert same_bits(again, expected({**tensors, "shift": torch.full((3,), 9)}))


def test_other_numbers_more_rows_of_them_and_the_same_behind_a_tensor_are_written(cache: GraphCache) -> None:
    first, second = batch(4), batch(4)
    numbers = posted(first)
    for given, tensors, rows in (
        (numbers, first, 2),
        (numbers, first, 4),
        (posted(second), second, 3),
        (numbers, first, 3),
        (second, second, 4),
        (numbers, first, 4),
    ):
        assert same_bits(cache.run("score", given, rows=rows), expected(tensors, rows))


def test_numbers_are_written_each_time_once_the_caller_has_the_buffer(cache: GraphCache) -> None:
    given = posted(tensors := batch(3))
    cache.run("score", given)
    buffer = cache.input_buffer("shift")
    for number in (9, 8, 7):
        buffer[:3] = number
        assert same_bits(cache.run("score", given), expected(tensors))


def test_rows_behind_numbers_hold_the_fill_in_every_bucket(cache: GraphCache, spied: Spied) -> None:
    numbers = posted(batch(8))
    for rows in (8, 3, 8, 8, 1, 5, 3):
        for given in (posted(batch(rows)), numbers):
            cache.run("score", given, rows=rows)
            assert set(spied.values[-1]["shift"].tolist()[rows:]) <= {3}
    cache.evict(rows=4)
    cache.run("score", numbers, rows=3)  # the same numbers, in a bucket whose last rows had others
    assert spied.values[-1]["shift"].tolist()[3:] == [3] * 5


def test_rows_behind_numbers_hold_the_fill_whatever_the_caller_wrote(cache: GraphCache, spied: Spied) -> None:
    buffer, tensors = cache.input_buffer("shift"), batch(3)
    for given in (posted(tensors), posted(tensors), tensors, tensors):
        buffer[:] = 99
        cache.run("score", given)
        assert spied.values[-1]["shift"].tolist()[3:] == [3]
    buffer[:] = 99
    cache.evict(rows=4)
    cache.warmup(buckets=[4])
    cache.run("score", posted(tensors))
    assert spied.values[-1]["shift"].tolist()[3:] == [3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool])
def test_numbers_of_any_dtype_are_sent(spied: Spied, dtype: torch.dtype) -> None:
    cache = serving(spied, {**SPECS, "scale": BufferSpec((), dtype, 1)})
    tensors = {**batch(3), "scale": torch.tensor([2.0, 0.0, 1.0]).to(dtype)}
    assert same_bits(cache.run("score", posted(tensors, "scale")), expected(tensors))
    assert cache.statistics().replays == 1


def test_numbers_whose_copy_fails_are_sent_again(spied: Spied, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, given = serving(spied, SPECS), posted(tensors := batch(3))
    with monkeypatch.context() as patched:
        patched.setattr(PinnedRing, "send", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.run("score", given)
    assert same_bits(cache.run("score", given), expected(tensors))


def test_a_direct_call_takes_numbers_of_the_host_too() -> None:
    tensors = batch(3)
    assert same_bits(cache_of(Spied(), None).run("score", posted(tensors)), expected(tensors))


@pytest.mark.parametrize(
    ("name", "given", "error", "words"),
    [
        ("logits", bytes(60), TypeError, "got bytes; bytes have one torch.float32 for each row"),
        ("scale", bytes(11), TypeError, "got bytes; bytes have one torch.float32 for each row"),
        ("scale", bytes(8), ValueError, "the same number of rows"),
        ("scale", b"", ValueError, "the same number of rows"),
        ("scale", np.zeros(3, np.float32), TypeError, r"must be a tensor, got ndarray; .* array\.tobytes"),
    ],
)
def test_what_does_not_fit_is_refused(
    fetching: GraphCache, name: str, given: Any, error: type[Exception], words: str
) -> None:
    tensors = batch(3)
    with pytest.raises(error, match=words):
        fetching.run("score", {**tensors, name: given})
    assert same_bits(fetching.run("score", tensors), expected(tensors))


def test_what_is_no_int64_a_row_cannot_be_fetched() -> None:
    for spec in (((2,), torch.int64, 0, 1), ((), torch.int32, 0, 1), ((), torch.int64, 0, 2)):
        with pytest.raises(ValueError, match="fetched must be an input of one int64 a row"):
            BufferSpec(*spec, fetched=True)


def test_other_numbers_are_fetched_and_none_are_sent(fetching: GraphCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is posted, the control, they are not there."""
    monkeypatch.setattr(PinnedRing, "send", lambda *_: 1 / 0)
    for rows in [3, 8, 1, 2, 5, 8, 7] * 30:  # the ring goes round three times
        given = posted(tensors := batch(rows))
        assert same_bits(fetching.run("score", given), expected(tensors))
    monkeypatch.setattr(FetchRing, "post", lambda *_: True)
    assert not same_bits(fetching.run("score", posted(tensors := batch(3))), expected(tensors))


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
        cache, given, tensors = serving(spied), {}, batch(4)
        for _ in range(300):
            what, rows = one_of(6), 1 + one_of(8)
            if what < 4 or not given:
                tensors = batch(8)
                given = posted(tensors) if what < 3 else tensors
            elif lends:
                cache.input_buffer("shift")[:] = 77
            assert same_bits(cache.run("score", given, rows=rows), expected(tensors, rows))
            assert set(spied.values[-1]["shift"][rows:].tolist()) <= {3}


@pytest.mark.parametrize("launched", [True, False])
def test_an_interrupt_about_a_launch_moves_nothing(fetching: GraphCache, launched: bool) -> None:
    for variant in fetching._variants.values():
        replay = variant.fetching

        def interrupted(replay: Any = replay) -> None:
            if launched:
                replay()
            raise KeyboardInterrupt

        object.__setattr__(variant, "fetching", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetching.run("score", posted(batch(variant.key.rows)))
        object.__setattr__(variant, "fetching", replay)
        for _ in range(3):
            given = posted(tensors := batch(3))
            assert same_bits(fetching.run("score", given), expected(tensors))


def test_a_replay_that_fails_moves_nothing() -> None:
    fails = False

    def failing(**tensors: Tensor) -> Scores:
        if fails:
            raise RuntimeError("no launch")
        return Spied()(**tensors)

    cache = serving(failing)
    cache.run("score", posted(first := batch(3)))
    fails = True
    with pytest.raises(RuntimeError, match="no launch"):
        cache.run("score", posted(batch(3)))
    fails = False
    for tensors in (first, batch(3), first, batch(5)):
        assert same_bits(cache.run("score", posted(tensors)), expected(tensors))


def test_numbers_are_sent_where_the_device_cannot_read_the_ring(
    fetching: GraphCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, send = [], PinnedRing.send
    monkeypatch.setattr(PinnedRing, "send", lambda *given: sent.append(1) or send(*given))
    for _, buffer in next(iter(fetching._variants.values())).fetched:
        monkeypatch.setattr(buffer.ring, "_is_mapped", False)
    for rows in (3, 8, 3, 1):
        assert same_bits(fetching.run("score", posted(tensors := batch(rows))), expected(tensors))
    assert len(sent) == 4


def test_captures_between_runs_move_nothing(fetching: GraphCache) -> None:
    for _ in range(5):
        given = posted(tensors := batch(4))
        for _ in range(2):
            assert same_bits(fetching.run("score", given), expected(tensors))
        fetching.capture_seen()
        fetching.evict(rows=2)
        fetching.warmup()


def test_two_inputs_are_fetched_together_though_one_of_them_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(logits: Tensor, scale: Tensor, shift: Tensor, second: Tensor) -> Scores:
        return Spied()(logits, scale, shift + second)

    cache = serving(shifted, {**FETCHED, "second": BufferSpec((), torch.int64, 0, fetched=True)})
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
        for as_bytes in (False, True, False):  # a tensor beside new bytes takes back what was posted
            given: dict[str, Any] = {**posted(a), "second": b["shift"].numpy().tobytes() if as_bytes else b["shift"]}
            assert same_bits(cache.run("score", given), expected({**a, "shift": a["shift"] + b["shift"]}))


class Events:
    """Events of a device that has read as much as a test says; None for all."""

    done: ClassVar[list["Events"] | None] = None

    def record(self, stream: object) -> None:
        """Nothing to record."""

    def query(self) -> bool:
        """Whether the test says so."""
        return Events.done is None or self in Events.done


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Events)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)


@pytest.mark.usefixtures("events")
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("done", [None, []], ids=["the device keeps up", "the device is behind"])
def test_a_ring_overwrites_only_what_was_read(
    monkeypatch: pytest.MonkeyPatch, done: list[Events] | None, dtype: torch.dtype
) -> None:
    def unpinned(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.zeros(*shape, **options)

    monkeypatch.setattr(Events, "done", done)
    ring, memories = PinnedRing(4, dtype, CPU), []
    for each in (ring, ring._halves):
        monkeypatch.setattr(each, "_device", torch.device("cuda"))
    monkeypatch.setattr(torch, "empty", unpinned)
    for i in range(200):
        numbers = torch.arange(i, i + i % 4 + 1).to(dtype)
        target = torch.zeros_like(numbers)
        ring.send(numbers.view(torch.uint8).numpy().tobytes(), target)
        assert torch.equal(target, numbers)
        memory = ring._memory
        assert memory is not None
        if all(memory is not each for each in memories):
            memories.append(memory)
    assert len(memories) == (1 if done is None else -(-200 // 32))


@pytest.mark.usefixtures("events")
def test_an_entry_is_written_again_only_when_the_device_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = FetchRing(3, 0, CPU)
    monkeypatch.setattr(Events, "done", [])
    monkeypatch.setattr(ring._halves, "_device", torch.device("cuda"))
    for i in range(2 * ring._half):
        assert ring.post(bytes([i] * 8), b"")
    before = bytes(ring._bytes)
    for _ in range(3):
        assert not ring.post(bytes(8), b"")  # behind: nothing was read
    assert bytes(ring._bytes) == before
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
    assert [FetchRing(size, 0, CPU)._half for size in (1 << 19, 8)] == [1, 32]
    assert [PinnedRing(size, torch.int64, CPU)._half for size in (1 << 30, 8)] == [1, 16]


@pytest.mark.parametrize("size", [1, 15, 16, 17, 100])
def test_a_target_is_aligned_and_has_all_rows(size: int) -> None:
    ring = FetchRing(size, 0, CPU)
    numbers = torch.arange(5, 5 + size)
    assert ring.post(numbers.numpy().tobytes(), b"")
    ring.fetch(size)
    assert torch.equal(ring.target, numbers)
    assert int(ring.following) == 1
    assert (ring.target.data_ptr() - ring._there.data_ptr()) % 128 == 0
