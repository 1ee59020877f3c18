"""The functions of ``flashinfer.sampling`` with their signatures: change the import, and this library draws.

What differs is written down in ``docs/functional.md``. In short: the order of a row is likeliest first, then lowest
id, so ties have one meaning; one seed for a batch becomes a seed for each row, a hash of (seed, row), and the offset
becomes the position. So a token depends on its row here, and nowhere else in this library; with a seed for each row it
does not.

Arguments of the functions that draw::

    indices        int32 or int64 [B], the row of each draw; the result has its dtype, else int32. On a CPU others than
                   rows are an error; on a GPU a device-side assertion, since a look at them would wait
    deterministic  either; every draw is
    generator      of the CPU, from which a seed is drawn where none is given
    check_nan      True waits for the device, and raises for a NaN
    seed, offset   ints, or int64 or uint64 [1] or [B] on the device; see ``noise_of``
    return_valid   True returns bool [B] too: whether a token could be drawn. Otherwise it is -1
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from compiled_sampler.core.stage import Run, call
from compiled_sampler.engine.boundary.arguments import check_not_capturing
from compiled_sampler.engine.boundary.tensors import INTEGERS, check_tensor
from compiled_sampler.engine.requests.slots import new_seed
from compiled_sampler.functional import probs as probabilities
from compiled_sampler.functional import sample, verify_from_probs
from compiled_sampler.functional.arguments import FloatOrRows, IntOrRows, checked_rows, float_rows, integer_rows
from compiled_sampler.functional.functions import run_of
from compiled_sampler.params import SamplingParams
from compiled_sampler.passes.probability_rows import (
    base_2_logits,
    keep_first,
    keep_nucleus,
    renormalised,
    seeds_of_rows,
)
from compiled_sampler.scalars import as_int64, check_choice, checked_int

Number = int | Tensor | None

_BASES = {"top_k_first": "top_k", "joint": "all"}
_BASE_2 = math.log2(math.e)  # the temperature at which logits are base-2 logarithms

Sampled = Tensor | tuple[Tensor, Tensor]


def softmax(logits: Tensor, temperature: FloatOrRows | None = None, enable_pdl: bool | None = None) -> Tensor:
    """The probabilities of rows ``[R, V]`` of logits, float32; a temperature of 0 gives the likeliest token all."""
    if enable_pdl is not None:
        raise ValueError(f"enable_pdl must be None, got {enable_pdl}; how kernels are launched is decided by the stage")
    return probabilities(logits, temperature=1.0 if temperature is None else temperature)


def sampling_from_logits(
    logits: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Number = None,
    offset: Number = None,
) -> Tensor:
    """One token for each row of logits, ``[B]``."""
    return _drawn(logits, indices, generator, check_nan, seed, offset)[0]


def sampling_from_probs(
    probs: Tensor,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Number = None,
    offset: Number = None,
    return_valid: bool = False,
) -> Sampled:
    """One token for each row of probabilities, ``[B]``."""
    return _of_probs(probs, indices, generator, check_nan, seed, offset, return_valid)


def top_p_sampling_from_probs(
    probs: Tensor,
    top_p: FloatOrRows,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Number = None,
    offset: Number = None,
    return_valid: bool = False,
) -> Sampled:
    """One token for each row, among the likeliest that hold the share ``top_p``, a number or one a draw."""
    return _of_probs(probs, indices, generator, check_nan, seed, offset, return_valid, top_p=top_p)


def top_k_sampling_from_probs(
    probs: Tensor,
    top_k: IntOrRows,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Number = None,
    offset: Number = None,
    return_valid: bool = False,
) -> Sampled:
    """One token for each row, among the ``top_k`` likeliest, a number or one a draw; 0 keeps all."""
    return _of_probs(probs, indices, generator, check_nan, seed, offset, return_valid, top_k=top_k)


def min_p_sampling_from_probs(
    probs: Tensor,
    min_p: FloatOrRows,
    indices: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Number = None,
    offset: Number = None,
    return_valid: bool = False,
) -> Sampled:
    """One token for each row, among those at least ``min_p`` times as likely as the likeliest."""
    return _of_probs(probs, indices, generator, check_nan, seed, offset, return_valid, min_p=min_p)


def top_k_top_p_sampling_from_logits(
    logits: Tensor,
    top_k: IntOrRows,
    top_p: FloatOrRows,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Number = None,
    offset: Number = None,
) -> Tensor:
    """One token for each row of logits, filtered by both; "joint" takes ``top_p`` of the whole row's mass."""
    cuts = {"top_k": top_k, "top_p": top_p, "top_p_base": _base(filter_apply_order)}
    return _drawn(logits, indices, generator, check_nan, seed, offset, **cuts)[0]


def top_k_top_p_sampling_from_probs(
    probs: Tensor,
    top_k: IntOrRows,
    top_p: FloatOrRows,
    indices: Tensor | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    check_nan: bool = False,
    seed: Number = None,
    offset: Number = None,
    return_valid: bool = False,
) -> Sampled:
    """One token for each row of probabilities, filtered by both; "joint" takes ``top_p`` of the whole row's mass."""
    cuts = {"top_k": top_k, "top_p": top_p, "top_p_base": _base(filter_apply_order)}
    return _of_probs(probs, indices, generator, check_nan, seed, offset, return_valid, **cuts)


