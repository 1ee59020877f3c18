"""Known edits: a stage that edits nothing is found, whichever it is, and nothing of the sampler is written."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from compiled_sampler import Sampler, Verification
from compiled_sampler.core.order import row_logits
from compiled_sampler.edits import custom, dry, lists, masks, stops, watermark, written
from compiled_sampler.edits.recording import DrawEnds
from compiled_sampler.lowering import compiled_stages
from compiled_sampler.lowering.compiling.stage_code import StageCode
from compiled_sampler.lowering.known_answers import VARIABLE
from compiled_sampler.passes.row_filters import deviation, mass_filters, typical
from tests.builders import custom_edits, edit_states

L, ABOVE_ALL = 40, 2**63 - 1
USERS = {**custom_edits.EDITS, **edit_states.EDITS}


def nothing_written(*tensors: Any, **static: Any) -> None:
    """What a stage does that writes nothing and returns nothing."""


def status_alone(*tensors: Any) -> Tensor:
    """The status, as a stage gets it that records tokens."""
    return tensors[-1]


def ends_alone(*tensors: Any) -> DrawEnds:
    """The status, and what ends requests, of a stage that records no draw."""
    *_, token_ids, status, lists = tensors
    return DrawEnds(status, stops.are_ends(token_ids, status, tensors[2], lists))


def logits_alone(logits: Tensor, *rest: Any, vocab_size: int, **static: Any) -> Tensor:
    """The logits, as a stage gets them that edits rows."""
    return row_logits(logits, vocab_size).clone()


def logits_of(stage: Callable[..., tuple[Tensor, Tensor]], x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The tokens that a stage writes, with the logits that they have."""
    ids, _ = stage(x, *rest)
    return ids, x.gather(1, ids)


def without_entries(stage: Callable[..., Any], *tensors: Any) -> Any:
    """What a stage makes where no token ends a request."""
    return stage(*tensors[:-1], tensors[-1]._replace(counts=torch.zeros_like(tensors[-1].counts)))


class Idle(NamedTuple):
    """A stage of an edit, and what it would do if it did nothing."""

    edits: tuple[str, ...]
    stage: Callable[..., Any]
    idle: Callable[..., Any]


ROWS = {"vocab_size": 0}
IDLE = (
    Idle(("token_bitmask",), masks.masked, logits_alone),
    Idle(("allowed_token_ids",), masks.masked, logits_alone),
    Idle(("logit_bias",), written.write_biases, nothing_written),
    Idle(("min_tokens",), lists.without_stops, partial(logits_of, lists.without_stops)),
    Idle(("penalties",), written.write_penalties, nothing_written),
    Idle(("penalties",), written.record_draws, ends_alone),
    Idle(("penalties",), written.record_draws, partial(without_entries, written.record_draws)),
    Idle(("penalties",), written.record_drafts, nothing_written),
    Idle(("penalties",), written.record_ends, status_alone),
    Idle(("dry",), dry.without_repetitions, partial(logits_of, dry.without_repetitions)),
    Idle(("bad_words",), lists.without_bad_words, partial(logits_of, lists.without_bad_words)),
    Idle(("watermark",), watermark.noise_positions, lambda slots, positions, *tables: positions.clone()),
    Idle(("stops",), stops.with_finished, partial(without_entries, stops.with_finished)),
    Idle(("stops",), stops.cut_at_stop, partial(without_entries, stops.cut_at_stop)),
    Idle(
        ("top_n_sigma",),
        deviation.longest_kept,
        lambda sums, row_max, *rest: torch.full_like(row_max, torch.inf),
    ),
    Idle(("top_n_sigma",), deviation.within_distance, logits_alone),
    Idle(
        ("p_less",),
        mass_filters.p_less_cut,
        lambda sums, row_max, *rest: torch.zeros_like(row_max, dtype=torch.int64),
    ),
    Idle(("p_less",), mass_filters.without_light, logits_alone),
    Idle(("typical_p",), typical.with_digit, lambda search, masses: search),
    Idle(("typical_p",), typical.within_typical, logits_alone),
    Idle(
        ("xtc",),
        mass_filters.top_choice_mass,
        lambda sums, row_max, *rest: torch.full_like(row_max, ABOVE_ALL, dtype=torch.int64),
    ),
    Idle(("xtc",), mass_filters.without_first, logits_alone),
    *(Idle((name,), custom.customized, logits_alone) for name in USERS),
)
ALL = (*dict.fromkeys(name for each in IDLE for name in each.edits),)
"""All edits in one batch, which a stage of each meets too."""


def warmed(
    monkeypatch: pytest.MonkeyPatch,
    edits: Sequence[str],
    idle: Idle | None,
    vocab_size: int = 129,
    slots: int = 5,
) -> dict[str, str]:
    """Stages that a warm-up finds to differ, where one is idle and all others are those of eager torch."""

    def found(self: compiled_stages.CompiledStages, code: StageCode) -> Callable[..., Any]:
        is_idle = idle is not None and code.stage is idle.stage
        return partial(idle.idle if idle is not None and is_idle else code.stage, **code.static)

    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(compiled_stages.CompiledStages, "_find", found)
    monkeypatch.setattr(compiled_stages.CompiledStages, "are_on_disk", lambda *_: True)
    sampler = Sampler(
        vocab_size,
        slots,
        backend="compiled",
        history_len=L,
        captured_edits=[edits],
        verifications=[Verification("match", 3)],
        edits=[USERS[name] for name in edits if name in USERS],
        buckets=[slots],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", compiled_stages.StageWarning)
        sampler.warmup(modes=["no_filter"])
    status = sampler.statistics().lowering
    assert status is not None
    return dict(status.eager_stages)


@pytest.mark.parametrize("slots", [1, 2, 16])
@pytest.mark.parametrize("idle", IDLE, ids=lambda each: f"{each.edits[0]}-{each.stage.__name__}")
def test_a_stage_that_does_nothing_for_its_edit_is_found(monkeypatch, idle, slots):
    assert [*warmed(monkeypatch, idle.edits, idle, slots=slots)] == [idle.stage.__name__]
