"""Edits with state by slot, numbers that their slots could hold, and what they make of logits, computed before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_sampler import EditRows, EditState, LogitEdit, Sampler, SamplingParams
from examples.request_mask import RequestMask

V = 129


@dataclass(frozen=True)
class RunningBias(LogitEdit):
    """Adds a number of each token, times one of the slot, where the slot says so; its state is of each kind."""

    def state(self, vocab_size: int) -> Mapping[str, EditState]:
        """A bias that grows, its weight, whether it acts, and a small table."""
        return {
            "bias": EditState(per_token=True),
            "weight": EditState(torch.float16, initial=0.5),
            "acts": EditState(torch.bool, initial=True),
            "groups": EditState(torch.int64, shape=(2, 3)),
        }

    def edit(self, x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
        """The logits with the bias, and with a number by the token's place in the table."""
        state = rows.state
        weighted = state["weight"].float() * state["bias"]
        groups = state["groups"].flatten(1).gather(1, (ids % 6).expand(len(x), -1).to(torch.int64))
        return torch.where(state["acts"], (x + weighted) + 0.25 * groups.float(), x)


EDITS: dict[str, LogitEdit] = {"RequestMask": RequestMask(), "RunningBias": RunningBias()}


def stateful_sampler(backend: str, slots: int, **options: object) -> Sampler:
    return Sampler(V, slots, backend=backend, edits=[*EDITS.values()], **options)  # type: ignore[arg-type]


def params_with(edits: Sequence[str], **options: object) -> SamplingParams:
    return SamplingParams(**options, extra_args={name: {} for name in edits})  # type: ignore[arg-type]


def random_states(slots: int, seed: int) -> dict[str, Tensor]:
    """Numbers for all slots, by the names of the states; of every mask some bits are 0."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (2, slots, -(-V // 32)), generator=generator)
    return {
        "words": (words[0] | words[1]).to(torch.int32),
        "bias": 2.0 * torch.randn(slots, V, generator=generator),
        "weight": torch.randn(slots, generator=generator).half(),
        "acts": torch.rand(slots, generator=generator) < 0.8,
        "groups": torch.randint(-3, 4, (slots, 2, 3), generator=generator),
    }


def initial_states(slots: int) -> dict[str, Tensor]:
    """The numbers of requests that were just added."""
    return {
        "words": torch.full((slots, -(-V // 32)), -1, dtype=torch.int32),
        "bias": torch.zeros(slots, V),
        "weight": torch.full((slots,), 0.5, dtype=torch.float16),
        "acts": torch.ones(slots, dtype=torch.bool),
        "groups": torch.zeros(slots, 2, 3, dtype=torch.int64),
    }


def write_states(sampler: Sampler, states: Mapping[str, Tensor]) -> None:
    """What an engine does between steps: its numbers are in the memory of the sampler afterwards."""
    for name, each in states.items():
        sampler.edit_state(name).copy_(each)


def edited_before(logits: Tensor, rows: Sequence[tuple[Sequence[str], int]], states: Mapping[str, Tensor]) -> Tensor:
    """The logits ``[R, V]``, token by token, after the edits of each row with the state of its slot."""
    made = logits.clone()
    for row, (edits, slot) in enumerate(rows):
        words, groups = states["words"][slot].tolist(), states["groups"][slot].flatten().tolist()
        for token in range(V):
            is_allowed = (words[token // 32] >> token % 32) & 1 or "RequestMask" not in edits
            if not is_allowed:
                made[row, token] = float("-inf")
            elif "RunningBias" in edits and states["acts"][slot]:
                added = states["weight"][slot].float() * states["bias"][slot, token]
                made[row, token] = (made[row, token] + added) + 0.25 * groups[token % 6]
    return made
