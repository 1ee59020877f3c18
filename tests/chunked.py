"""Steps in chunks of a few rows, as a batch of many rows takes them."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

from compiled_sampler.batch import RequestRows
from compiled_sampler.pipeline import schedule, verify_chunks
from compiled_sampler.speculation.row_layout import Starts, rows_of_requests


@contextmanager
def chunks_of(rows: int) -> Iterator[None]:
    """Within, every schedule has chunks of at most so many rows."""
    schedule._resolved.cache_clear()
    try:
        with mock.patch.object(schedule, "chunk_rows", return_value=rows):
            yield
    finally:
        schedule._resolved.cache_clear()


@contextmanager
def eager_scratch_of(nbytes: int) -> Iterator[None]:
    """Within, a chunk in eager torch has so many bytes of scratch."""
    schedule._resolved.cache_clear()
    try:
        with mock.patch.object(schedule, "EAGER_CHUNK_BYTES", nbytes):
            yield
    finally:
        schedule._resolved.cache_clear()


@contextmanager
def request_chunks_of(rows: int, vocab_size: int) -> Iterator[list[int]]:
    """Within, edited copies have at most so many rows; the requests of each chunk of a verification."""
    sizes = list[int]()

    def noted(starts: Starts, drafts: Tensor, *given: Tensor | None) -> RequestRows:
        sizes.append(len(drafts))
        return rows_of_requests(starts, drafts, *given)

    schedule._resolved.cache_clear()
    try:
        with (
            mock.patch.object(schedule, "EDITED_BYTES", 4 * vocab_size * rows),
            mock.patch.object(verify_chunks, "rows_of_requests", noted),
        ):
            yield sizes
    finally:
        schedule._resolved.cache_clear()
