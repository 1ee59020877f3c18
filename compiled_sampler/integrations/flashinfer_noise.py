"""Seeds and positions from a seed, an offset or a generator as FlashInfer takes them."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_sampler.core.noise import philox_4x32_10
from compiled_sampler.core.stage import Run
from compiled_sampler.engine.boundary.arguments import check_not_capturing
from compiled_sampler.engine.boundary.tensors import check_tensor
from compiled_sampler.engine.requests.slots import new_seed
from compiled_sampler.scalars import as_int64, checked_int

Number = int | Tensor | None

_WORD, _TOP_BIT = 0xFFFFFFFF, 0x80000000
_SEEDS_OF_ROWS = 0x73656564  # a word of the counter that no noise uses


def noise_of(
    seed: Number, offset: Number, generator: torch.Generator | None, count: int, device: torch.device, run: Run
) -> tuple[Tensor, Tensor]:
    """Seeds and positions of rows, int64 ``[R]`` each: the offset is the position, and a generator draws a seed."""
    if generator is not None and not (isinstance(generator, torch.Generator) and generator.device.type == "cpu"):
        raise TypeError(
            f"generator must be a torch.Generator of the CPU, got {generator!r}; one of a device could not be read "
            "without a wait, so pass seed and offset"
        )
    if (seed is None) != (offset is None):
        raise ValueError(f"seed and offset must come together, got {seed!r} and {offset!r}; offset is the position")
    if isinstance(seed, Tensor) != isinstance(offset, Tensor):
        raise ValueError("seed and offset must both be tensors or both be numbers, got one of each; convert one")
    if seed is not None and generator is not None:
        raise ValueError("generator must be None beside a seed, got both; the seed and the offset are all the noise")
    if seed is None:
        # One that is drawn in a capture would serve all replays.
        check_not_capturing(device, "seed and offset must be tensors inside a capture; each replay then reads them")
        seed, offset = new_seed(torch.default_generator if generator is None else generator), 0
    rows = torch.arange(count, device=device)
    seeds, positions = _words("seed", seed, count, device), _words("offset", offset, count, device)
    # One seed serves a batch by the hash of (seed, row). Of seeds by row each is hashed with row 0, so that it means
    # the same in every row, and in a batch of one.
    if isinstance(seed, Tensor) and seed.shape[0] == count:
        rows = torch.zeros_like(rows)
    return run(seeds_of_rows, seeds, rows), positions.expand(count).contiguous()


def seeds_of_rows(seeds: Tensor, rows: Tensor) -> Tensor:
    """A seed for each row, int64 ``[R]``: 64 bits of Philox4x32-10, the seed its key and the row, >= 0, its counter."""
    seeds = seeds + torch.zeros_like(rows)
    counter = (rows & _WORD, (rows >> 32) & _WORD, torch.zeros_like(rows), torch.full_like(rows, _SEEDS_OF_ROWS))
    low, high, *_ = philox_4x32_10(counter, (seeds & _WORD, (seeds >> 32) & _WORD))
    low, high = low & _WORD, high & _WORD
    return ((high ^ _TOP_BIT) - _TOP_BIT) * 2**32 + low


def _words(name: str, value: Number, count: int, device: torch.device) -> Tensor:
    """A number or a tensor as int64 ``[1]`` or ``[count]``, modulo 2**64."""
    if isinstance(value, Tensor):
        check_tensor(name, value, (torch.int64, torch.uint64), device)
        if value.dim() != 1 or value.shape[0] not in (1, count):
            raise ValueError(
                f"{name} must be [1] or [{count}], got {list(value.shape)}; one for the batch or one a row"
            )
        return value.contiguous().view(torch.int64)
    number = checked_int(name, value)
    limit = 2**64 if name == "seed" else 2**63
    if not (-(2**63) if name == "seed" else 0) <= number < limit:
        raise ValueError(f"{name} must be below 2**{limit.bit_length() - 1}, got {number}; take it modulo that")
    return torch.full((1,), as_int64(number), dtype=torch.int64, device=device)
