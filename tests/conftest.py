"""What every test shares: the rule for ``gpu`` tests, fixed seeds, hypothesis profiles and a device to run on."""

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings

from compiled_sampler.lowering.compile_queue import PROCESSES_VARIABLE
from compiled_sampler.lowering.compiled_stages import CompiledStages

# No deadline: the first example of a compiled function pays for its compilation.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_configure() -> None:
    """Workers share the cores: with threads of their own they wait for each other, 800 s instead of 480.

    What runs in several threads is tested in ``test_determinism.py``.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = max(1, torch.get_num_threads() // workers)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of programs that tests start
    os.environ.setdefault(PROCESSES_VARIABLE, "0")
    # Else a test of compiled stages would compare eager torch with itself. Tests of the queue set it back.
    CompiledStages.compiles_at_calls = True
    torch.set_num_threads(threads)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` run only where there is a CUDA device."""
    without_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(without_gpu)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same global random states, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    """A CPU generator in its first state, for test data."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def kept_threads() -> Iterator[None]:
    """Sets the number of threads back, which tools change that a test calls."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
