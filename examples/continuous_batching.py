"""Requests come and go; what a request draws does not depend on who runs beside it.

python examples/continuous_batching.py
"""

import torch

from compiled_sampler import Sampler, SamplingParams

VOCAB_SIZE, NUM_TOKENS = 1000, 8
MODEL = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 4  # logits by last token


def decode(queue: list[SamplingParams], max_running: int) -> dict[int, list[int]]:
    """The tokens of each request, by its seed."""
    sampler = Sampler(VOCAB_SIZE, max_running, backend="eager")
    waiting, running, streams = list(queue), {}, {params.seed: [0] for params in queue}
    while waiting or running:
        if waiting and len(running) < max_running:
            params = waiting.pop(0)
            running[sampler.add_request(params)] = streams[params.seed]
        last = torch.tensor([stream[-1] for stream in running.values()])
        positions = torch.tensor([len(stream) for stream in running.values()])
        drawn = sampler.sample(sampler.plan(list(running)), MODEL[last], positions).token_ids
        for (slot, stream), token_id in zip(list(running.items()), drawn.tolist(), strict=True):
            stream.append(token_id)
            if len(stream) > NUM_TOKENS:
                sampler.remove_request(slot)
                del running[slot]
    return streams


queue = [SamplingParams(temperature=0.8, top_k=10 * (seed % 3), seed=seed) for seed in range(6)]
streams = decode(queue, max_running=3)
print(*(f"seed {seed}: {stream}" for seed, stream in streams.items()), sep="\n")
print("alone, one after the other:", "the same" if decode(queue[::-1], max_running=1) == streams else "different")
