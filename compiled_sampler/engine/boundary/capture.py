"""What must not happen while the current stream of a CUDA device is being captured."""

from __future__ import annotations

from collections.abc import Callable

import torch


def check_not_capturing(device: torch.device, message: str) -> None:
    """Raise if the current stream of a CUDA device is being captured.

    Raises:
        RuntimeError: with ``message``.
    """
    if is_capturing(device):
        raise RuntimeError(message)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a CUDA device is being captured; false of a CPU."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def capture_check(device: torch.device) -> Callable[[], bool]:
    """A function like ``is_capturing`` of one device, for what every step asks: on CUDA no frame of ours runs."""
    return torch.cuda.is_current_stream_capturing if device.type == "cuda" else lambda: False
