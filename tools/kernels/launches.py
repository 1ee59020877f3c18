"""What the stages of a step launch: recorded while they run, or read off the code that is generated for them.

``recorded`` runs a step on its device with a recorder in the place of every kernel. ``generated`` stops each stage once
its code is written: no compiler runs, and Triton's code comes out without a GPU; ``for_a_gpu`` makes it that of a
GPU's stages. Both use Inductor's private parts
(``PyCodeCache.modules``, ``GraphLowering.save_output_code``), alike in torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from rich.table import Table
from torch import Tensor
from torch._inductor import config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.graph import GraphLowering
from torch.utils._pytree import tree_leaves

from compiled_sampler.core.stage import Run
from compiled_sampler.lowering import stage_code, tuning
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.lowering.stage_code import EXACT_OPTIONS
from compiled_sampler.pipeline import schedule
from compiled_sampler.pipeline.chunks import without_kernels
from tools.kernels.generated_code import Kernel, fallbacks, kernels, launches, moved_bytes
from tools.measuring import graph_time_us

FALLBACK, HAND_WRITTEN = "fallback", "hand-written"
BACKENDS: dict[str, dict[str, Any]] = {
    "cpp": {"cpp.simdlen": 1, "fx_graph_cache": False},  # scalar code is the same on every machine
    "triton": {"cpu_backend": "triton", "fx_graph_cache": False},
}
"""Inductor options by the language that ``generated`` asks for."""
_TIMED_LAUNCHES = 20

Step = Callable[[Run], object]
Known = dict[Any, str | None]


class Launch(NamedTuple):
    """A kernel of a stage, or what runs in the place of one."""

    stage: str
    name: str
    kind: str
    """Of ``Kernel``; ``FALLBACK`` is an operator called as it is, ``HAND_WRITTEN`` a stage that Inductor does not
    see, with as many launches as its tuning declares kernels."""
    launches: int = 1
    registers: int | None = None
    """A thread's; None without a compiled Triton kernel."""
    spills: int | None = None
    read_bytes: int | None = None
    """Of one launch, from the shapes of its arguments (``generated_code.moved_bytes``); None where nothing ran."""
    written_bytes: int | None = None
    us: float | None = None
    """Microseconds of one launch on a GPU, a graph node included; the L2 holds what fits."""


class Generated(NamedTuple):
    """One call of a stage, and the code generated for it."""

    stage: str
    code: str | None
    """None for a stage that Inductor does not see."""


class _Written(BaseException):
    """Carries code out of the compiler; Inductor wraps an ``Exception``."""


class _Recorder:
    """Stands for a kernel of a generated module: launches it, and notes the launch."""

    def __init__(self, launcher: Any, kernel: Kernel, note: Callable[[Kernel, Any, tuple[Any, ...]], None]) -> None:
        self._launcher, self._kernel, self._note = launcher, kernel, note

    def __call__(self, *arguments: Any) -> Any:
        """A kernel in C++."""
        self._note(self._kernel, None, arguments)
        return self._launcher(*arguments)

    def run(self, *arguments: Any, stream: Any) -> Any:
        """A kernel in Triton."""
        result = self._launcher.run(*arguments, stream=stream)
        self._note(self._kernel, self._launcher, arguments)
        return result


