"""Two chains of stages side by side, each on a stream of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def on_two_streams(device: torch.device, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
    """What two chains return, as a pair; a CUDA graph that records them lets them overlap.

    Args:
        device: a GPU.
        first: runs on another stream, behind what the current one has to do.
        second: runs on the current stream, which afterwards waits for the other.
    """
    here = torch.cuda.current_stream(device)
    aside = _second_stream(device, here.cuda_stream)
    aside.wait_stream(here)
    try:
        with torch.cuda.stream(aside):
            made = first()
        results = made, second()
    finally:
        here.wait_stream(aside)
    if not torch.cuda.is_current_stream_capturing():  # a graph's memory is its own
        tree_map_only(Tensor, lambda each: each.record_stream(here), made)
    return results


@functools.cache
def _second_stream(device: torch.device, stream: int) -> torch.cuda.Stream:
    """Another for each stream, so that no call meets the memory of one that is not ordered with it."""
    second: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return second
