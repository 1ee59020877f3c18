"""Compiled stages on disk: what one process compiled, the next loads in milliseconds, without tracing it again.

Files lie in Inductor's cache directory; where Inductor's caches are turned off, none is written or read. A name is a
hash of all that a compiled stage depends on, so that no file is ever out of date.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import pickle
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir
from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

Compiled = Any
"""A callable with the stage's arguments, of ``torch.compile(...).aot_compile``."""

_BROKEN: tuple[type[Exception], ...] = (OSError, EOFError, pickle.PickleError, RuntimeError, ValueError, TypeError)
_BROKEN += (LookupError, AttributeError, ImportError, AssertionError)
"""What reading a damaged file, or one that this machine cannot use, may raise; and writing what cannot be written."""


def path_of(stage: Callable[..., Any], device: torch.device, options: dict[str, Any], *key: Any) -> Path | None:
    """Where a stage compiled so is kept; None where it is not.

    Args:
        stage: a function; one that is not defined at the top of a module may hold values of its own and is not kept.
        device: that it is compiled for.
        options: of Inductor; those that are functions must follow from the library's source.
        key: everything else that its code depends on, with a ``repr`` that is the same in every process.
    """
    allowed = options.get("fx_graph_cache", inductor_config.fx_graph_cache)
    if not allowed or inductor_config.force_disable_caches or "<locals>" in stage.__qualname__:
        return None
    plain = sorted((name, value) for name, value in options.items() if not callable(value))
    settings = sorted(inductor_config.save_config_portable().items())
    source = _hash_of(Path(inspect.getfile(stage)))
    parts = (stage.__module__, stage.__qualname__, source, _LIBRARY, _machine(device), plain, settings, key)
    name = hashlib.sha256(repr(parts).encode()).hexdigest()
    return Path(cache_dir()) / "compiled_sampler" / name[:2] / name


def load(path: Path) -> Compiled | None:
    """The compiled stage of a file; None if there is none, or none of use."""
    with contextlib.suppress(*_BROKEN), path.open("rb") as file:
        return torch.compiler.load_compiled_function(file)
    return None


def store(path: Path, compiled: Compiled) -> None:
    """Keep a compiled stage. A file appears whole, whichever process writes it; a full disk keeps nothing."""
    with contextlib.suppress(*_BROKEN), _no_triton_kernels():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = Path(folder) / path.name
            compiled.save_compiled_function(str(whole))
            whole.replace(path)


def set_up_triton(device: torch.device) -> None:
    """Let Triton assemble and keep hand-written kernels as Inductor does its own, from the first one on.

    Inductor asks for both by environment variables, but not before it needs them; kernels launched earlier would lie in
    another directory, or be the work of another assembler, and the next process would compile them again.
    """
    if device.type == "cuda":
        os.environ.setdefault("TRITON_CACHE_DIR", triton_cache_dir(device.index or 0))
        _set_triton_ptxas_path()


@contextlib.contextmanager
def _no_triton_kernels() -> Iterator[None]:
    """Within, torch's table of the Triton kernels that were traced in this process is empty.

    Torch stores it with every compiled function and puts it over the table of the process that loads one, where the
    numbers mean other kernels. No stage that is kept launches any.
    """
    with kernel_side_table.lock:
        held = kernel_side_table.id_to_kernel, kernel_side_table.constant_args
        kernel_side_table.id_to_kernel, kernel_side_table.constant_args = {}, {}
        try:
            yield
        finally:
            kernel_side_table.id_to_kernel, kernel_side_table.constant_args = held


@functools.cache
def _hash_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


_LIBRARY = repr(
    (torch.__version__, sys.version, [_hash_of(file) for file in sorted(Path(__file__).parents[1].rglob("*.py"))])
)
"""This library's source, when it was imported, and what compiles it."""


def _machine(device: torch.device) -> str:
    """What Inductor asks of a machine: code for a CPU depends on its instructions and on the number of threads."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return repr((str(device), properties.name, properties.major, properties.minor))
    return repr((str(device), platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()))