class _Watch(Run):
    """Compiles stages, and once ``recording``, notes what they launch."""

    def __init__(self) -> None:
        super().__init__(fuses=True)
        self.noted: list[Launch] = []
        self._stages = CompiledStages()
        self._stages.compiles_at_calls = True
        self._modules: dict[Any, list[ModuleType]] = {}
        self._stage = ""

    def __call__(self, stage: Any, /, *tensors: Any, **static: Any) -> Any:
        """Compile and run a stage."""
        before = len(PyCodeCache.modules)
        result = self._stages(stage, *tensors, **static)
        made = [module for module in PyCodeCache.modules[before:] if hasattr(module, "call")]
        self._modules.setdefault((stage, *static.items()), []).extend(made)
        return result

    def record(self, stage: Any, /, *tensors: Any, **static: Any) -> Any:
        """Run a stage that was compiled, inside ``recording``."""
        self._stage = stage.__name__
        modules = self._modules[stage, *static.items()]
        result = self._stages(stage, *tensors, **static)
        if not modules:
            us = _launch_us(lambda: self._stages(stage, *tensors, **static)) if _on_gpu(tensors) else None
            self.noted.append(_hand_written(self._stage, us))
        called = Counter[str]()
        for module in modules:
            called |= fallbacks(_code(module))  # compiled for several layouts: the most that any calls
        self.noted += [Launch(self._stage, name, FALLBACK, count) for name, count in called.items()]
        return result

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Put a recorder in the place of every kernel."""
        with contextlib.ExitStack() as stack:
            for module in (module for made in self._modules.values() for module in made):
                names = vars(module)
                recorders = {k.name: _Recorder(names[k.name], k, self._note) for k in kernels(_code(module))}
                stack.enter_context(mock.patch.dict(names, recorders))
            yield

    def _note(self, kernel: Kernel, launcher: Any, arguments: tuple[Any, ...]) -> None:
        registers = spills = us = None
        if launcher is not None:
            best = launcher.launchers[0]
            registers, spills = best.n_regs, best.n_spills
            us = _kernel_us(kernel, launcher, arguments)
        bytes_moved = moved_bytes(kernel, arguments)
        self.noted.append(Launch(self._stage, kernel.name, kernel.kind, 1, registers, spills, *bytes_moved, us))


def recorded(warm: Step, step: Step) -> list[Launch]:
    """Every kernel that a step launches, in the order of first launches.

    Args:
        warm: the step for the batch that stands for its class, which is compiled first as ``Sampler.warmup`` does.
        step: the step to record.
    """
    watch = _Watch()
    for each in (warm, step):
        each(watch)
    with watch.recording():
        step(Run(watch.record, fuses=True))
    return _counted(watch.noted)


def generated(step: Step, backend: str, known: Known | None = None) -> list[Generated]:
    """The code of every stage that a step runs, in order, for tensors on the CPU; results are eager torch's.

    Args:
        step: what to run.
        backend: "cpp" or "triton"; the latter needs Triton installed, and no GPU.
        known: what was generated before, for steps that share stages; it grows.
    """
    stages, found = CompiledStages({**EXACT_OPTIONS, **BACKENDS[backend]}), list[Generated]()
    stages.compiles_at_calls = True
    known = {} if known is None else known

    def run(stage: Any, /, *tensors: Any, **static: Any) -> Any:
        key = (backend, stage, *static.items(), *map(_layout, tree_leaves(tensors)))
        if key not in known:
            known[key] = None
            if not tuning.is_hand_written(stage):
                try:
                    stages(stage, *tensors, **static)
                except _Written as written:
                    known[key] = str(written)
        found.append(Generated(stage.__name__, known[key]))
        return without_kernels(stage, *tensors, **static)

    def stop(code: str) -> None:
        raise _Written(code)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(GraphLowering, "save_output_code", staticmethod(stop)))
        if backend == "triton":  # a hash for caches asks for a GPU's driver; nothing runs, with whatever libdevice
            stack.enter_context(mock.patch("torch.utils._triton.triton_hash_with_backend", return_value=""))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", ".*Triton's bundled libdevice", UserWarning)
        step(Run(run, fuses=True))
    return found


@contextlib.contextmanager
def for_a_gpu() -> Iterator[None]:
    """Steps follow a GPU's schedule on the CPU, and Inductor does not ask a GPU whether kernels may start early."""
    with contextlib.ExitStack() as stack:
        for module in (schedule, stage_code, tuning):
            stack.enter_context(mock.patch.object(module, "is_gpu", return_value=True))
        overlaps = staticmethod(lambda: config.triton.enable_pdl)
        stack.enter_context(mock.patch.object(TritonKernel, "_enable_pdl_codegen", overlaps))
        yield


