"""What Inductor's output source says: its kernels, how often each is launched, and what is left to ATen.

Pure functions of the text of one compiled stage, as ``TORCH_LOGS=output_code`` prints it, in C++ or in Triton; only
what both torch 2.11 and the newest write is relied on.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

_DEFINITION = re.compile(r"^(\w+) = async_compile\.(triton|cpp_pybinding)\(.*?'''(.*?)'''", re.M | re.S)
_EARLY = re.compile(r"'launch_pdl': True")
_WAITS = re.compile(r"^def \w+\((?:(?!tl\.(?:load|store)\().)*?\.gdc_wait\(\)", re.M | re.S)
_WAITS_FOR_TILES = re.compile(r"^def \w+\((?:(?!tl\.store\(|tl\.load\([^\n]*\br0_).)*?\.gdc_wait\(\)", re.M | re.S)
_CALLS = re.compile(
    r"^(?:def (?:call|partition_\d+)\(|class Runner\b).*?(?=^def \w+_args\(|^def benchmark_|\Z)", re.M | re.S
)
_KINDS = {"poi": "pointwise", "red": "reduction", "per": "persistent reduction"}
_COMMENT = re.compile(r"^\s*#.*$", re.M)
_FALLBACK = re.compile(r"(?<![\w.])((?:extern_kernels|torch\.ops|aten|inductor_ops|_quantized)\.[\w.]+)\(")


class Kernel(NamedTuple):
    """One kernel of a compiled stage."""

    name: str
    kind: str
    """"pointwise", "reduction", "persistent reduction" (a row of it in registers) ..., or "cpp"."""
    parameters: tuple[str, ...]
    """Names in the order of a launch; pointers are in_ptr0, out_ptr0, in_out_ptr0 and so on."""
    loads: dict[str, int]
    """Load instructions by pointer; none where the source is C++."""
    numels: dict[str, int]
    """Sizes of the iteration space that the source fixes."""


def kernels(code: str) -> list[Kernel]:
    """The kernels that an output source defines, in order."""
    return [_kernel(*found) for found in _DEFINITION.findall(code)]


def launches(code: str) -> Counter[str]:
    """How often each kernel is launched in one call of the stage, by name."""
    names = "|".join(kernel.name for kernel in kernels(code))
    return Counter(re.findall(rf"\b({names})(?:\.run)?\(", _calls(code))) if names else Counter()


def fallbacks(code: str) -> Counter[str]:
    """Operators that are called as they are, ATen's or others: each is a fusion that did not happen."""
    return Counter(_FALLBACK.findall(_calls(code)))


def hasty(code: str, *, looks_ahead: bool = False) -> list[str]:
    """Kernels that may start before the one before them ends (PDL) and touch memory before they wait for its end.

    With ``looks_ahead``, kernels of reductions may read before it what they do not reduce.
    """
    waits = _WAITS_FOR_TILES if looks_ahead else _WAITS
    return [name for name, _, source in _DEFINITION.findall(code) if _EARLY.search(source) and not waits.search(source)]


def moved_bytes(kernel: Kernel, arguments: Sequence[Any]) -> tuple[int, int]:
    """Bytes that one launch reads and writes, as far as shapes tell.

    Every argument counts once and whole, but a gathered one at most as often as Triton's source loads from it: a load
    for each point of the iteration space. C++ sources do not tell, so a gathered argument counts whole there.
    """
    values = dict(zip(kernel.parameters, arguments, strict=False))
    points = _points(kernel, values)
    read = written = 0
    for name, value in values.items():
        if isinstance(value, Tensor):
            most = value.numel() if points is None else min(value.numel(), points * kernel.loads.get(name, 0))
            read += most * value.itemsize if name.startswith("in_") else 0
            written += value.numel() * value.itemsize if "out_ptr" in name else 0
    return read, written


def _kernel(name: str, language: str, source: str) -> Kernel:
    if language == "cpp_pybinding":
        return Kernel(name, "cpp", _cpp_parameters(source), {}, {})
    decorator = re.search(r"@triton_heuristics\.(\w+)\(", source)
    kind = "triton" if decorator is None else decorator[1].replace("_", " ")
    if kind == "fixed config":  # a tiling of ours; the name tells what it is a tiling of
        kind = _KINDS.get(name.split("_")[1], kind)
    signature = re.search(rf"^def {name}\((.*?)\):", source, re.M | re.S)
    names = [] if signature is None else signature[1].split(",")
    parameters = tuple(each.strip() for each in names if "constexpr" not in each)
    loads = Counter(re.findall(r"\btl\.load\((\w+)", source))
    numels = {found[0]: int(found[1]) for found in re.findall(r"^\s*(\w*numel) = (\d+)$", source, re.M)}
    return Kernel(name, kind, parameters, dict(loads), numels)


def _cpp_parameters(source: str) -> tuple[str, ...]:
    signature = re.search(r"\bvoid\s+kernel\((.*?)\)\s*\{", source, re.S)
    return () if signature is None else tuple(each.split()[-1] for each in signature[1].split(","))


def _points(kernel: Kernel, values: dict[str, Any]) -> int | None:
    """Points of the iteration space of a launch; None where they are not known."""
    given = {name: value for name, value in values.items() if name.endswith("numel")}
    numels = {**given, **kernel.numels}
    return math.prod(numels.values()) if kernel.loads and numels else None


def _calls(code: str) -> str:
    """The functions of an output source that launch, without comments."""
    return _COMMENT.sub("", "".join(_CALLS.findall(code)))
