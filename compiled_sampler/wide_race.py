"""The race of rows whose filters may keep tokens beyond the candidates, on a GPU.

Most rows end among the candidates: they race there, and the pass over the row is left to the others. On the CPU, where
a pass costs less than the choice, ``drawing.py`` lets every row race over all its tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_sampler.batch import Rows, SampleOutputs
from compiled_sampler.draw import admitted_key, outputs
from compiled_sampler.filters import KEEP_ALL
from compiled_sampler.order import indices, key_float, pack, packed_id, packed_key, row_logits
from compiled_sampler.rows import take
from compiled_sampler.wide import Found, Threshold, triton_operator

NO_WINNER = KEEP_ALL
"""Stands for the winner of a row that did not race: the smallest packed number, whose key is ``MASKED_KEY``."""


def race_beyond(
    logits: Tensor, known: Threshold, rows: Rows, row_max: Tensor, found: Found, *, vocab_size: int, parts: int
) -> Tensor:
    """The best packed (score key, id) of each part of a row, ``NO_WINNER`` for rows that do not race: ``[R, parts]``.

    Args:
        logits: float32, bfloat16 or float16 ``[R, >=V]``.
        known: what was known of the threshold before the search, and which rows race.
        rows: per-row parameters ``[R]``.
        row_max: float32 ``[R]``, the largest logit.
        found: by the search; the lists that it leaves spare most rows another pass over all tokens.
        vocab_size: V.
        parts: into which a row is cut for one program each; in torch the first part is the row.

    Returns:
        int64 ``[R, parts]``.
    """
    if logits.is_cuda:
        race = triton_operator("wide_race_triton", "wide_race")
        parameters = (row_max, rows.scale, rows.top_p, rows.noise_mask, rows.min_p_log2, [*rows.keys])
        of_search = (found.threshold, [*(found.lists or ())])
        winners: Tensor = race(logits, known.beyond, known.pending, *parameters, *of_search, vocab_size, parts)
        return winners
    index = known.beyond.nonzero().flatten()
    x, ids = row_logits(logits[index], vocab_size), indices(vocab_size, logits.device)
    key = admitted_key(x, ids, take(rows, index), row_max[index], found.threshold[index])
    winners = torch.full((logits.shape[0], parts), NO_WINNER, device=logits.device)
    winners[index, 0] = pack(key, ids).amax(-1)
    return winners


def draw_from_all(
    ordered: Tensor | None, winners: Tensor, magnitudes: Tensor, rows: Rows, row_max: Tensor, threshold: Tensor
) -> SampleOutputs:
    """The winner among the candidates that the filters keep and the winners beyond them.

    Args:
        ordered: int64 ``[R, C]``, packed (order key, id) of the first C tokens in descending order; None where there
            are no candidates, and every row has raced.
        winners: int64 ``[R, parts]``, at most C parts, from ``race_beyond``.
        magnitudes: int32 ``[R, B]``, ``nan_bits`` of parts of each row, few where there are candidates.
        rows: per-row parameters ``[R]``.
        row_max: float32 ``[R]``.
        threshold: int64 ``[R]``.
    """
    magnitude = magnitudes.amax(-1)
    if ordered is None:  # as wide as the magnitudes at least: reductions over one width are one kernel
        missing = magnitudes.shape[1] - winners.shape[1]
        winners = F.pad(winners, (0, missing), value=NO_WINNER) if missing > 0 else winners
        return outputs(winners.amax(-1), magnitude, rows.live)
    ids = packed_id(ordered).to(torch.int32)
    key = admitted_key(key_float(packed_key(ordered)), ids, rows, row_max, threshold)
    beyond = F.pad(winners, (0, ordered.shape[1] - winners.shape[1]), value=NO_WINNER)
    return outputs(torch.maximum(pack(key, ids), beyond).amax(-1), magnitude, rows.live)
