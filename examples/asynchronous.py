"""The host plans and launches step n + 1 while the device runs step n: tokens go from step to step on the device.

python examples/asynchronous.py
"""

import torch

from compiled_sampler import SampleOutputs, Sampler, SamplingParams

VOCAB_SIZE, NUM_REQUESTS, NUM_TOKENS = 1000, 4, 12
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODEL = (torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 4).to(DEVICE)
END = set(range(0, VOCAB_SIZE, 50))  # tokens that end a stream


def new_sampler() -> tuple[Sampler, list[int]]:
    """A sampler and the slots of its requests."""
    sampler = Sampler(VOCAB_SIZE, NUM_REQUESTS, DEVICE, backend="eager" if DEVICE.type == "cpu" else "auto")
    if DEVICE.type == "cuda":
        sampler.warmup(modes=["full"])
    return sampler, [sampler.add_request(SamplingParams(top_p=0.9, seed=seed)) for seed in range(NUM_REQUESTS)]


def asynchronous() -> list[list[int]]:
    """The host reads the tokens of a step when the next one is launched, and so learns one step late who has ended."""
    sampler, slots = new_sampler()
    last = torch.zeros(NUM_REQUESTS, dtype=torch.int64, device=DEVICE)
    outs = [SampleOutputs(last.clone(), last.to(torch.int32)) for _ in range(2)]  # a step reads what the other wrote
    positions = torch.ones_like(last)
    read = [torch.empty(NUM_REQUESTS, dtype=torch.int64, pin_memory=DEVICE.type == "cuda") for _ in range(2)]
    arrived = [torch.cuda.Event() if DEVICE.type == "cuda" else None for _ in range(2)]
    streams: dict[int, list[int]] = {slot: [] for slot in slots}
    ended: set[int] = set()

    def collect(step: int) -> None:
        event = arrived[step % 2]
        if event is not None:
            event.synchronize()  # of the step before the one that runs now
        for slot, token_id in zip(slots, read[step % 2].tolist(), strict=True):
            if slot not in ended:
                streams[slot].append(token_id)
                if token_id in END:
                    ended.add(slot)

    for step in range(NUM_TOKENS):
        rows = [-1 if slot in ended else slot for slot in slots]  # as known now: a step late
        out = outs[step % 2]
        sampler.sample(sampler.plan(rows), MODEL[last], positions, out)
        read[step % 2].copy_(out.token_ids, non_blocking=True)
        event = arrived[step % 2]
        if event is not None:
            event.record()
        last, positions = out.token_ids.clamp(min=0), positions + 1  # padding draws -1
        if step:
            collect(step - 1)
    collect(NUM_TOKENS - 1)
    return list(streams.values())


def step_by_step() -> list[list[int]]:
    """The same requests, each token read before the next step is planned."""
    sampler, slots = new_sampler()
    streams: list[list[int]] = []
    for slot in slots:
        stream = [0]
        while len(stream) <= NUM_TOKENS and not (len(stream) > 1 and stream[-1] in END):
            drawn = sampler.sample(
                sampler.plan([slot]), MODEL[stream[-1]][None], torch.tensor([len(stream)], device=DEVICE)
            )
            stream.append(int(drawn.token_ids))
        streams.append(stream[1:])
    return streams


streams = asynchronous()
print(*streams, sep="\n")
print("step by step, one request after the other:", "the same" if step_by_step() == streams else "different")
