"""Processes that compile for this one, and the assembler of Triton."""

import os
import subprocess
import sys

import pytest

_ASKED_BEFORE = """
import os, subprocess, torch
from triton.backends.nvidia import compiler
from compiled_sampler.lowering.inductor.compilation import assembler_of_triton, set_up_triton

device = torch.device("cuda", 0)
major, minor = torch.cuda.get_device_capability(device)
if ASKS:
    compiler.get_ptxas_version(10 * major + minor)
set_up_triton(device)
tool = assembler_of_triton(device).get("TRITON_PTXAS_PATH") or compiler.get_ptxas(10 * major + minor).path
assert subprocess.check_output([tool, "--version"], text=True) == compiler.get_ptxas_version(10 * major + minor)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("asks", [True, False])
def test_a_process_assembles_as_this_one_also_where_triton_asked_for_its_version_before(asks: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_PTXAS_PATH"}
    script = _ASKED_BEFORE.replace("ASKS", str(asks))
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