def listed(found: list[Generated]) -> list[Launch]:
    """Every kernel of the generated code, as ``recorded`` lists them."""
    noted = []
    for stage, code in found:
        if code is None:
            noted.append(_hand_written(stage))
            continue
        kinds = {kernel.name: kernel.kind for kernel in kernels(code)}
        noted += [Launch(stage, name, kinds[name], count) for name, count in launches(code).items()]
        noted += [Launch(stage, name, FALLBACK, count) for name, count in fallbacks(code).items()]
    return _counted(noted)


def _hand_written(stage: str, us: float | None = None) -> Launch:
    """The kernels of a stage that Inductor does not see; ``us`` is that of all of them together."""
    num_kernels = {function.__name__: tuned.num_kernels for function, tuned in tuning.TUNING.items()}.get(stage, 1)
    return Launch(stage, stage, HAND_WRITTEN, num_kernels, us=us and us / num_kernels)


def _counted(noted: list[Launch]) -> list[Launch]:
    """Equal launches as one; of their times the first."""
    first: dict[Launch, Launch] = {}
    for each in noted:
        key = each._replace(us=None, launches=0)
        known = first.get(key)
        first[key] = each if known is None else known._replace(launches=known.launches + each.launches)
    return list(first.values())


def _kernel_us(kernel: Kernel, launcher: Any, arguments: tuple[Any, ...]) -> float:
    """Time a kernel on copies of what it writes, so that the step goes on as if nothing had run."""
    written = {i for i, name in enumerate(kernel.parameters) if "out_ptr" in name}
    copies = [value.clone() if i in written else value for i, value in enumerate(arguments)]
    return _launch_us(lambda: launcher.run(*copies, stream=torch.cuda.current_stream().cuda_stream))


def _launch_us(launch: Callable[[], object]) -> float:
    """Microseconds of one of many launches in a replayed graph."""
    us, _ = graph_time_us(lambda: [launch() for _ in range(_TIMED_LAUNCHES)])
    return us / _TIMED_LAUNCHES


def _layout(leaf: Tensor | None) -> Any:
    return leaf if leaf is None else (leaf.shape, leaf.stride(), leaf.dtype)


def _on_gpu(tensors: tuple[Any, ...]) -> bool:
    return any(isinstance(each, Tensor) and each.is_cuda for each in tensors)


def _code(module: ModuleType) -> str:
    return Path(str(module.__file__)).read_text()


def table_of(found: list[Launch], title: str) -> Table:
    """A row a kernel, in the order of launches, and the sums; an ATen fallback is red."""
    table = Table(title=title)
    table.add_column("stage", no_wrap=True)
    table.add_column("kernel", overflow="ellipsis", no_wrap=True, max_width=34)
    table.add_column("kind", no_wrap=True)
    for name in ("launches", "registers", "spills", "read", "written", "us each"):
        table.add_column(name, justify="right", no_wrap=True)
    stage = ""
    for each in found:
        numbers = (each.registers, each.spills, _size(each.read_bytes), _size(each.written_bytes), _us(each.us))
        cells = ("" if each.stage == stage else each.stage, each.name, each.kind, each.launches, *numbers)
        style = "red" if each.kind == FALLBACK else None
        table.add_row(*("" if cell is None else str(cell) for cell in cells), style=style)
        stage = each.stage
    sums = [sum((n or 0) * each.launches for n, each in zip(column, found, strict=True)) for column in _summed(found)]
    count = sum(each.launches for each in found)
    totals = [str(count), "", "", _size(int(sums[0])), _size(int(sums[1])), _us(sums[2] or None)]
    table.add_section()
    table.add_row("all", f"{sum(each.kind == FALLBACK for each in found)} fallbacks", "", *totals)
    return table


def _summed(found: list[Launch]) -> tuple[list[float | None], ...]:
    return ([each.read_bytes for each in found], [each.written_bytes for each in found], [each.us for each in found])


def _size(count: int | None) -> str:
    if not count:
        return ""
    return f"{count} B" if count < 10_000 else f"{count / 1e3:.0f} kB" if count < 1e7 else f"{count / 1e6:.1f} MB"


def _us(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}"
