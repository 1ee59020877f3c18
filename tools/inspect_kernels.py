"""Which kernels does a step launch, what does each move, and is anything left to ATen?

    python -m tools.inspect_kernels --mode no_filter --rows 8 [--vocab 151936] [--dtype float32] [--json FILE]
    python -m tools.inspect_kernels --mode full --rule match --width 3 [--drafts one_hot]
    python -m tools.inspect_kernels --mode full --generate triton      no GPU needed: code is generated, nothing runs

The step is compiled and run on the GPU, or on the CPU in C++ where there is none. Bytes are estimated from the shapes
of a kernel's arguments: each counts once, a gathered one in Triton at most once a load. Registers and spills are the
binary's. Microseconds are those of a launch among many in a replayed CUDA graph, about one of them the node's; the L2
holds what fits, so a kernel that reads less than 50 MB is faster than cold. "opaque" is a stage that launches a kernel
of its own, which Inductor does not see.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from compiled_sampler import SamplingParams
from compiled_sampler.batch import SampleInputs, VerifyInputs
from compiled_sampler.engine.slots import SlotState
from compiled_sampler.modes import PROPOSALS, RULES, Mode, Verification, mode_table, verifying
from compiled_sampler.pipeline.sample import sample_step
from compiled_sampler.pipeline.schedule import row_class
from compiled_sampler.pipeline.verify import verify_step
from tools.kernel_launches import BACKENDS, FALLBACK, Launch, Step, generated, listed, recorded
from tools.measurement import environment, write_json
from tools.workloads import logits_like

REQUESTS = {
    "greedy": SamplingParams(temperature=0.0, seed=1),
    "no_filter": SamplingParams(temperature=0.8, seed=2),
    "min_p": SamplingParams(temperature=0.8, min_p=0.05, seed=3),
    "top_k_top_p[64]": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=4),
    "top_k": SamplingParams(temperature=0.8, top_k=1000, seed=6),
    "full": SamplingParams(temperature=0.8, top_p=0.99, seed=5),
}
"""A request of each mode; the last one makes it search beyond the candidates."""

_SLOTS = 256


def step_of(
    mode_name: str,
    rows: int,
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    verification: Verification | None = None,
    top_p_base: str = "top_k",
) -> Step:
    """A step of a mode on random logits, as a function of what runs its stages.

    Args:
        mode_name: one of ``REQUESTS``.
        rows: R, with drafts N.
        vocab_size: V.
        dtype: of the logits.
        device: where.
        verification: how drafts are verified; None samples.
        top_p_base: as of a sampler.
    """
    modes = {mode.name: mode for mode in mode_table(vocab_size, top_p_base)}
    state = SlotState(_SLOTS, tuple(modes.values()), torch.device(device))
    slots = torch.full((rows,), state.add(REQUESTS[mode_name]), device=device)
    positions = torch.arange(rows, device=device)
    if verification is None:
        logits = logits_like("peaked", rows, vocab_size, device, dtype)
        return partial(sample_step, modes[mode_name], SampleInputs(logits, slots, positions, state.table))
    width = verification.width
    mode = verifying(modes[mode_name], verification.rule, verification.drafts)
    inputs = VerifyInputs(
        logits_like("peaked", rows * (width + 1), vocab_size, device, dtype),
        slots,
        positions,
        torch.full((rows,), width, device=device),
        torch.randint(vocab_size, (rows, width), device=device),
        _proposals(mode, rows * width, dtype, device),
        state.table,
    )
    return partial(verify_step, mode, inputs)


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


def _proposals(mode: Mode, count: int, dtype: torch.dtype, device: str) -> Tensor | None:
    """A row a draft: logits, probabilities, or None for one-hot drafts."""
    if mode.drafts == "one_hot":
        return None
    logits = logits_like("peaked", count, mode.vocab_size, device, dtype, seed=1)
    return logits if mode.drafts == "logits" else torch.softmax(logits.float(), -1)


def _size(count: int | None) -> str:
    if not count:
        return ""
    return f"{count} B" if count < 10_000 else f"{count / 1e3:.0f} kB" if count < 1e7 else f"{count / 1e6:.1f} MB"


def _us(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="no_filter", choices=list(REQUESTS))
    parser.add_argument("--rows", type=int, default=8, help="rows of logits; with --rule requests")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rule", choices=RULES, help="verify drafts instead of sampling")
    parser.add_argument("--drafts", default="one_hot", choices=PROPOSALS)
    parser.add_argument("--width", type=int, default=3, help="drafts a request")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--generate", choices=list(BACKENDS), help="only generate code, for the CPU's stages")
    parser.add_argument("--json", help="store the kernels in this file, with their whole names")
    return parser.parse_args()


def main() -> None:
    """Compile, run, print, store."""
    arguments = _arguments()
    device = "cpu" if arguments.generate else arguments.device
    verification = arguments.rule and Verification(arguments.rule, arguments.width, arguments.drafts)
    make = partial(
        step_of,
        arguments.mode,
        vocab_size=arguments.vocab,
        dtype=getattr(torch, arguments.dtype),
        device=device,
        verification=verification,
    )
    step = make(rows=arguments.rows)
    if arguments.generate:
        found = listed(generated(step, arguments.generate))
    else:
        found = recorded(make(rows=row_class(arguments.rows, torch.device(device))), step)
    where = f"{arguments.generate or device}, torch {torch.__version__}"
    variant = f"{arguments.rule} of {arguments.width} drafts, {arguments.mode}" if verification else arguments.mode
    title = f"{variant}, [{arguments.rows}, {arguments.vocab}] {arguments.dtype}, {where}"
    Console(width=150).print(table_of(found, title))
    if arguments.json:
        kernels = [each._asdict() for each in found]
        write_json(
            arguments.json, {"environment": environment(device), "arguments": vars(arguments), "kernels": kernels}
        )


if __name__ == "__main__":
    main()
