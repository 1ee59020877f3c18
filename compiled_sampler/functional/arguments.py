"""What the functions make of a caller's arguments: keywords, the rows, a mode, parameters as tensors."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from compiled_sampler.core.arithmetic import in_float64
from compiled_sampler.core.stage import Run
from compiled_sampler.engine.boundary.arguments import LOGITS_DTYPES, checked_draw_index
from compiled_sampler.engine.boundary.tensors import INTEGERS, RowFormat, check_logits, check_tensor
from compiled_sampler.engine.sampler import Sampler
from compiled_sampler.functional.row_table import RowInputs, RowTable, row_table
from compiled_sampler.modes import CAPACITIES, MAX_VOCAB_SIZE, TOP_P_BASES, Mode, mode_table, top_k_limits, uncovered
from compiled_sampler.params import SamplingParams
from compiled_sampler.scalars import as_int64, check_choice, checked_int
from compiled_sampler.shard import VocabularyShard, check_shard

FloatOrRows = float | Tensor
IntOrRows = int | Tensor
FLOATS = (torch.float32, torch.float64)
"""The dtypes of temperatures, top_p and min_p by row."""
_FILTERS = ("temperature", "top_k", "top_p", "min_p")


class Parameters(NamedTuple):
    """The parameters of all rows, or by row ``[R]``, as a caller passes them."""

    seeds: IntOrRows
    """int64 ``[R]``, or for a single row an int."""
    positions: IntOrRows
    """int64 or int32 ``[R]``, or an int for all rows."""
    temperature: FloatOrRows = 1.0
    """A number for all rows, or float32 or float64 ``[R]``, like top_p and min_p."""
    top_k: IntOrRows = 0
    """A number for all rows, or int64 or int32 ``[R]``."""
    top_p: FloatOrRows = 1.0
    min_p: FloatOrRows = 0.0


def checked_rows(logits: Tensor, vocab_size: int | None, name: str = "logits") -> tuple[Tensor, RowFormat]:
    """Logits ``[R, >=V]`` without a history of gradients, and their format."""
    check_tensor(name, logits, LOGITS_DTYPES, logits.device if isinstance(logits, Tensor) else torch.device("cpu"))
    if logits.dim() != 2:
        raise ValueError(f"{name} must be [R, >= V], got {list(logits.shape)}; unsqueeze(0) makes one row of [V]")
    size = logits.shape[1] if vocab_size is None else checked_int("vocab_size", vocab_size)
    if not 1 <= size <= min(logits.shape[1], MAX_VOCAB_SIZE):
        raise ValueError(
            f"vocab_size must be in [1, {min(logits.shape[1], MAX_VOCAB_SIZE)}] for {name} {list(logits.shape)}, got "
            f"{size}; None takes all columns"
        )
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"{name} must have column stride 1, got strides {logits.stride()}; call .contiguous()")
    return logits.detach(), RowFormat(size, logits.dtype, logits.device)


def shard_rows(logits: Tensor, vocab_size: int | None, shard: VocabularyShard) -> tuple[Tensor, RowFormat]:
    """Logits ``[R, >= width]`` of a shard, and the format of whole rows."""
    check_shard(shard, 0 if vocab_size is None else checked_int("vocab_size", vocab_size))
    size = shard.size if vocab_size is None else int(vocab_size)
    if not 1 <= size <= MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be in [1, {MAX_VOCAB_SIZE}], got {size}; count the tokens of the model")
    form = RowFormat(size, logits.dtype, logits.device) if isinstance(logits, Tensor) else None
    if form is None or form.dtype not in LOGITS_DTYPES:
        return checked_rows(logits, None)  # raises
    check_logits(logits, None, form._replace(vocab_size=shard.width(size)))
    return logits.detach(), form


def chosen_mode(name: str | None, vocab_size: int, top_p_base: str, parameters: Parameters) -> Mode:
    """The mode of a call, from its numbers alone."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"mode must be the name of a mode, got {name!r}; None chooses")
    check_choice("top_p_base", top_p_base, TOP_P_BASES, "'top_k' is what most engines do")
    numbers = {
        field: value for field, value in zip(_FILTERS, parameters[2:], strict=True) if not isinstance(value, Tensor)
    }
    checked = SamplingParams(**numbers)  # type: ignore[arg-type]
    filters: Any = tuple(getattr(checked, field) if field in numbers else None for field in _FILTERS)
    return mode_of(name, filters, vocab_size, top_p_base)


def parameter_rows(
    mode: Mode, parameters: Parameters, count: int, device: torch.device, run: Run
) -> tuple[RowTable, Tensor]:
    """The slot table of the R rows of a call, and their positions, int64 ``[R]``."""
    inputs = RowInputs(
        temperature=float_rows("temperature", parameters.temperature, count, device, run),
        top_k=integer_rows("top_k", parameters.top_k, count, device),
        top_p=float_rows("top_p", parameters.top_p, count, device, run),
        min_p=float_rows("min_p", parameters.min_p, count, device, run),
        seeds=_seeds(parameters.seeds, count, device),
        positions=integer_rows("positions", parameters.positions, count, device),
    )
    way = {"filters_min_p": mode.filters_min_p, "capacity": mode.capacity, "beyond_candidates": mode.beyond_candidates}
    return run(row_table, inputs, vocab_size=mode.vocab_size, draws=mode.draws, **way), inputs.positions


