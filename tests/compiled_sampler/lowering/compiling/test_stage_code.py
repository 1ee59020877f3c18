"""The code of a stage: what it depends on, and the error where an outer capture would have to compile it."""

import inspect
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from compiled_sampler import Sampler, SamplingParams, Verification
from compiled_sampler.core.stage import call
from compiled_sampler.lowering.compiled_stages import EXACT_OPTIONS
from compiled_sampler.lowering.compiling.stage_code import StageCode
from compiled_sampler.passes.maxima import order_maxima
from tests.builders.edits import OF_EDIT


def test_the_error_inside_a_capture_names_all_that_a_warm_up_can_be_told():
    code = StageCode(order_maxima, (), {}, 1, torch.device("cuda"), ())
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        pytest.raises(RuntimeError, match="order_maxima was not compiled for such a call before the capture") as caught,
    ):
        code.check_not_capturing()
    named = {*re.findall(r"\w+", str(caught.value))}
    steps = {"verifications", "probabilities", "captured_edits", "captured_logprobs", "max_num_requests"}
    assert steps <= named & {*inspect.signature(Sampler).parameters}
    assert "logits" in named & {*inspect.signature(Sampler.bind).parameters}


V, ROWS, WIDTH = 129, 3, 2
EVERY_EDIT = {name: value for given in OF_EDIT.values() for name, value in given.items()} | {"watermark_tokens": 2}
LAWS = [{"temperature": 0.0}, {}, {"top_p": 0.9}, EVERY_EDIT]


def places_of(max_num_requests: int, buckets: list[int]) -> set[Path]:
    """Where the stages are kept that a sampler calls in draws, drafts and verifications."""
    ways = [Verification("rejection", WIDTH, "cache"), Verification("match", WIDTH)]
    options = {"history_len": 48, "draft_cache_len": WIDTH, "verifications": ways, "buckets": buckets}
    sampler, places = Sampler(V, max_num_requests, backend="eager", **options), set[Path]()

    def noted(stage: Any, /, *tensors: Any, **static: Any) -> Any:
        place = StageCode.of(stage, tensors, static).path(EXACT_OPTIONS)
        assert place is not None
        places.add(place)
        return call(stage, *tensors, **static)

    noted.fuses = True  # type: ignore[attr-defined]
    sampler._runner._executor._run = noted
    positions, noise = torch.full((ROWS,), 2), torch.Generator().manual_seed(1)
    for law in LAWS:
        slot = sampler.add_request(SamplingParams(seed=1, **law), [1, 2])
        slots = [slot, -1, -1]
        sampler.sample(sampler.plan(slots), torch.randn(ROWS, V, generator=noise), positions)
        plan = sampler.plan(slots, num_drafts=[WIDTH, 0, 0])
        drafts = torch.randint(V, (ROWS, WIDTH), generator=noise)
        sampler.verify(plan, torch.randn(WIDTH + ROWS, V, generator=noise), drafts, positions, "match")
        if "watermark_tokens" not in law:  # whose drafts have other noise
            drafts = [
                sampler.draft(sampler.plan(slots), torch.randn(ROWS, V), positions, offset=n, coupled=False)
                for n in (0, 1)
            ]
            sampler.verify(plan, torch.randn(WIDTH + ROWS, V, generator=noise), drafts, positions, "rejection")
        sampler.remove_request(slot)
    return places


def test_no_stage_depends_on_how_many_requests_a_sampler_holds_nor_on_its_buckets():
    places = places_of(5, [4])
    assert len(places) > 40
    assert places_of(1, [1]) == places
    assert places_of(300, [1, 8, 256]) == places
