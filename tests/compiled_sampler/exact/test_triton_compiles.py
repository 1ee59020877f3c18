"""Every hand-written kernel compiles for compute capability 9.0 without a GPU, and once for all addresses and numbers.

This file also runs as a program, because the stand-in for a driver is one for the whole process.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from compiled_sampler.exact.triton import operators
from compiled_sampler.exact.triton.rows import OWN

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[3]
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
V = 151_936
CASES = ((torch.float32, 1, False), (torch.float32, 1, True), (torch.bfloat16, 300, False))

Launch = tuple[Any, dict[str, Any]]
"""A kernel and its arguments, constants and options by name."""


def driver() -> Any:
    properties = {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}
    answers = {
        "get_current_target": GPUTarget("cuda", 90, 32),
        "get_current_device": 0,
        "get_current_stream": 0,
        "is_active": True,
    }
    utils = mock.Mock(**{"get_device_properties.return_value": properties})
    return mock.Mock(**{f"{name}.return_value": answer for name, answer in answers.items()}, utils=utils)


def elsewhere(tensor: Tensor) -> Any:
    """A tensor that starts at an address of no alignment but its own."""
    return mock.Mock(dtype=tensor.dtype, **{"data_ptr.return_value": tensor.element_size()})


def launched(call: Callable[[], Any]) -> list[Launch]:
    """The launches of an operator, none of which happens, on a device whose kernels start early."""
    found: list[Launch] = []

    def wrapped(kernel: Any) -> Any:
        grids = mock.MagicMock()
        grids.__getitem__.side_effect = lambda grid: lambda **given: found.append((kernel, {"grid": grid, **given}))
        return grids

    early = {"EARLY": True, "launch_pdl": True}
    with (
        mock.patch.object(operators, "wrap_triton", wrapped),
        mock.patch.object(operators, "early", return_value=early),
    ):
        call()
    return found


def every_launch() -> Iterator[Launch]:
    for dtype, num_rows, base_is_row in CASES:
        logits = torch.empty(num_rows, V, dtype=dtype, device="meta")
        int64, int32, float32, float64, true = (
            torch.empty(num_rows, dtype=each, device="meta")
            for each in (torch.int64, torch.int32, torch.float32, torch.float64, torch.bool)
        )
        words = torch.empty(num_rows, -(-V // 32), dtype=torch.int32, device="meta")
        noise, (raced, _) = (int32, float32, [int32] * 4), operators.empty_parts(int64, V, weighs=True)
        search = (int64, true, int64, float32, float32, int64, float64)
        draw = (int64, true, true, int64, float32, float32, int64, float64, *noise, raced)
        rows = (true, float32, float32, int64, *noise)
        calls: list[tuple[Any, tuple[Any, ...]]] = [
            (operators.search_threshold, (*search, V, base_is_row)),
            *((operators.race_beyond_candidates, (*draw, masks, V, base_is_row)) for masks in (None, words)),
            *((operators.race_top_k, (true, float32, int64, float64, *noise, masks, V)) for masks in (None, words)),
            *((operators.race_rows, (*rows, found, None, V, False)) for found in (None, int64)),
            (operators.race_rows, (*rows, int64, words, V, False)),
            *((operators.race_rows, (*rows, None, masks, V, True)) for masks in (None, words)),
        ]
        for operator, arguments in calls:
            yield from launched(lambda: operator._init_fn(logits, *arguments))  # noqa: B023 - called at once


def specialised(launch: Launch) -> tuple[Any, ...]:
    """What tells a launch's kernel from others: its name, its constants and its types of arguments."""
    kernel, given = launch
    facts = ((name, getattr(each, "dtype", None) if hasattr(each, "dtype") else each) for name, each in given.items())
    numbers = {
        "grid",
        "num_rows",
        "row_stride",
        "word_stride",
        "tiles",
        "num_parts",
        "part_size",
        "draws",
        "vocab_size",
    }
    return kernel.fn.__name__, *(fact for fact in facts if fact[0] not in numbers)


def moved(launch: Launch) -> dict[str, Any]:
    """The arguments of a launch whose tensors are elsewhere, and whose numbers are others, but for the kernel's own."""
    kernel, given = launch
    constant = {each.name for each in kernel.params if each.is_constexpr}
    others = {}
    for name, each in given.items():
        if isinstance(each, Tensor) and name not in OWN:
            others[name] = elsewhere(each)
        elif name in kernel.arg_names and name not in constant and isinstance(each, int):
            others[name] = 1 if each != 1 else 16
    return given | others


def compiled(kernel: Any, given: dict[str, Any]) -> str:
    """The hash of what a launch would run; compiles it if that is new."""
    found = kernel.warmup(**given)
    found = found.result() if hasattr(found, "result") else found  # a later Triton may compile in another thread
    assert len(found.asm["cubin"]) > 0
    return str(found.hash)


def main() -> None:
    """Print, as JSON, the kernels that were compiled, those compiled twice, and whether a usual kernel is."""
    triton.runtime.driver.set_active(driver())
    distinct = {specialised(launch): launch for launch in every_launch()}
    names, twice, unowned = [], [], []
    for kernel, given in distinct.values():
        names.append(kernel.fn.__name__)
        if compiled(kernel, given) != compiled(kernel, moved((kernel, given))):
            twice.append(kernel.fn.__name__)
        unowned += [name for name in OWN & given.keys() if given[name].storage_offset()]
    race, given = next(launch for launch in distinct.values() if launch[0].fn.__name__ == "race_kernel")
    usual = triton.jit(race.fn)
    control = compiled(usual, given) != compiled(usual, moved((usual, given)))
    json.dump({"names": names, "twice": twice, "unowned": unowned, "control": control}, sys.stdout)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    if not PTXAS.exists():
        pytest.skip("this Triton comes without ptxas, which assembles what it compiles")
    program = [sys.executable, "-c", f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"]
    result = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    printed: dict[str, Any] = json.loads(result.stdout)
    return printed


def test_every_kernel_compiles_without_a_gpu(found):
    assert {*found["names"]} == {"bracket_kernel", "finish_kernel", "measure_kernel", "race_kernel"}
    assert len(found["names"]) == 44


def test_no_address_and_no_number_has_a_kernel_of_its_own(found):
    assert found["twice"] == []
    assert found["unowned"] == []


def test_a_usual_kernel_is_compiled_again_elsewhere(found):
    assert found["control"]


if __name__ == "__main__":
    main()
