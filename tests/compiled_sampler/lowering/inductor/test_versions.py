"""The guard of Inductor's private parts, also on a torch that is not known; guards of layouts; Triton's assembler."""

import os
import subprocess
import sys
import warnings
from contextlib import suppress
from unittest import mock

import pytest
import torch
from torch._inductor.codegen.cpp import CppVecOverrides
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.virtualized import V as virtualized

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.core.stage import call
from compiled_sampler.edits.changes import EditedTokens, take_back
from compiled_sampler.lowering import stage_code
from compiled_sampler.lowering.compiled_stages import CompiledStages, StageWarning
from compiled_sampler.lowering.inductor import compilation, disk_cache, versions
from compiled_sampler.lowering.inductor.patches import tuned_kernels
from compiled_sampler.lowering.inductor.versions import KNOWN_TORCH, UnknownTorchWarning, alike, is_known
from compiled_sampler.lowering.tuning import tuning_of
from compiled_sampler.passes.race import race_maxima
from tests.builders.sampler import REQUESTS, V, nothing_compiles, shared_sampler

UNKNOWN = "99.1.0"


def scaled(x, *, factor):
    return x * factor + 1


@pytest.fixture
def unknown_torch(monkeypatch):
    """A torch of another version, of which was warned already."""
    monkeypatch.setattr(torch, "__version__", UNKNOWN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnknownTorchWarning)
        is_known()
        yield
    versions._warn.cache_clear()


@pytest.mark.parametrize(
    ("version", "known"),
    [(version, True) for version in ("2.11.0", "2.13.0+cpu", "2.15.1a0+git1234")]
    + [(version, False) for version in ("2.10.1", "2.16.0.dev20270101", "3.12.0")],
)
@pytest.mark.filterwarnings("ignore::compiled_sampler.lowering.inductor.versions.UnknownTorchWarning")
def test_minor_versions_between_the_first_and_the_last_are_known(version, known, monkeypatch):
    assert KNOWN_TORCH == ((2, 11), (2, 15))
    monkeypatch.setattr(torch, "__version__", version)
    assert is_known() == known
    versions._warn.cache_clear()


def test_an_unknown_version_is_named_once(monkeypatch):
    versions._warn.cache_clear()
    monkeypatch.setattr(torch, "__version__", UNKNOWN)
    with pytest.warns(UnknownTorchWarning, match=r"torch 99\.1\.0.*2\.11 to 2\.15.*longer.*install torch"):
        assert not CompiledStages().status().torch_is_known
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not CompiledStages().status().torch_is_known
    versions._warn.cache_clear()


def internals():
    return TritonScheduling.kernel_type, vars(CppVecOverrides)["to_dtype_bitcast"], type(virtualized.choices)


@pytest.mark.parametrize(("on_gpu", "patched"), [(True, [True, False, True]), (False, [False, True, False])])
def test_patches_are_applied_on_a_known_torch_alone_and_taken_back(on_gpu, patched, request):
    def changed():
        before = internals()
        with suppress(ZeroDivisionError), tuned_kernels(tuning_of(race_maxima), 2, 512, on_gpu=on_gpu):
            within = internals()
            raise ZeroDivisionError
        assert internals() == before
        return [now is not usual for now, usual in zip(within, before, strict=True)]

    assert changed() == patched
    request.getfixturevalue("unknown_torch")
    assert changed() == [False] * 3
    assert disk_cache.cache_folder({}) is None


@pytest.mark.usefixtures("unknown_torch")
def test_on_an_unknown_torch_stages_compile_by_public_functions_for_any_number_of_rows():
    run, private = CompiledStages({"no.such.option": True, "split_reductions": False}), AssertionError("private")
    with (
        mock.patch.object(compilation, "_compiled_ahead", side_effect=private),
        mock.patch.object(stage_code, "store", side_effect=private),
        mock.patch.object(stage_code, "load", side_effect=private),
    ):
        for rows in (3, 1):
            run(scaled, torch.randn(rows, 5), factor=2)
    with nothing_compiles():
        for rows in (1, 2, 7, 100):
            x = torch.randn(rows, 5)
            with torch.inference_mode(rows == 7):
                assert torch.equal(run(scaled, x, factor=2), scaled(x, factor=2))
    assert not run.status().torch_is_known
    assert run.status().eager_stages == {}


@pytest.mark.usefixtures("unknown_torch")
def test_on_an_unknown_torch_a_stage_that_does_not_compile_runs_eager():
    run, x = CompiledStages(), torch.randn(3, 5)
    with mock.patch.object(torch, "compile", side_effect=TypeError("no argument fullgraph")):
        with pytest.warns(StageWarning, match="scaled runs in eager torch"):
            assert torch.equal(run(scaled, x, factor=2), scaled(x, factor=2))
        assert torch.equal(run(scaled, x, factor=3), scaled(x, factor=3))
    assert run.status().eager_stages == {"scaled": "it fails with TypeError: no argument fullgraph"}


