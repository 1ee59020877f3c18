"""The operators of the exact path on CUDA: thresholds, and winners of races under them, as torch defines them.

The hand-written part of the library: fixed torch passes could neither stop early nor skip a row. Up to four kernels:

1. ``race_kernel``, for a draw, lets rows race over all their tokens, in parts. Those that are sure to race did before
   their candidates were known, in the same kernel, when it weighed every row.
2. ``bracket_kernel`` is done with a row if a part of it proves that top-p keeps the winner (``winner.py``). For the
   others, and where a threshold is wanted, it brackets the key of each filter's last token by a sample.
3. ``measure_kernel`` reads the row once: the exact weight above either end of a bracket, and a list of what is inside,
   and above it if that is little: then what comes after needs the list alone. And the mass behind the winner, which
   decides where nothing was proven.
4. ``finish_kernel``, for a draw, lets parts race again whose winners are dropped, or, where few tokens are kept, the
   list (``winner.py``). A threshold it searches in the list, among keys that exist, and cuts ties by id; in the row
   itself where the exact weights say that the key is outside, where one key fills the bracket, or where the list was
   too short. A draw needs it there too, and under both filters.

Without top-p nothing but the race needs a row's maximum: then the measuring pass is the first one, and finds it too.
A draw reads masks beside the logits; a threshold is searched in a copy that has them.

Weights are integers, so programs and atomics may come in any order. They follow ``mass.py`` operation by operation; the
launches turn FMA contraction off.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import triton_op

from compiled_sampler.exact.triton.launches import (
    Filters,
    Race,
    Rows,
    empty_parts,
    empty_search,
    launch_bracket,
    launch_finish,
    launch_measure,
    launch_race,
    part_tiles,
)


@triton_op("compiled_sampler::search_threshold", mutates_args=())
def search_threshold(
    logits: Tensor,
    packed: Tensor,
    pending: Tensor,
    row_mass: Tensor,
    row_max: Tensor,
    scale: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    vocab_size: int,
    base_is_row: bool,
) -> Tensor:
    """The threshold of every row, searching the pending ones; arguments as ``threshold.search_threshold``."""
    rows = Rows(logits, row_max, scale, top_k, vocab_size)
    filters, search = Filters(pending, row_mass, top_p, base_is_row), empty_search(top_k, vocab_size)
    unread = search.brackets  # without a race
    race = Race(unread, row_max, [unread] * 4, packed[:, None], 1)
    launch_bracket(rows, filters, race, search, packed, draws=False)
    launch_measure(rows, filters, search, draws=False)
    launch_finish(rows, filters, race, search, draws=False)
    return search.found


@triton_op("compiled_sampler::race_beyond_candidates", mutates_args=())
def race_beyond_candidates(
    logits: Tensor,
    packed: Tensor,
    pending: Tensor,
    beyond: Tensor,
    row_mass: Tensor,
    row_max: Tensor,
    scale: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    noise_mask: Tensor,
    min_p_log2: Tensor,
    keys: list[Tensor],
    raced: Tensor,
    words: Tensor | None,
    vocab_size: int,
    base_is_row: bool,
) -> Tensor:
    """The winner of every row that races, int64 ``[R, 1]``; arguments as ``row_race.race_beyond_candidates``."""
    rows = Rows(logits, row_max, scale, top_k, vocab_size, words)
    filters, search = Filters(pending, row_mass, top_p, base_is_row), empty_search(top_k, vocab_size)
    race = Race(noise_mask, min_p_log2, keys, torch.empty_like(raced), part_tiles(vocab_size, raced.shape[0]))
    launch_race(rows, race, beyond, search.open_rows, searched=True, raced=raced)
    launch_bracket(rows, filters, race, search, packed, draws=True)
    launch_measure(rows, filters, search, draws=True)
    launch_finish(rows, filters, race, search, draws=True)
    return search.found[:, None]


@triton_op("compiled_sampler::race_top_k", mutates_args=())
def race_top_k(
    logits: Tensor,
    live: Tensor,
    scale: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    noise_mask: Tensor,
    min_p_log2: Tensor,
    keys: list[Tensor],
    words: Tensor | None,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """The winner of every row and its ``nan_bits``, ``[R, 1]`` each; arguments as ``row_race.race_top_k``."""
    row_max, magnitudes = torch.empty_like(scale), torch.empty_like(noise_mask)
    rows = Rows(logits, row_max, scale, top_k, vocab_size, words)
    filters = Filters(live, top_k, top_p, False)  # without top-p no mass is read
    search = empty_search(top_k, vocab_size)
    race = Race(noise_mask, min_p_log2, keys, *empty_parts(top_k, vocab_size, weighs=False))
    launch_bracket(rows, filters, race, search, top_k, draws=True, magnitudes=magnitudes)
    launch_measure(rows, filters, search, draws=True, magnitudes=magnitudes)
    launch_race(rows, race, live, search.open_rows, searched=True)
    launch_finish(rows, filters, race, search, draws=True)
    return search.found[:, None], magnitudes[:, None]


@triton_op("compiled_sampler::race_rows", mutates_args=())
def race_rows(
    logits: Tensor,
    beyond: Tensor,
    row_max: Tensor,
    scale: Tensor,
    top_k: Tensor,
    noise_mask: Tensor,
    min_p_log2: Tensor,
    keys: list[Tensor],
    found: Tensor | None,
    words: Tensor | None,
    vocab_size: int,
    weighs: bool,
) -> tuple[Tensor, Tensor]:
    """The winner of each part of a row that only min_p filters, and with ``weighs`` the mass of each part of every row.

    Int64 ``[R, n]`` each, the second ``[R, 0]`` if not; as ``row_race.race_rows`` and ``row_race.race_and_weigh``.
    """
    rows = Rows(logits, row_max, scale, top_k, vocab_size, words)
    race = Race(noise_mask, min_p_log2, keys, *empty_parts(top_k, vocab_size, weighs=weighs))
    num_rows, num_parts = race.part_winners.shape
    masses, open_rows = (
        race.part_winners.new_empty((num_rows, num_parts if weighs else 0)),
        torch.empty_like(noise_mask),
    )
    part_masses = masses if weighs else None
    launch_race(rows, race, beyond, open_rows, searched=False, founds=found, part_masses=part_masses)
    return race.part_winners, masses
