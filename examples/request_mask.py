"""An edit of the user with state by slot: a mask for each request, which lies on the device from step to step.

python examples/request_mask.py

The words of ``token_bitmask`` come with every call. Here an engine uploads those of a request once, or has a kernel
change some of them between steps, and the sampler reads them where they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_sampler import EditRows, EditState, LogitEdit, Sampler, SamplingParams

VOCAB_SIZE = 1000


@dataclass(frozen=True)
class RequestMask(LogitEdit):
    """Masks tokens whose bit in the words of their slot is 0; a new request may draw every token."""

    def state(self, vocab_size: int) -> Mapping[str, EditState]:
        """A bit for each token, lowest first."""
        return {"words": EditState(torch.int32, shape=(-(-vocab_size // 32),), initial=-1)}

    def edit(self, x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
        """The logits, -inf where the bit is 0."""
        words = rows.state["words"].gather(1, (ids >> 5).expand(len(x), -1).to(torch.int64))
        return torch.where((words >> (ids & 31)) & 1 != 0, x, float("-inf"))


def packed(allowed: Tensor) -> Tensor:
    """The words of a mask, int32 ``[ceil(V / 32)]``, from bools ``[V]``."""
    bits = torch.nn.functional.pad(allowed, (0, -len(allowed) % 32)).view(-1, 32).to(torch.int64)
    return (bits << torch.arange(32, device=bits.device)).sum(-1).to(torch.int32)


def main() -> None:
    """Draw for one request that may draw multiples of 7 alone, and for one that may draw every token."""
    sampler = Sampler(VOCAB_SIZE, 2, backend="eager", edits=[RequestMask()])
    slots = [sampler.add_request(SamplingParams(seed=n, extra_args={"RequestMask": {}})) for n in range(2)]
    sampler.edit_state("words")[slots[0]] = packed(torch.arange(VOCAB_SIZE) % 7 == 0)
    plan = sampler.plan(slots)
    for position in range(4):
        print(sampler.sample(plan, torch.randn(2, VOCAB_SIZE), torch.full((2,), position)).tolist())


if __name__ == "__main__":
    main()
