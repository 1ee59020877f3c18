"""The steps that a sampler prepares: of every kind, in every mode, for the edits of the batches that will come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_sampler.edit_names import GIVEN, LEAVES, MASK
from compiled_sampler.engine.steps.step import Step
from compiled_sampler.modes import Mode, Verification, probabilities_mode, verifying
from graph_cache import BufferSpec


def prepared_steps(
    modes: Sequence[Mode],
    verifications: Sequence[Verification],
    probabilities: bool,
    edits: tuple[str, ...],
    with_call: Sequence[str],
) -> Iterator[Step]:
    """The steps for batches with the same edits.

    Args:
        modes: the mode table.
        verifications: the ways of verifying drafts.
        probabilities: whether there are steps of ``Sampler.probs``.
        edits: of the batches.
        with_call: names of edits of the user to which tensors come with the call.
    """
    writes = bool({*LEAVES} & {*edits})  # into the logits of the target, and no others
    for mode in modes:
        yield Step("sample", mode, edits=edits)
    for mode in modes if any(each.rule != "match" for each in verifications) and not writes else ():
        yield Step("draft", mode, edits=edits)
    for each in verifications:
        if "watermark" in edits and each.rule != "match":
            continue
        for mode in modes:
            yield Step("verify", verifying(mode, each.rule, each.drafts), each.width, edits)
        of_logits = writes or {MASK, "watermark", *with_call} & {*edits}
        if each.drafts in ("one_hot", "probabilities") and not of_logits:
            mode = verifying(probabilities_mode(modes[0].vocab_size), each.rule, each.drafts)
            yield Step("verify", mode, each.width, edits)
    for mode in modes if probabilities and not writes else ():
        yield Step("probabilities", mode, edits=edits)


def described(
    runs: Sequence[tuple[Step, Any]], layouts: Mapping[str, BufferSpec], bound: Tensor | None, tables: tuple[Any, ...]
) -> tuple[Any, ...]:
    """What decides which stages some runs of steps need; its ``repr`` is the same in every process.

    Args:
        runs: steps, each with what distinguishes the batch.
        layouts: of the inputs of all steps, by name.
        bound: logits that are read in place; None for none.
        tables: their sizes, which stages are compiled for.
    """
    shapes = sorted((name, spec.shape, spec.dtype) for name, spec in layouts.items())
    return runs, shapes, None if bound is None else (bound.shape, bound.stride()), tables


def padding(inputs: Mapping[str, BufferSpec], size: int, rows: int, device: torch.device) -> dict[str, Tensor]:
    """Inputs of a step for ``size`` entries that are all padding, with ``rows`` rows of logits."""
    made = {}
    for name, spec in inputs.items():
        count = rows if name in ("logits", MASK) or name.startswith(GIVEN) else size * spec.times
        made[name] = torch.full((count, *spec.shape), spec.fill, dtype=spec.dtype, device=device)
    return made
