"""Parts of a question, or of what is compiled before the first, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from queue import Queue
from typing import TypeVar

import torch

T = TypeVar("T")

MANY_PROCESSORS = 8
"""From so many on, work is dealt to processes even where there is little: each compiles a part of what is needed."""


def has_many_processors() -> bool:
    """Whether processes are worth their start."""
    return (os.cpu_count() or 1) >= MANY_PROCESSORS


def threads_of_a_process(workers: int) -> int:
    """Threads of torch in each of so many processes; one number on a large machine, since C++ is compiled for it."""
    return max(1, (os.cpu_count() or 1) // (MANY_PROCESSORS if has_many_processors() else workers))


def in_processes(parts: Sequence[Callable[[], Iterable[T]]]) -> Iterator[T]:
    """What all parts yield, as it comes; at most one process for each processor.

    Args:
        parts: functions that can be pickled; the processors are shared out evenly among them.

    Raises:
        Exception: what a part raised, after the others have ended.
    """
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(len(parts), os.cpu_count() or 1))
    threads = threads_of_a_process(workers)
    with context.Manager() as manager, ProcessPoolExecutor(workers, context) as pool:
        made = manager.Queue()
        running = [pool.submit(_hand_over, made, threads, part) for part in parts]
        for each in running:
            each.add_done_callback(lambda _: made.put(None))
        for _ in running:
            yield from iter(made.get, None)
        for each in running:
            each.result()


def _hand_over(made: Queue[T | None], threads: int, part: Callable[[], Iterable[T]]) -> None:
    torch.set_num_threads(threads)
    for each in part():
        made.put(each)