@pytest.mark.usefixtures("unknown_torch")
def test_on_an_unknown_torch_a_stage_that_writes_does_so_once_in_the_call_that_compiles_it():
    """It is compiled by a run, which wrote into the caller's tensors."""
    ids, numbers = torch.tensor([[1], [2], [3]], dtype=torch.int32), torch.full((3, 1), 5, dtype=torch.int32)
    restored = []
    for run in (call, CompiledStages()):
        bits = torch.zeros(3, 10, dtype=torch.int32)
        run(take_back, bits, EditedTokens(ids, numbers))
        restored.append(bits)
    assert torch.equal(*restored)
    assert restored[0].any()


def test_statistics_say_that_this_torch_is_known():
    status = shared_sampler(V).statistics().lowering
    assert (status.torch_version, status.torch_is_known) == (str(torch.__version__), True)
    assert shared_sampler(V, backend="eager").statistics().lowering is None


@pytest.mark.usefixtures("unknown_torch")
def test_on_an_unknown_torch_tokens_stay_also_where_stages_write_lists_and_histories_and_statistics_say_so():
    """No stage is given up by a comparison, in warm-up or at its first call."""
    edited = SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5, logit_bias={5: 2.0, 9: -3.0})
    logits, found = torch.randn(4, 2, V), []
    for backend in ("eager", "compiled"):
        sampler = Sampler(V, 3, backend=backend, history_len=16, captured_edits=[["logit_bias", "penalties"]])
        if backend == "compiled":
            sampler.warmup(modes=["greedy", "no_filter"])
        slots = [sampler.add_request(edited, [1, 2, 5]) for _ in range(2)]
        plain = sampler.add_request(REQUESTS["no_filter"])
        for rows in (slots[:1], slots, [plain], [plain] * 2):
            plan = sampler.plan(rows)
            steps = [(row[: len(rows)].clone(), torch.full((len(rows),), at)) for at, row in enumerate(logits, start=3)]
            found.append([sampler.sample(plan, *each).token_ids.tolist() for each in steps])
    assert found[:4] == found[4:]
    status = sampler.statistics().lowering
    assert (status.torch_version, status.torch_is_known, status.eager_stages) == (UNKNOWN, False, {})


X = torch.arange(8.0)
OTHERS = {
    "shorter": X[:4],
    "strided": torch.arange(16.0)[::2],
    "in two dimensions": X.view(2, 4),
    "transposed": torch.arange(8.0).view(4, 2).t(),
    "another dtype": X.view(torch.int32),
    "wider numbers": X.to(torch.float64),
    "the negative bit": torch._neg_view(X),
    "another device": X.to("meta"),
}


@pytest.fixture(params=[True, False], ids=["guards", "public functions"])
def checked(request, monkeypatch):
    monkeypatch.setattr(versions, "was_checked", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("other", OTHERS)
def test_a_tensor_that_is_read_differently_is_not_alike(checked, other):
    first, second = torch.zeros(3, 5), OTHERS[other]
    assert not alike([first, X])(first, second)
    assert not alike([first, second])(first, X)
    assert alike([first, second])(first, second)


def test_the_same_layout_is_alike_elsewhere_in_inference_mode_and_without_gradients(checked):
    rows = torch.randn(6, 7)[::2, :5]
    assert alike([X, rows])(X.clone(), torch.zeros(9, 7)[:6:2, 2:])
    assert alike([rows[:1]])(rows[:1])
    assert alike([X, X])(X, X)  # one tensor may stand twice
    with torch.inference_mode():
        made = torch.arange(8.0)
        assert alike([made, X])(made, X)
    with torch.no_grad():
        assert alike([X])(X)


def test_a_tensor_that_torch_lets_be_written_elsewhere_is_not_alike(checked):
    learnt = X.clone().requires_grad_()
    with torch.inference_mode():
        made = X.clone()
    assert not alike([X])(made)
    assert not alike([X])(learnt)
    assert not alike([learnt])(X)
    assert alike([learnt])(learnt)


def test_no_tensor_is_held(checked):
    tensor = torch.zeros(3)
    place = tensor.untyped_storage()._weak_ref()
    is_alike = alike([tensor])
    del tensor
    assert torch.UntypedStorage._expired(place)
    torch.UntypedStorage._free_weak_ref(place)
    assert is_alike(torch.zeros(3))


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
def test_a_process_assembles_as_this_one_also_where_triton_asked_for_its_version_before(asks):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_PTXAS_PATH"}
    script = _ASKED_BEFORE.replace("ASKS", str(asks))
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
