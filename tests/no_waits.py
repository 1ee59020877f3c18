"""Code that must not wait for the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits() -> Iterator[None]:
    """Within, torch raises where the host would wait for the device; it is on a GPU alone that it could."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
