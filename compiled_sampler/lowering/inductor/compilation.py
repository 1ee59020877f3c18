"""A stage compiled by Inductor: ahead of its first run, or, on an unknown torch, by public functions alone."""

from __future__ import annotations

import functools
import importlib
import os
import random
import subprocess
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compiled_sampler.exact.triton import LOCK
from compiled_sampler.lowering.inductor.versions import is_known, was_checked
from compiled_sampler.lowering.layouts import TABLES, TensorSpec

Options = dict[str, str | int | bool | Callable[..., Any]]

_ALIGNED_BYTES = 16  # as Inductor has it
_SLOTS_HINT = 256  # of every table, so that code does not depend on the sampler that needs it first


class Compiled(NamedTuple):
    """A compiled stage."""

    function: Callable[..., Any]
    """Of tensors; it does not look whether it was made for them."""
    serves: Callable[..., bool] = lambda *tensors: True
    """Whether it was made for tensors of such shapes."""

    @classmethod
    def ahead(cls, function: Any) -> Compiled:
        """What torch compiled without a run; it then looks at no shapes, which costs time in every step."""
        function.disable_guard_check()
        return cls(function, function.guard_check)


def compiled(stage: Callable[..., Any], tensors: tuple[Any, ...], hint: int, options: Options) -> Compiled:
    """A stage compiled for any number of rows of the class of ``hint``, for which Inductor tunes."""
    # The stage has its static arguments as defaults; tensors are the first arguments, on which it does not run.
    with LOCK, _unseeded():
        if not is_known():
            return _compiled_by_call(stage, tensors, options)
        return _compiled_ahead(stage, tensors, hint, options)


def _compiled_ahead(stage: Callable[..., Any], tensors: tuple[Any, ...], hint: int, options: Options) -> Compiled:
    """Compiled without a run; it can be stored."""
    # Torch compiles nothing ahead of a run where Inductor's caches are forbidden. Then those that it would use are
    # turned off, and what forbids them is lifted meanwhile: torch asks for it before it reads the options of a call.
    from torch._dynamo import config as dynamo_config
    from torch._inductor import config as inductor_config

    arguments = tuple(_any_rows(argument, hint_override=hint) for argument in _from_start(tensors))
    options = {**options, "guard_filter_fn": _is_about_sizes}
    with ExitStack() as settings:
        if not dynamo_config.enable_aot_compile:
            settings.enter_context(dynamo_config.patch(enable_aot_compile=True))
        if inductor_config.force_disable_caches:
            options["fx_graph_cache"] = False
            settings.enter_context(inductor_config.patch(force_disable_caches=False))
        stage = _told_of_tables(stage, tensors)
        function: Any = torch.compile(stage, fullgraph=True, dynamic=False, options=options)
        return Compiled.ahead(function.aot_compile((arguments, {})))


def _compiled_by_call(stage: Callable[..., Any], tensors: tuple[Any, ...], options: Options) -> Compiled:
    """Compiled by a call of it; torch itself looks whether its code fits."""
    from torch._inductor import list_options

    options = {name: options[name] for name in list_options() if name in options}  # those that this torch has
    options["guard_filter_fn"] = _is_about_sizes
    function: Any = torch.compile(stage, fullgraph=True, dynamic=False, options=options)
    # tables keep their number of slots, as this code is not kept for other samplers
    function(*(_any_rows(argument, fixed=TABLES) for argument in tensors))
    return Compiled(function)


@contextmanager
def _unseeded() -> Iterator[None]:
    """Within, ``random`` is seeded by chance; afterwards it is as it was."""
    # Torch names a graph that it cannot hash by random.random(): after equal seeds it would take one for another.
    state = random.getstate()
    random.seed()
    try:
        yield
    finally:
        random.setstate(state)


def _is_about_sizes(guards: Sequence[Any]) -> list[bool]:
    """Keep the guards on sizes; the key of ``CompiledStages`` holds the rest of a tensor."""
    # Others would recompile a warmed-up stage when the engine's grad mode, inference mode or default dtype differs.
    return [guard.guard_type == "SHAPE_ENV" for guard in guards]


def _any_rows(argument: Any, fixed: tuple[type[Any], ...] = (), **hint: int) -> Any:
    """Aliases of the tensors, marked as having any number of rows, and those of tables as having any of slots."""
    # fixed: what is left as it is
    from torch._dynamo import mark_dynamic

    if isinstance(argument, Tensor):
        alias = argument.detach()
        if argument.shape[0] > 1:
            mark_dynamic(alias, 0, **hint)
        return alias
    if isinstance(argument, tuple) and not isinstance(argument, fixed):
        hint = dict.fromkeys(hint, _SLOTS_HINT) if isinstance(argument, TABLES) else hint
        items = [_any_rows(item, fixed, **hint) for item in argument]
        return type(argument)(*items) if hasattr(argument, "_fields") else tuple(items)
    return argument


