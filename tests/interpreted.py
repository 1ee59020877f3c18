"""Programs under Triton's interpreter, which the environment asks for when Triton is imported: in a process apart."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_interpreted(file: str, *arguments: str) -> Any:
    """What a file prints as JSON when it runs as a program whose Triton kernels are interpreted."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    program = [sys.executable, file, *arguments]
    result = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    if "No module named 'triton'" in result.stderr:
        pytest.fail("triton must be importable for its interpreter; install the test requirements")
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def cases_that_differ(printed: dict[str, Any], *others: str) -> dict[str, Any]:
    """The rows that differ, by case, where there are any; ``others`` are no such cases."""
    return {case: rows for case, rows in printed.items() if rows and case not in others}


@contextmanager
def with_less_overhead() -> Iterator[None]:
    """Within, interpreted kernels compute the same in a third of the time.

    Left out is what changes no result: making Triton's language interpretable again at each call of a device function,
    instead of once a launch; looking for overflow at each sum, of which nothing is made without ``debug``; and making
    what follows from a type for each tensor: the table in which NumPy's type is looked up, and the block's shape.
    A function that finds the language of the compiler raises an error: a change of the interpreter would not pass.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patched, launch = set[str](), interpreter.GridExecutor.__call__
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    known, np_dtype = dict[str, Any](), interpreter._get_np_dtype
    made, make = dict[str, tuple[Any, ...]](), tl.tensor.__init__
    assert not options.debug

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()  # the last launch has put everything back
        launch(self, *args, **kwargs)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    def looked_up(dtype: Any) -> Any:
        if dtype.name not in known:  # a block's type has no hash
            known[dtype.name] = np_dtype(dtype)
        return known[dtype.name]

    def initialised(self: Any, handle: Any, type: Any) -> None:
        if type.name not in made:
            make(self, handle, type)
            made[type.name] = self.shape, self.numel, self.dtype
        self.handle, self.type, (self.shape, self.numel, self.dtype) = handle, type, made[type.name]

    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", launched),
        mock.patch.object(interpreter.InterpretedFunction, "__call__", called),
        mock.patch.object(interpreter.interpreter_builder, "options", options),
        mock.patch.object(interpreter, "_get_np_dtype", looked_up),
        mock.patch.object(tl.tensor, "__init__", initialised),
    ):
        yield
