"""The engine's own CUDA graph holds the model, the draw and the feedback; new batches only change device buffers.

python examples/cuda_graph.py
"""

import sys

import torch

from compiled_sampler import SampleOutputs, Sampler, SamplingParams

VOCAB_SIZE, ROWS = 1000, 4


def main() -> str | None:
    """Decode eight tokens a request by replays; an error message where there is no CUDA."""
    if not torch.cuda.is_available():
        return "this example needs a CUDA device"
    weights = torch.randn(VOCAB_SIZE, VOCAB_SIZE, device="cuda") * 4  # logits by last token
    logits = torch.zeros(ROWS, VOCAB_SIZE, device="cuda")
    tokens, positions = torch.zeros(2, ROWS, dtype=torch.int64, device="cuda")
    out = SampleOutputs(torch.zeros_like(tokens), torch.zeros_like(tokens, dtype=torch.int32))
    sampler = Sampler(VOCAB_SIZE, ROWS, "cuda", backend="compiled")
    sampler.bind_logits(logits)
    sampler.warmup()
    plan = sampler.plan([sampler.add_request(SamplingParams(0.8, top_k=20, seed=seed)) for seed in range(ROWS)])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.index_select(weights, 0, tokens, out=logits)
        sampler.sample(plan, logits, positions, out=out)
        tokens.copy_(out.token_ids)
        positions.add_(1)
    for _ in range(8):
        graph.replay()
        print(tokens.tolist())
    return None


sys.exit(main())