def check_row_tensor(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], count: int, device: torch.device
) -> None:
    """Raise unless a tensor has one number a row, on the device of the logits."""
    check_tensor(name, tensor, dtypes, device)
    if tensor.shape != (count,):
        raise ValueError(f"{name} must be [{count}], one a row, got {list(tensor.shape)}; a Python number serves all")


def float_rows(name: str, value: FloatOrRows, count: int, device: torch.device, run: Run) -> Tensor:
    """Numbers as float64 ``[count]``: one for all rows, or a tensor of them, whose values are not looked at."""
    if not isinstance(value, Tensor):
        return torch.full((count,), float(value), dtype=torch.float64, device=device)
    check_row_tensor(name, value, FLOATS, count, device)
    return value.detach() if value.dtype is torch.float64 else run(in_float64, value.detach())


def integer_rows(name: str, value: IntOrRows, count: int, device: torch.device) -> Tensor:
    """Integers >= 0 as int64 ``[count]``: one for all rows, or a tensor of them, whose values are not looked at."""
    if isinstance(value, Tensor):
        check_row_tensor(name, value, INTEGERS, count, device)
        return value.to(torch.int64)
    number = checked_int(name, value, "pass a Python int, or an int64 tensor with one a row")
    if number < 0 or (name != "top_k" and number >= 2**63):
        raise ValueError(f"{name} must be in [0, 2**63), got {number}; an int64 on the device holds it")
    return torch.full((count,), min(number, 2**63 - 1), dtype=torch.int64, device=device)


def draw_index_rows(value: IntOrRows, count: int, device: torch.device) -> Tensor | None:
    """The draw index of each row, int64 ``[count]``; None for the number 0."""
    if isinstance(value, Tensor) or checked_draw_index(value):
        return integer_rows("draw_index", value, count, device)
    return None


def _seeds(seeds: IntOrRows, count: int, device: torch.device) -> Tensor:
    if isinstance(seeds, Tensor):
        check_row_tensor("seeds", seeds, (torch.int64,), count, device)
        return seeds
    number = checked_int("seeds", seeds, "pass an int64 tensor with one a row")
    if count != 1:
        raise ValueError(
            f"seeds must be a tensor [{count}], one a row, got the number {number}; rows of one seed and one position "
            "would meet the same noise"
        )
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"seeds must be in [-2**63, 2**64), got {number}; take it modulo 2**64")
    return torch.full((1,), as_int64(number), dtype=torch.int64, device=device)


_MOST_CHOICES = 4096

Filters = tuple[float | None, int | None, float | None, float | None]
"""Temperature, top_k, top_p and min_p of all rows; None for one that differs by row and is on the device."""


@lru_cache(_MOST_CHOICES)
def mode_of(name: str | None, filters: Filters, vocab_size: int, top_p_base: str) -> Mode:
    """The mode of a name, or the cheapest that covers every row that there can be."""
    table, possible = mode_table(vocab_size, top_p_base), _possible_rows(filters, vocab_size)
    if name is None:
        return next(mode for mode in table if not any(uncovered(mode, params) for params in possible))
    check_choice("mode", name, [mode.name for mode in table], "None chooses")
    named = next(mode for mode in table if mode.name == name)
    reason = None if None in filters else uncovered(named, possible[0])
    if reason is not None:
        raise ValueError(f"mode {name!r} must cover the parameters, but {reason}; None chooses one that does")
    return named


def _possible_rows(filters: Filters, vocab_size: int) -> list[SamplingParams]:
    """Rows with the numbers of a call, and on each side of the limits of ``uncovered`` with what is on the device."""
    temperature, top_k, top_p, min_p = filters
    choices = itertools.product(
        (1.0,) if temperature is None else (temperature,),
        top_k_limits(vocab_size, CAPACITIES) if top_k is None else (top_k,),
        (0.5, 1.0) if top_p is None else (top_p,),
        (0.5,) if min_p is None else (min_p,),
    )
    return [SamplingParams(heat, k, p, least, seed=0) for heat, k, p, least in choices]


Arguments = ParamSpec("Arguments")
Results = TypeVar("Results")

_OF_REQUESTS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_OF_CALLS = frozenset(
    name for method in (Sampler.sample, Sampler.verify) for name in inspect.signature(method).parameters
)
_OF_SAMPLERS = frozenset(inspect.signature(Sampler).parameters)


def known_keywords(function: Callable[Arguments, Results]) -> Callable[Arguments, Results]:
    """The function, which names the way out of a keyword that it does not have, with the same signature."""
    names = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: Arguments.args, **keywords: Arguments.kwargs) -> Results:
        if not keywords.keys() <= names:
            unknown = next(name for name in keywords if name not in names)
            raise TypeError(
                f"{function.__name__}() must get keywords of its own, got {unknown!r}; {_way_out(unknown, names)}"
            )
        return function(*args, **keywords)

    return checked


def _way_out(name: str, names: frozenset[str]) -> str:
    """Where a keyword is to be had."""
    if f"{name}s" in names:
        return f"{name}s=... has one a row"
    if name in _OF_REQUESTS:
        return f"a request of a Sampler has it: add_request(SamplingParams({name}=...))"
    if name in _OF_CALLS:
        return f"a call of a Sampler has it: sample or verify(plan, ..., {name}=...)"
    if name in _OF_SAMPLERS:
        return f"a Sampler has it: Sampler({name}=...)"
    return f"these are: {', '.join(sorted(names))}"
