"""Inputs in further dtypes, converted on the way into an owned buffer or read in place, and results of 32 bits."""

import pytest
import torch

from graph_cache import BufferSpec, GraphCache
from tests.graph_cache.recorded import SPECS, RecordingBackend, Scores, Spied, batch, expected, same_bits

ALSO = {**SPECS, "shift": BufferSpec((), torch.int64, 3, also=(torch.int32,))}


@pytest.fixture
def spied() -> Spied:
    return Spied()


@pytest.fixture
def cache(spied: Spied) -> GraphCache:
    made = GraphCache("cpu", [2, 4], backend=RecordingBackend())
    made.register("score", lambda **given: spied(**{**given, "shift": given["shift"].to(torch.int64)}), ALSO)
    return made


def narrow(rows: int) -> dict[str, torch.Tensor]:
    made = batch(rows)
    return {**made, "shift": made["shift"].to(torch.int32)}


def wide(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "shift": tensors["shift"].to(torch.int64)}


@pytest.mark.parametrize("warm", [False, True], ids=["direct", "replayed"])
def test_a_batch_may_bring_each_dtype_of_an_input(cache: GraphCache, warm: bool) -> None:
    if warm:
        cache.warmup()
    for rows in (3, 1, 4):
        given = narrow(rows)
        for each in (given, wide(given), {**given, "shift": given["shift"].repeat_interleave(2)[::2]}):
            assert same_bits(cache.run("score", each), expected(wide(given)))
    assert cache.statistics().replays == (9 if warm else 0)


def test_a_buffer_keeps_its_dtype_and_its_fill(cache: GraphCache, spied: Spied) -> None:
    cache.warmup()
    cache.run("score", narrow(3))
    assert spied.values[-1]["shift"].dtype == torch.int64
    assert spied.values[-1]["shift"][3] == 3
    assert cache.input_buffer("shift").dtype == torch.int64


def test_memory_of_a_buffer_that_is_read_as_another_dtype_is_a_batch_like_any(cache: GraphCache) -> None:
    cache.warmup()
    own = cache.input_buffer("shift").view(torch.int32)[:4]
    own.copy_(torch.tensor([5, 6, 7, 8]))
    given = {**batch(4), "shift": own}
    wanted = expected({**given, "shift": torch.tensor([5, 6, 7, 8])})
    assert same_bits(cache.run("score", given), wanted)


def test_a_binding_is_met_by_its_dtype_alone(cache: GraphCache) -> None:
    memory = torch.zeros(8, dtype=torch.int32)
    cache.bind("shift", memory.view(torch.int64))
    cache.warmup()
    memory.copy_(torch.arange(8))
    given = {**batch(4), "shift": memory[:4]}
    assert same_bits(cache.run("score", given), expected(wide(given)))


@pytest.mark.parametrize("path", ["direct", "replayed", "in place"])
def test_results_of_64_bits_are_taken_in_32(cache: GraphCache, path: str) -> None:
    given, bound = narrow(3), Scores(torch.zeros(4, dtype=torch.int32), torch.zeros(4, 5))
    out = Scores(*(field[:3] for field in bound))
    if path != "direct":
        cache.warmup()
    for step in range(4):
        assert cache.run("score", given, out=out) is out
        assert same_bits(out._replace(best=out.best.long()), expected(wide(given)))
        if step == 1 and path == "in place":
            cache.bind_out("score", bound)
            cache.warmup()
        given["logits"].normal_()
    assert any(name.endswith("bound to out") for name in cache.statistics().coverage) == (path == "in place")


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float32])
def test_other_dtypes_are_refused(cache: GraphCache, dtype: torch.dtype) -> None:
    given = batch(3)
    with pytest.raises(TypeError, match=f"'shift' must be torch.int64 or torch.int32, got {dtype}; convert"):
        cache.run("score", {**given, "shift": given["shift"].to(dtype)})
    with pytest.raises(TypeError, match=r"'scale' must be torch\.float32, got torch\.float64"):
        cache.run("score", {**given, "scale": given["scale"].double()})
    assert same_bits(cache.run("score", given), expected(given))
