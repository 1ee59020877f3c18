"""A speech model draws eight codebooks a position, each from the codes before it: one seeded stream, one graph.

python examples/codebooks.py
"""

import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams

NUM_CODES, CODEBOOKS, ROWS, WIDTH, STEPS = 512, 8, 4, 64, 6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class CodePredictor:
    """A toy: the logits of a codebook follow from a hidden state, to which the codes before it are added."""

    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(0)
        self.embedded = torch.randn(CODEBOOKS, NUM_CODES, WIDTH, generator=chance).to(DEVICE)
        self.heads = torch.randn(CODEBOOKS, WIDTH, NUM_CODES, generator=chance).to(DEVICE)

    def predict(self, sampler: Sampler, plan: object, hidden: Tensor, positions: Tensor) -> Tensor:
        """The codes of one position, int64 ``[R, CODEBOOKS]``; products and sums are the same in any batch."""
        codes = []
        for book in range(CODEBOOKS):
            logits = (hidden[:, :, None] * self.heads[book]).sum(1) / WIDTH**0.5
            codes.append(sampler.sample(plan, logits, positions, draw_index=book).token_ids)
            hidden = hidden + self.embedded[book, codes[-1]]
        return torch.stack(codes, 1)


def decoded(backend: str, *, captured: bool) -> list[list[list[int]]]:
    """The codes of some positions, drawn call by call or by replays of one graph that holds a whole position."""
    model, sampler = CodePredictor(), Sampler(NUM_CODES, ROWS, DEVICE, backend=backend)
    plan = sampler.plan([sampler.add_request(SamplingParams(0.9, top_k=50, seed=seed)) for seed in range(ROWS)])
    hidden = torch.zeros(ROWS, WIDTH, device=DEVICE)
    positions, codes = torch.zeros(ROWS, dtype=torch.int64, device=DEVICE), torch.zeros(0)

    def step() -> None:
        nonlocal codes
        codes = model.predict(sampler, plan, hidden, positions)
        hidden.copy_(model.embedded[0, codes[:, -1]])
        positions.add_(1)

    run = step
    if backend == "compiled":
        step()  # in eager torch, which asks for compiled stages
        sampler.warmup(modes=())  # waits for them
        step()  # compiled, and allocates outside of a graph
        hidden.zero_()
        positions.zero_()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    found = []
    for _ in range(STEPS):
        run()
        found.append(codes.tolist())
    return found


eager = decoded("eager", captured=False)
assert decoded("compiled", captured=DEVICE == "cuda") == eager
print(f"{STEPS} positions of {CODEBOOKS} codebooks, the same codes on every path; those of request 0:")
for position in eager:
    print(*position[0])