def top_p_renorm_probs(probs: Tensor, top_p: FloatOrRows, is_deterministic: bool = False) -> Tensor:
    """The likeliest tokens that hold the share ``top_p``, divided by their sum: float32 ``[R, V]``."""
    probs, form = checked_rows(probs, None, "probs")
    if not isinstance(top_p, Tensor):
        top_p = SamplingParams(top_p=top_p).top_p
    share = float_rows("top_p", top_p, len(probs), form.device, call)
    return renormalised(probs, keep_nucleus(probs.to(torch.float32), share))


def top_k_renorm_probs(probs: Tensor, top_k: IntOrRows) -> Tensor:
    """The ``top_k`` likeliest tokens, divided by their sum: ``[R, V]`` of the dtype given; 0 keeps all."""
    probs, form = checked_rows(probs, None, "probs")
    count = integer_rows("top_k", top_k, len(probs), form.device)
    return renormalised(probs, keep_first(probs, count)).to(form.dtype)


def top_k_mask_logits(logits: Tensor, top_k: IntOrRows) -> Tensor:
    """Logits ``[R, V]`` with -inf for all but the first ``top_k`` of the order, exactly so many; 0 keeps all."""
    logits, form = checked_rows(logits, None)
    count = integer_rows("top_k", top_k, len(logits), form.device)
    return torch.where(keep_first(logits, count), logits, -math.inf)


def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None,
    maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: Number = None,
    offset: Number = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accepted drafts and one token more, by the rule "rejection".

    Args:
        draft_probs: float32 ``[N, K, V]``, what the drafts were drawn from.
        draft_token_ids: int32 or int64 ``[N, K]``.
        target_probs: float32 ``[N, K+1, V]``.
        maybe_output_accepted_token_num: integers ``[N]``, to which the second result is added in place.
        maybe_output_emitted_draft_token_num: integers ``[N]``, to which the third is added.
        deterministic: as above, like what follows.
        generator: see there.
        seed: see there.
        offset: see there.

    Returns:
        Tokens ``[N, K+1]`` of the dtype of the drafts, -1 behind the last; drafts that pass the test of their own
        place, also behind a rejection (``num_matching``, never to be committed on); drafts emitted, without the last
        token (``num_accepted``, so that ``num_emitted`` is one more).
    """
    for name, given in (("draft_probs", draft_probs), ("target_probs", target_probs)):
        check_tensor(name, given, (torch.float32,), target_probs.device)
        if given.dim() != 3:
            raise ValueError(f"{name} must have a row [V] for each request and place, got {list(given.shape)}")
    run, count = run_of("auto"), draft_token_ids.shape[0]
    seeds, positions = noise_of(seed, offset, generator, count, target_probs.device, run)
    verified = verify_from_probs(
        target_probs.flatten(0, 1),
        draft_token_ids,
        seeds=seeds,
        positions=positions,
        rule="rejection",
        draft_probs=draft_probs.flatten(0, 1),
    )
    accepted = _added(maybe_output_accepted_token_num, verified.num_matching)
    emitted = _added(maybe_output_emitted_draft_token_num, verified.num_accepted)
    return verified.token_ids.to(draft_token_ids.dtype), accepted, emitted


def _of_probs(
    probs: Tensor,
    indices: Tensor | None,
    generator: torch.Generator | None,
    check_nan: bool,
    seed: Number,
    offset: Number,
    return_valid: bool,
    **cuts: Any,
) -> Sampled:
    """The draws from rows of probabilities; ``cuts`` are arguments of ``functional.sample``."""
    probs, _ = checked_rows(probs, None, "probs")
    logits = run_of("auto")(base_2_logits, probs.to(torch.float32))
    drawn = _drawn(logits, indices, generator, check_nan, seed, offset, temperature=_BASE_2, **cuts)
    return drawn if return_valid else drawn[0]


def _drawn(
    logits: Tensor,
    indices: Tensor | None,
    generator: torch.Generator | None,
    check_nan: bool,
    seed: Number,
    offset: Number,
    **cuts: Any,
) -> tuple[Tensor, Tensor]:
    """Tokens ``[B]``, and whether one could be drawn."""
    logits, form = checked_rows(logits, None)
    if check_nan and bool(logits.isnan().any()):
        raise ValueError("logits or probs must hold no NaN where check_nan is True, got one; without it NaN is masked")
    if indices is not None:
        _check_indices(indices, len(logits), form.device)
        logits = logits.index_select(0, indices)
    seeds, positions = noise_of(seed, offset, generator, len(logits), form.device, run_of("auto"))
    drawn = sample(logits, seeds=seeds, positions=positions, **cuts).token_ids
    return drawn.to(torch.int32 if indices is None else indices.dtype), drawn >= 0


def _check_indices(indices: Tensor, rows: int, device: torch.device) -> None:
    """Raise unless ``indices`` name rows; on a GPU what they hold is not looked at, which would wait for it."""
    check_tensor("indices", indices, INTEGERS, device)
    if indices.dim() != 1:
        raise ValueError(f"indices must be [B], the row of each draw, got {[*indices.shape]}; call .flatten()")
    wrong = indices[(indices < 0) | (indices >= rows)] if device.type == "cpu" else indices[:0]
    if len(wrong):
        raise ValueError(
            f"indices must be in [0, {rows}), the rows of logits or probs, got {int(wrong[0])}; None draws one a row"
        )


def _base(filter_apply_order: str) -> str:
    check_choice("filter_apply_order", filter_apply_order, _BASES, "'top_k_first' takes top_p of what top_k keeps")
    return _BASES[filter_apply_order]


def _added(total: Tensor | None, counts: Tensor) -> Tensor:
    counts = counts.clamp(min=0)
    return counts.to(torch.int32) if total is None else total.add_(counts)


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
