"""Compiled stages on disk: what one process compiled, the next loads in milliseconds, without tracing it again.

Files lie in Inductor's cache directory; where Inductor's caches are turned off, or torch is unknown, none is written or
read. A name is a hash of all that a compiled stage depends on, so that no file is ever out of date. Of several
processes that compile one stage, one does, and the others wait and find it.
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
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compiled_sampler.exact.triton import LOCK
from compiled_sampler.lowering.inductor.compilation import Compiled, Options
from compiled_sampler.lowering.inductor.versions import is_known

if TYPE_CHECKING:  # else imported where a stage is compiled: it takes 15 ms
    from filelock import FileLock

_PATIENCE = 300.0  # seconds to wait for another process; one stage takes a few

_BROKEN: tuple[type[Exception], ...] = (OSError, EOFError, pickle.PickleError, RuntimeError, ValueError, TypeError)
_BROKEN += (LookupError, AttributeError, ImportError, AssertionError)
"""What reading a damaged file, or one that this machine cannot use, may raise; and writing what cannot be written."""

_NO_STAGES = ("conformance", "integrations", "selfcheck")  # folders


def path_of(stage: Callable[..., Any], device: torch.device, options: Options, *key: Any) -> Path | None:
    """Where a stage compiled so is kept; None where it is not."""
    # One that is not defined at the top of a module may hold values of its own and is not kept. Options that are
    # functions must follow from the library's source. key is everything else that its code depends on, with a repr that
    # is the same in every process.
    if "<locals>" in stage.__qualname__:
        return None
    folder = cache_folder(options)
    if folder is None:
        return None
    from torch._inductor import config

    named = stage.__module__, stage.__qualname__, hash_of(Path(inspect.getfile(stage)))
    plain = sorted((name, value) for name, value in options.items() if not callable(value))
    settings = sorted(config.save_config_portable().items())  # of Inductor, all that its code depends on
    parts = (*named, key, _library(), _machine(device), plain, settings)
    name = hashlib.sha256(repr(parts).encode()).hexdigest()
    return folder / "compiled_sampler" / name[:2] / name


def cache_folder(options: dict[str, Any]) -> Path | None:
    """Inductor's cache directory; None where its caches are turned off, also by the options of one compilation."""
    if not is_known():
        return None
    import torch._inductor.config as config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    allowed = options.get("fx_graph_cache", config.fx_graph_cache)
    return Path(cache_dir()) if allowed and not config.force_disable_caches else None


def load(path: Path, scope: dict[str, Any]) -> Compiled | None:
    """The compiled stage of a file, in the scope of its module; None if there is none that this machine can use."""
    if not path.exists():
        return None
    from torch._inductor import config

    # Torch stores references to the classes of results by their names in scope, not the classes. The kernels lie on
    # disk: a pool of processes takes longer.
    with (
        contextlib.suppress(*_BROKEN),
        LOCK,
        _locks_elsewhere(path.parent),
        config.patch(compile_threads=1),
        path.open("rb") as file,
    ):
        return Compiled.ahead(torch.compiler.load_compiled_function(file, f_globals=scope))
    return None


def store(path: Path, compiled: Compiled) -> None:
    """Keep a compiled stage. A file appears whole, whichever process writes it; a full disk keeps nothing."""
    function: Any = compiled.function
    with contextlib.suppress(*_BROKEN):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder, LOCK, _no_triton_kernels():
            whole = Path(folder) / path.name
            function.save_compiled_function(str(whole))
            whole.replace(path)


@contextmanager
def _locks_elsewhere(folder: Path) -> Iterator[None]:
    """Within, Inductor locks what it loads in a temporary folder, if it must not write its cache."""
    if os.access(folder, os.W_OK):
        yield
        return
    from torch._inductor import codecache

    with tempfile.TemporaryDirectory() as locks:
        usual = codecache.get_lock_dir
        codecache.get_lock_dir = lambda: locks
        try:
            yield
        finally:
            codecache.get_lock_dir = usual


@contextmanager
def _no_triton_kernels() -> Iterator[None]:
    """Within, torch's table of the Triton kernels that were traced in this process is empty."""
    # Torch stores it with every compiled function and puts it over the table of the process that loads one, where the
    # numbers mean other kernels. No stage that is kept launches any.
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    with kernel_side_table.lock:
        held = kernel_side_table.id_to_kernel, kernel_side_table.constant_args
        kernel_side_table.id_to_kernel, kernel_side_table.constant_args = {}, {}
        try:
            yield
        finally:
            kernel_side_table.id_to_kernel, kernel_side_table.constant_args = held


@contextmanager
def claimed(path: Path | None) -> Iterator[None]:
    """Within, no other process compiles the stage that is kept at a place, unless this one takes very long."""
    # A process that ends lets go, however it ends. Where no file can be locked, none waits for another. Threads take
    # the lock of compilers before: one that held a claim and waited for that lock would be waited for by its holder.
    lock = None if path is None else _lock_of(path)
    if lock is not None:
        try:
            lock.acquire(timeout=_PATIENCE)
        except (OSError, NotImplementedError, RuntimeError):  # too long, not our folder, or a file system without locks
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


def library_hash(package: Path) -> str:
    """A hash of every Python source of a package, in subfolders too, but for those that no stage is made of."""
    sources = sorted(each for each in package.rglob("*.py") if each.relative_to(package).parts[0] not in _NO_STAGES)
    named = [(file.relative_to(package).as_posix(), hash_of(file)) for file in sources]
    return hashlib.sha256(repr(named).encode()).hexdigest()


@functools.cache
def hash_of(file: Path) -> str:
    """A hash of what a file held when it was asked for first."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


@functools.cache
def _library() -> str:
    """This library's source and what compiles it."""
    return repr((torch.__version__, sys.version, library_hash(Path(__file__).parents[2])))


def _machine(device: torch.device) -> str:
    """What Inductor asks of a machine: code for a CPU depends on its instructions and on the number of threads."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return repr((str(device), properties.name, properties.major, properties.minor))
    return repr((str(device), platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()))
