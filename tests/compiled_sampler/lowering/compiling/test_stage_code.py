"""The error of a stage that an outer capture would have to compile."""

import inspect
import re
from unittest import mock

import pytest
import torch

from compiled_sampler import Sampler
from compiled_sampler.lowering.compiling.stage_code import StageCode
from compiled_sampler.passes.maxima import order_maxima


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
