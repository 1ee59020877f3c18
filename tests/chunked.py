"""Steps in chunks of a few rows, as a batch of many rows takes them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from compiled_sampler.batch import RequestRows
from compiled_sampler.pipeline import schedule, verify_rows
from compiled_sampler.speculation.row_layout import Starts, rows_of_requests


@contextmanager
def _schedules_with(**changed: Any) -> Iterator[None]:
    """Within, schedules are made anew, with other numbers."""
    schedule._resolved.cache_clear()
    try:
        with mock.patch.multiple(schedule, **changed):
            yield
    finally:
        schedule._resolved.cache_clear()


def chunks_of(rows: int) -> AbstractContextManager[None]:
    """Within, every schedule has chunks of at most so many rows."""
    return _schedules_with(chunk_rows=mock.Mock(return_value=rows))


def eager_scratch_of(nbytes: int) -> AbstractContextManager[None]:
    """Within, a chunk in eager torch has so many bytes of scratch."""
    return _schedules_with(EAGER_CHUNK_BYTES=nbytes)


@contextmanager
def request_chunks_of(rows: int, vocab_size: int) -> Iterator[list[int]]:
    """Within, edited copies have at most so many rows; the requests of each chunk of a verification."""
    sizes = list[int]()

    def noted(starts: Starts, drafts: Tensor, *given: Tensor | None) -> RequestRows:
        sizes.append(len(drafts))
        return rows_of_requests(starts, drafts, *given)

    with (
        _schedules_with(EDITED_BYTES=4 * vocab_size * rows),
        mock.patch.object(verify_rows, "rows_of_requests", noted),
    ):
        yield sizes
