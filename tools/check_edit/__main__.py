"""Does an edit of logits keep the promise of equal bits, and if not, which operation breaks it?

    python -m tools.check_edit package.module:MyEdit [--params '{"bias": 2.0}'] [--vocab 1003] [--device cuda]

The edit, a class or an instance of ``LogitEdit``, is traced to torch's own operations. Those that are not rounded once
are named, as eager torch, Inductor and CUDA compute them differently. Then it runs on hard rows, with ties, infinities,
NaN, denormals and numbers near the largest: with its columns permuted, with some columns gathered, with rows alone,
compiled, and with CUDA also there. The first operation whose result differs is named. Last, a sampler with the edit
runs it eager, compiled, and with CUDA replayed from a graph. An exit status of 1 says that something was found, unless
the edit has ``bit_exact = False``.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence

import torch

from compiled_sampler import LogitEdit
from compiled_sampler.logit_edit import name_of
from compiled_sampler.lowering.compiled_stages import CompiledStages
from tools.check_edit.findings import VOCAB_SIZE, check_edit, checked_call


def edit_of(path: str) -> LogitEdit:
    """The edit of ``package.module:name``: an instance, or what a class makes without arguments."""
    module, _, name = path.partition(":")
    way_out = "the module's folder must be where this runs, or in PYTHONPATH"
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (ModuleNotFoundError, TypeError, ValueError) as error:
        raise SystemExit(f"edit must be package.module:name, got {path!r}: {error}; {way_out}") from error
    made = found() if isinstance(found, type) else found
    if not isinstance(made, LogitEdit):
        raise SystemExit(f"{path} must be a LogitEdit, got {type(made).__name__}")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Print what breaks the promise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("edit", help="package.module:name")
    parser.add_argument("--params", type=json.loads, default={}, help="of a request, as JSON")
    parser.add_argument("--vocab", type=int, default=VOCAB_SIZE)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    options = parser.parse_args(argv)
    edit = edit_of(options.edit)
    CompiledStages.compiles_at_calls = True  # what is compared is compiled code
    try:
        checked_call(edit, options.params, options.vocab)
    except (TypeError, ValueError) as error:
        raise SystemExit(str(error)) from error
    found = check_edit(edit, options.params, options.vocab, options.device)
    for each in found:
        print(f"{name_of(edit)}: {each.operation}: {each.reason}")
    if not found:
        print(f"{name_of(edit)}: the same bits on every path of this machine, on {options.device}")
    if found and edit.bit_exact:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
