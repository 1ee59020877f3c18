"""What must not happen while the current stream of a CUDA device is being captured."""

from __future__ import annotations

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
