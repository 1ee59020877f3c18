"""Results of steps with logprobs as one flat named tuple of tensors, which is what a graph cache takes and returns."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

from compiled_sampler.batch import SampleOutputs, VerifyOutputs
from compiled_sampler.logprobs import LogprobOutputs

_PREFIX = "logprobs_"
_FLAT: dict[type, Any] = {
    kind: namedtuple(f"Flat{kind.__name__}", [*kind._fields[:-1], *(_PREFIX + name for name in LogprobOutputs._fields)])
    for kind in (SampleOutputs, VerifyOutputs)
}
_NESTED: dict[type, Any] = {flat: kind for kind, flat in _FLAT.items()}


def flat(results: SampleOutputs | VerifyOutputs) -> Any:
    """Results with logprobs, whose last field is a tuple, as a flat named tuple; fields that are None stay None."""
    *fields, logprobs = results
    made: Any = _FLAT[type(results)](*fields, *(logprobs or ()))
    return made


def nested(results: Any) -> Any:
    """The results that ``flat`` was made of."""
    kind = _NESTED[type(results)]
    count = len(kind._fields) - 1
    return kind(*results[:count], LogprobOutputs(*results[count:]))


def run_flat(run: Callable[..., Any], tensors: dict[str, Any], rows: int, out: Any) -> Any:
    """The results of a batch of a step with logprobs by a ``run`` of flat ones, ``run(tensors, rows, out)``."""
    if out is None:
        return nested(run(tensors, rows, None))
    run(tensors, rows, flat(out))
    return out
