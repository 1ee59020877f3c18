"""TokenSpeed's adapter inside a CUDA graph, on stand-ins for its classes: a replay draws what eager torch does.

Run with ``bash tools/run test`` on a machine with a GPU, or
``pytest -m gpu tests/compiled_sampler/integrations/tokenspeed tests/compiled_sampler/integrations/sglang``.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.tokenspeed_engine import config_of, engine, named, params_of
from tests.no_waits import no_waits

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]
VOCAB, COUNT, WIDTH = 1000, 4, 3
PLACES = [3, 15, 1, 7]
BATCHES: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"top_k": 1}] * COUNT,
    "no_filter": [{"temperature": 0.7, "seed": seed} for seed in range(COUNT)],
    "top_k_top_p[64]": [{"top_k": 5 + seed, "top_p": 0.9, "seed": seed} for seed in range(COUNT)],
    "default": [{"top_p": 0.8, "min_p": 0.01, "seed": seed} for seed in range(COUNT)],
}


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    with engine("stand-in"):
        yield


def backend_of(device: str, backend: str) -> Any:
    from compiled_sampler.integrations.tokenspeed.drawing import CompiledSamplingBackend

    return type("Backend", (CompiledSamplingBackend,), {"backend": backend})(config_of(VOCAB, device=device))


def step_of(laws: list[dict[str, Any]], seed: int, device: str) -> tuple[Any, Tensor, Tensor]:
    """The sampling info, the logits and the candidates of a verification."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(COUNT * WIDTH, VOCAB, generator=generator) * 3
    candidates = logits.argmax(-1).view(COUNT, WIDTH).roll(1, 1).to(torch.int32)
    lengths = torch.randint(0, 1000, (16,), generator=generator, dtype=torch.int32)
    info = named("sampling_batch_info:SamplingBatchInfo")(
        req_pool_indices=torch.tensor(PLACES, device=device), valid_cache_lengths=lengths.to(device)
    )
    return info, logits.to(device), candidates.to(device)


def verified(backend: Any, info: Any, logits: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    made, lengths = backend.verify(SimpleNamespace(next_token_logits=logits), info, candidates, tree=None)
    return made, lengths


@pytest.mark.parametrize("variant", BATCHES)
def test_a_replay_verifies_what_eager_torch_does_on_the_cpu_also_for_other_requests(variant: str) -> None:
    captured, plain = backend_of("cuda", "compiled"), backend_of("cpu", "eager")
    captured.prepare_capture_variant(COUNT, WIDTH, variant)
    info, logits, candidates = step_of(BATCHES[variant], 0, "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        verified(captured, info, logits, candidates)  # the engine's warm-up
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, lengths = verified(captured, info, logits, candidates)
    accepted = 0
    for step in range(1, 6):
        laws = [{**law, "seed": law.get("seed", 0) + 10 * step} for law in BATCHES[variant]]
        for backend in (captured, plain):
            names = [f"{place}/{step}" for place in PLACES]
            backend.prepare_step(names, PLACES, [params_of(**law) for law in laws], WIDTH)
        assert captured.cuda_graph_replay_variant(WIDTH) == variant
        here = step_of(laws, step, "cpu")
        info.valid_cache_lengths.copy_(here[0].valid_cache_lengths)
        logits.copy_(here[1])
        candidates.copy_(here[2])
        graph.replay()
        wanted, counts = verified(plain, *here)
        assert lengths.tolist() == counts.tolist()
        for row, count in enumerate(counts.tolist()):
            first = row * WIDTH
            assert tokens[first : first + count].tolist() == wanted[first : first + count].tolist()
        accepted += int(counts.sum()) - COUNT
    assert accepted > 0


@pytest.mark.parametrize("variant", BATCHES)
def test_a_step_waits_for_nothing(variant: str) -> None:
    backend = backend_of("cuda", "compiled")
    backend.prepare_step(["a", "b", "c", "d"], PLACES, [params_of(**law) for law in BATCHES[variant]], WIDTH)
    given = step_of(BATCHES[variant], 0, "cuda")
    verified(backend, *given)
    with no_waits():
        verified(backend, *given)
