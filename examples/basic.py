"""Ten lines: three requests, each with its own parameters, draw one token each.

python examples/basic.py
"""

import torch

from compiled_sampler import Sampler, SamplingParams

sampler = Sampler(vocab_size=32_000, max_num_requests=8, backend="eager")  # the same tokens as "compiled" and "graph"
slots = [
    sampler.add_request(SamplingParams(temperature=0.0)),
    sampler.add_request(SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=1)),
    sampler.add_request(SamplingParams(min_p=0.05, seed=2)),
]
logits = torch.randn(3, 32_000, generator=torch.Generator().manual_seed(0)) * 4
plan = sampler.plan(slots)
outputs = sampler.sample(plan, logits, positions=torch.tensor([5, 17, 0]))
print(plan.mode.name, outputs.token_ids.tolist())