def _from_start(value: Any) -> Any:
    """Arguments like these inside nested tuples, in which an aligned column of a table begins where its memory does."""
    # Where a column begins may depend on the number of slots, and torch takes places that are equal by chance for one.
    if not isinstance(value, tuple):
        return value
    is_table = isinstance(value, TABLES)
    items = [_begun(item) if is_table else _from_start(item) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def _begun(column: Tensor) -> Tensor:
    spec = TensorSpec.of(column)
    is_aligned = spec.offset * column.itemsize % _ALIGNED_BYTES == 0
    return replace(spec, offset=0).made() if is_aligned else column


def _told_of_tables(stage: Callable[..., Any], tensors: tuple[Any, ...]) -> Callable[..., Any]:
    """A stage that is told which columns of its tables have as many slots, and that their strides are constants."""
    # Else each column has a size of its own, by which a kernel wraps and asserts the same index anew, and a stride that
    # is not known to be a multiple of 16 bytes.
    first: dict[int, tuple[int, ...]] = {}
    # of each its path, that of the first with as many slots, and its stride
    columns = tuple(
        (path, first.setdefault(column.shape[0], path), column.stride(0)) for path, column in _columns(tensors)
    )
    if not columns:
        return stage
    function: Any = stage
    told = types.FunctionType(_checked.__code__.replace(co_name=stage.__name__), function.__globals__, stage.__name__)
    # the stage without its static arguments, which torch can store by its name
    told.__kwdefaults__ = {"stage": function.__wrapped__, "static": function.__kwdefaults__, "columns": columns}
    return told


def _columns(value: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The columns of the tables inside nested tuples that have several slots, each behind its path."""
    if isinstance(value, tuple):
        for place, item in enumerate(value):
            if isinstance(value, TABLES) and item.shape[0] > 1:
                yield (*path, place), item
            elif not isinstance(value, TABLES):
                yield from _columns(item, (*path, place))


def _checked(
    *tensors: Any, stage: Callable[..., Any], static: dict[str, Any], columns: tuple[tuple[Any, ...], ...]
) -> Any:
    """The results of a stage; no names but these and builtins, as this runs in the module of the stage."""
    for path, like, stride in columns:
        column, other = tensors, tensors
        for place in path:
            column = column[place]
        for place in like:
            other = other[place]
        if column.shape[0] != other.shape[0] or column.stride(0) != stride:  # type: ignore[attr-defined]
            raise ValueError("a table must have columns of one size, with the strides that its stage is compiled for")
    return stage(*tensors, **static)


def set_up_compilers(device: torch.device) -> None:
    """Import what compiles, and let Triton keep its kernels where Inductor does."""
    with LOCK:
        import_compilers()
        set_up_triton(device)


def import_compilers() -> None:
    """Import what compiles, which takes a second or more, so that the first stage need not."""
    if is_known():
        for name in ("torch._dynamo", "torch._inductor.compile_fx"):
            importlib.import_module(name)


def set_up_triton(device: torch.device) -> None:
    """Let Triton assemble and keep hand-written kernels as Inductor does its own, from the first one on."""
    # Inductor asks for both by environment variables, but not before it needs them; kernels launched earlier would lie
    # in another directory, or be the work of another assembler, and the next process would compile them again. Worse,
    # Triton asks the assembler for its version once a process, and looks for all kernels under that: Inductor's own,
    # assembled by other processes, would not be found any more.
    if device.type == "cuda" and is_known():
        from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
        from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

        os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(device.index or 0))
        _set_triton_ptxas_path()


@functools.cache
def assembler_of_triton(device: torch.device) -> dict[str, str]:
    """The environment in which a new process assembles as Triton does in this one."""
    # Triton looks for kernels under the version of its assembler, which it asks for once: of its own where it compiled
    # before ``set_up_triton``, as in an engine with kernels of its own, and else of torch's.
    if device.type != "cuda" or torch.version.hip is not None or not is_known():
        return {}
    set_up_triton(device)  # before Triton is asked here
    with suppress(Exception):  # Triton's own matter; without it the first launches of this process compile again
        from triton.backends.nvidia import compiler

        major, minor = torch.cuda.get_device_capability(device)
        tool = compiler.get_ptxas(10 * major + minor).path
        if subprocess.check_output([tool, "--version"], text=True) != compiler.get_ptxas_version(10 * major + minor):
            return {"TRITON_PTXAS_PATH": str(Path(compiler.__file__).parent / "bin" / "ptxas")}
    return {}


def fake_results(stage: Callable[..., Any], tensors: tuple[Any, ...], static: dict[str, Any]) -> Any:
    """What a stage returns, as tensors with neither numbers nor memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        return stage(*tree_map_only(Tensor, mode.from_tensor, tensors), **static)


@contextmanager
def without_numbers() -> Iterator[Callable[[Tensor], Tensor]]:
    """Within, new tensors have neither numbers nor memory; yields a function that makes a usual one such a tensor."""
    # On an unknown torch all tensors are usual ones.
    if not was_checked():
        yield lambda tensor: tensor
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode.from_tensor


def reader_of_numbers(error: Exception) -> str:
    """The operator that needed the numbers of a tensor made ``without_numbers``; empty for an error of another kind."""
    if not was_checked():
        return ""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    needs_numbers = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
    return str(error.func) if needs_numbers else ""  # type: ignore[attr-defined]
