"""Steps in chunks of a few rows, as a batch of many rows takes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from compiled_sampler.pipeline.scheduling import schedule, scratch


@contextmanager
def chunks_of(rows: int) -> Iterator[None]:
    """Within, every schedule has chunks of at most so many rows."""
    schedule._resolved.cache_clear()
    try:
        with mock.patch.object(scratch, "chunk_rows", return_value=rows):
            yield
    finally:
        schedule._resolved.cache_clear()


@contextmanager
def edited_copies_of(rows: int, vocab_size: int) -> Iterator[None]:
    """Within, edited copies have at most so many rows."""
    schedule._resolved.cache_clear()
    try:
        with mock.patch.object(scratch, "EDITED_BYTES", 4 * vocab_size * rows):
            yield
    finally:
        schedule._resolved.cache_clear()
