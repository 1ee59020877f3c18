"""Fixtures of caches, of the recorded backend and of a real device."""

from collections.abc import Callable, Iterator

import pytest
import torch

from graph_cache import GraphCache
from tests.graph_cache.recorded import RecordingBackend, Spied, cache_of


@pytest.fixture
def spied() -> Spied:
    return Spied()


@pytest.fixture
def backend() -> RecordingBackend:
    return RecordingBackend()


@pytest.fixture
def cache(spied: Spied, backend: RecordingBackend) -> GraphCache:
    """Recorded in all buckets; tests of a real device have their own."""
    made = cache_of(spied, backend)
    made.warmup()
    return made


@pytest.fixture
def no_sync() -> Iterator[Callable[[str], None]]:
    """Sets how a wait for the device is met, and sets it back."""
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")
