"""A drafter guesses, the sampler verifies: under ``match`` the tokens are those without drafts, in fewer steps.

python examples/speculative.py
"""

import torch

from compiled_sampler import Sampler, SamplingParams

VOCAB_SIZE, NUM_TOKENS, NUM_DRAFTS = 1000, 24, 3
GENERATOR = torch.Generator().manual_seed(0)
MODEL = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=GENERATOR) * 4  # logits by last token
DRAFTER = MODEL + torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=GENERATOR)  # a model that is a little off


def decode(rule: str | None) -> tuple[list[int], int]:
    """The stream of one request and how many steps it took; None decodes without drafts."""
    sampler = Sampler(VOCAB_SIZE, 1, backend="eager")
    slot = sampler.add_request(SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=7))
    stream, steps, num_drafts = [0], 0, 0 if rule is None else NUM_DRAFTS
    plan = sampler.plan([slot], num_drafts=[num_drafts])
    while len(stream) <= NUM_TOKENS:
        position, last, drafts = torch.tensor([len(stream)]), torch.tensor([stream[-1]]), []
        for offset in range(num_drafts):
            drafts.append(sampler.draft(plan, DRAFTER[last], position + offset, coupled=rule == "match", offset=offset))
            last = drafts[-1].token_ids
        context = torch.tensor(stream[-1:] + [int(draft.token_ids) for draft in drafts])
        out = sampler.verify(plan, MODEL[context], drafts, position, rule or "match")
        stream += out.token_ids[0, : out.num_emitted[0]].tolist()
        steps += 1
    return stream[: NUM_TOKENS + 1], steps


plain, _ = decode(None)
for rule in ("match", "rejection", "block"):
    stream, steps = decode(rule)
    print(
        f"{rule}: {NUM_TOKENS} tokens in {steps} steps,", "the same" if stream == plain else "another draw of the law"
    )
