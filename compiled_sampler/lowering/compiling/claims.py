"""Which of several processes compiles a stage that they all need: one, and the others find it on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # else imported where a stage is compiled: it takes 15 ms
    from filelock import FileLock

PATIENCE = 300.0
"""Seconds to wait for another process; one stage takes a few."""


class CompiledElsewhere(Exception):
    """Another process is compiling the stage."""


@contextmanager
def claimed(path: Path | None, *, waits: bool) -> Iterator[None]:
    """Within, no other process compiles the stage that is kept at a place, unless this one takes very long.

    A process that ends lets go, however it ends. Where no file can be locked, none waits for another. Threads take the
    lock of ``versions`` before: one that held a claim and waited for that lock would be waited for by its holder.

    Args:
        path: of the stage; None where it is not kept, and each process compiles it for itself.
        waits: whether to wait for a process that compiles it, for ``PATIENCE`` at most.

    Raises:
        CompiledElsewhere: a process compiles it, and this one does not wait.
    """
    from filelock import Timeout

    lock = None if path is None else _lock_of(path)
    if lock is not None:
        try:
            lock.acquire(timeout=PATIENCE if waits else 0)
        except Timeout:
            if not waits:
                raise CompiledElsewhere(f"another process holds {lock.lock_file}") from None
        except (OSError, NotImplementedError, RuntimeError):  # not our folder, or a file system without locks
            lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _lock_of(path: Path) -> FileLock | None:
    """The lock of a stage: a file beside all stages, which stays; None where none can be made."""
    from filelock import FileLock

    folder = path.parents[1].with_name("compiled_sampler_locks")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return FileLock(folder / path.name, fallback_to_soft=False)  # what a soft lock of a dead host marks, stays
