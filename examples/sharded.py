"""Two ranks each hold half of a language model's head: four ways to draw from it, and the same tokens.

python examples/sharded.py
"""

import itertools
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams, VocabularyShard

VOCAB, WIDTH, ROWS, STEPS, RANKS = 1000, 64, 4, 12, 2
BOUNDS = [0, 600, VOCAB]  # shards of any sizes, in the order of ranks
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, min_p=0.02, seed=1),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=2),
    SamplingParams(top_p=0.95, repetition_penalty=1.2, seed=3),
]


class Head:
    """The end of a Llama: the norm of a hidden state, and the rows of the head that a rank holds."""

    def __init__(self, start: int, stop: int) -> None:
        chance = torch.Generator().manual_seed(0)
        self.embedded = torch.randn(VOCAB, WIDTH, generator=chance)
        self.rows = torch.randn(VOCAB, WIDTH, generator=chance)[start:stop]

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 ``[R, stop - start]``, by sums whose order does not depend on how many columns there are."""
        normed = hidden * (hidden.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return (normed[:, None] * self.rows).sum(-1) / 3

    def next_hidden(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """The hidden states behind new tokens: in place of the layers, a decaying sum of embeddings."""
        return 0.5 * hidden + self.embedded[token_ids]


def decoded(head: Head, draw: Callable[[Tensor, Tensor], Tensor], params: list[SamplingParams]) -> list[list[int]]:
    """The tokens of each request; ``draw(logits, positions)`` returns one token a row."""
    hidden, columns = torch.ones(len(params), WIDTH), []
    for step in range(STEPS):
        columns.append(draw(head.logits(hidden), torch.full((len(params),), step)))
        hidden = head.next_hidden(hidden, columns[-1])
    return torch.stack(columns, 1).tolist()


def drawing(params: list[SamplingParams], shard: VocabularyShard | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that draws with a sampler of its own."""
    sampler = Sampler(VOCAB, len(params), backend="eager", history_len=64, shard=shard)
    plan = sampler.plan([sampler.add_request(each) for each in params])
    return lambda logits, positions: sampler.sample(plan, logits, positions).token_ids


def compare(rank: int, store: str) -> None:
    """On each rank: the columns of the rank, gathered columns, the whole head, and a part of the batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    start, stop = BOUNDS[rank : rank + 2]
    own, whole = Head(start, stop), Head(0, VOCAB)
    sharded = decoded(own, drawing(PARAMS, VocabularyShard(start, stop)), PARAMS)

    draw_whole = drawing(PARAMS)

    def draw_gathered(columns: Tensor, positions: Tensor) -> Tensor:
        widest = max(end - begin for begin, end in itertools.pairwise(BOUNDS))
        padded = torch.zeros(ROWS, widest)
        padded[:, : columns.shape[1]] = columns
        parts = [torch.zeros(ROWS, widest) for _ in range(RANKS)]
        dist.all_gather(parts, padded)
        return draw_whole(
            torch.cat([part[:, : BOUNDS[n + 1] - BOUNDS[n]] for n, part in enumerate(parts)], 1), positions
        )

    gathered, alone = decoded(own, draw_gathered, PARAMS), decoded(whole, drawing(PARAMS), PARAMS)
    # An engine whose ranks sample other rows, all columns of these, needs nothing of the library: a token depends on
    # its own row, seed and position alone.
    mine = PARAMS[rank * ROWS // RANKS : (rank + 1) * ROWS // RANKS]
    parts: list[list[list[int]]] = [[] for _ in range(RANKS)]
    dist.all_gather_object(parts, decoded(whole, drawing(mine), mine))
    assert sharded == gathered == alone == [row for part in parts for row in part]
    if rank == 0:
        print("sharded, gathered, on one rank and by parts of the batch, the same tokens:")
        for row in sharded:
            print(*row)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(compare, (f"{folder}/store",), nprocs=RANKS)
