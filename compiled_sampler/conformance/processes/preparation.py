"""What a target compiles before the first question: on a machine of many processors, side by side in processes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence

import torch

from compiled_sampler.conformance.bench import Bench
from compiled_sampler.conformance.processes.pool import has_many_processors, in_processes


def preparations(bench: Bench, names: Sequence[str]) -> list[Callable[[], object]]:
    """What is worth doing before questions of these names are asked; nothing on a machine of few processors.

    Args:
        bench: with the target; one without a name cannot be made in another process.
        names: of the questions.
    """
    found = getattr(bench.target, "preparations", None)
    if found is None or bench.name is None or not has_many_processors():
        return []
    parts: list[Callable[[], object]] = found(bench.device, names)
    return parts


def prepared(parts: Sequence[Callable[[], object]]) -> tuple[int, str]:
    """How many parts were done, and the first error, in words: what is not prepared is compiled when it is needed."""
    done, error = 0, ""
    try:
        for each in in_processes([functools.partial(_tried, torch.get_num_threads(), part) for part in parts]):
            done, error = done + (each == ""), error or each
    except Exception as ended:  # a process that was killed, or a part that cannot be sent to one
        error = error or in_words(ended)
    return done, error


def _tried(threads: int, part: Callable[[], object]) -> Iterator[str]:
    """What a part raised, in words; in a process of its own, one of as many as there are processors."""
    torch.set_num_threads(threads)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else each starts as many processes more
    try:
        part()
    except Exception as error:
        yield in_words(error)
    else:
        yield ""


def in_words(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {error}"
