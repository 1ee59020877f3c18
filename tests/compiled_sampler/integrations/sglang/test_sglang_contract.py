"""What the adapter expects of SGLang, held to its published source; SGLang itself is not run."""

import os
import re
import tomllib
from types import SimpleNamespace

import pytest
import torch

from compiled_sampler.integrations.engine_interface import differences, found, seed_of
from compiled_sampler.integrations.sglang.plugin import INTERFACE, OLDEST, VARIABLE, check_version, from_text
from compiled_sampler.modes import MAX_VOCAB_SIZE
from tests.engines.published_engine import require_source, run_example, without
from tests.engines.sglang_engine import TOP_K_ALL, engine, outputs_of
from tools.engines.published_source import ROOT, unpacked_version

NAMES = [name for table in INTERFACE for name in table]
MOCKED = ("get_exec", "get_spec", "get_device")
"""Functions of a module that the tests do not import; they are looked up in its text."""


@pytest.fixture
def config():
    with engine("published") as made:
        yield made


@pytest.mark.usefixtures("config")
def test_the_published_source_has_everything():
    assert differences(INTERFACE, found) == []
    check_version(unpacked_version("sglang"))
    assert MAX_VOCAB_SIZE <= TOP_K_ALL  # its number for no top_k
    assert {f"sglang.srt.runtime_context:{name}" for name in MOCKED} <= set(INTERFACE.attributes)


@pytest.mark.parametrize(
    ("file", "declared"),
    [
        ("sampling/sampling_params.py", f"TOP_K_ALL = 1 << {TOP_K_ALL.bit_length() - 1}\n"),
        ("sampling/sampling_params.py", "    sampling_seed: Optional[int] = None\n"),
        ("server_args.py", "    speculative_algorithm: A["),
        ("server_args.py", "    random_seed: A["),
        ("server_args.py", "    sampling_backend: A["),
        ("arg_groups/overrides.py", 'return {"sampling_backend": "pytorch"}'),
        ("model_executor/model_runner.py", "self.sampler = create_sampler()"),
        ("model_executor/model_runner.py", "else forward_batch.seq_lens - 1"),
        ("model_executor/forward_batch_info.py", "ret.positions = clamp_position(batch.seq_lens)"),
        ("managers/scheduler.py", "    load_plugins()"),
        ("plugins/__init__.py", 'GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"'),
        *(("runtime_context.py", f"\ndef {name}() -> ") for name in MOCKED),
    ],
)
def test_what_is_relied_on_and_not_called_is_in_the_source(file, declared):
    assert declared in (require_source("sglang") / "sglang" / "srt" / file).read_text()


@pytest.mark.usefixtures("config")
@pytest.mark.parametrize("name", NAMES)
def test_a_version_that_lacks_something_is_refused_by_its_name(name):
    with pytest.raises(ImportError, match=f"must have {re.escape(name)}, got 9.9.9, where it differs; install"):
        check_version("9.9.9", without(name))


@pytest.mark.parametrize("version", ["0.5.16", "0.4.10", "dev"])
def test_an_older_version_is_refused_with_those_that_work(version):
    with pytest.raises(ImportError, match=rf"must be {OLDEST} or newer, got {version}; install a version"):
        check_version(version)


def test_the_variable_names_a_backend():
    assert [from_text(text) for text in ("", "0", "1", "eager")] == [None, None, "auto", "eager"]
    with pytest.raises(ValueError, match=f"{VARIABLE} must be 1 or one of .*, got 'graph'; 0 switches it off"):
        from_text("graph")


@pytest.fixture
def plugin(config, monkeypatch):
    """The module of the adapter, with SGLang's version known and the variable put back behind the test."""
    from compiled_sampler.integrations.sglang import plugin

    monkeypatch.setattr(plugin, "version", lambda name: unpacked_version(name))
    monkeypatch.setenv(VARIABLE, "0")
    return plugin


def test_sglang_finds_the_plugin_which_does_nothing_unless_it_is_told(plugin):
    from sglang.srt.layers.sampler import _CUSTOM_SAMPLER_FACTORIES

    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert entries["sglang.srt.plugins"] == {"compiled_sampler": "compiled_sampler.integrations.sglang.plugin:load"}
    plugin.load()
    assert not _CUSTOM_SAMPLER_FACTORIES


@pytest.mark.parametrize("backend", ["compiled_sampler", "pytorch"])
def test_sglang_makes_the_adapter_under_its_name_and_under_that_of_the_deterministic_mode(plugin, config, backend):
    from sglang.srt.layers.sampler import create_sampler
    from sglang.srt.server_args import SAMPLING_BACKEND_CHOICES

    plugin.install(backend="eager")
    plugin.load()
    config.exec.kernel.sampling_backend = backend
    assert type(create_sampler()).__name__ == "CompiledSampler"
    assert os.environ[VARIABLE] == "eager"
    assert backend in SAMPLING_BACKEND_CHOICES
    config.exec.kernel.sampling_backend = "flashinfer"
    assert type(create_sampler()).__name__ == "Sampler"


def batch_of(seeds, top_k=TOP_K_ALL):
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    law = {"temperature": 1.0, "top_p": 1.0, "top_k": top_k, "min_p": 0.0, "logit_bias": None}
    rest = {"return_sampling_mask": False, "custom_logit_processor": None, "sampling_logprobs_mode": None}
    requests = [
        SimpleNamespace(rid=rid, sampling_params=SimpleNamespace(sampling_seed=seed, **law), **rest)
        for rid, seed in seeds.items()
    ]
    return SamplingBatchInfo.from_schedule_batch(SimpleNamespace(reqs=requests, device="cpu"), 64)


@pytest.mark.parametrize(("seed", "wanted"), [(7, 7), (2**63, -(2**63)), (2**64 - 1, -1), (-1, -1)])
def test_a_seed_beyond_int64_is_taken_modulo(plugin, seed, wanted):
    """It raised for its whole batch, which ends SGLang's scheduler."""
    request = SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed), rid="a")
    assert plugin.request_seed(request, 0) == wanted


@pytest.fixture
def hooked(plugin):
    """The hooks of the adapter are in SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    assert batch_of({"a": 5}).sampling_seed is None  # as SGLang does unless its mode is deterministic
    plugin.install(backend="eager")
    HookRegistry.apply_hooks()


@pytest.mark.usefixtures("hooked")
def test_a_batch_of_sglang_brings_seeds_that_stay_with_its_rows(config):
    batch = batch_of({"a": 5, "b": None, "c": -(2**63)})
    made = (seed_of("b", 7) + 2**63) % 2**64 - 2**63
    assert batch.sampling_seed.tolist() == [5, made, -(2**63)]
    batch.merge_batch(batch_of({"d": 9}))
    batch.filter_batch([1, 3], torch.tensor([1, 3]))
    assert batch.sampling_seed.tolist() == [made, 9]
    config.exec.kernel.sampling_backend = "flashinfer"
    assert batch_of({"a": 5}).sampling_seed is None
    config.exec.kernel.sampling_backend = "pytorch"
    config.exec.deterministic.enable_deterministic_inference = True
    assert batch_of({"a": 5, "b": None}).sampling_seed.tolist() == [5, 42]  # SGLang's own


@pytest.mark.usefixtures("hooked")
def test_the_bound_of_top_k_stays_with_a_batch_and_an_unbounded_row_ends_it():
    from compiled_sampler.integrations.sglang.drawing import mode_name

    batch = batch_of({"a": 5}, top_k=20)
    batch.merge_batch(batch_of({"b": 6}, top_k=50))
    batch.filter_batch([0], torch.tensor([0]))
    assert mode_name(batch.copy_for_forward()) == "top_k_top_p[64]"
    batch.merge_batch(batch_of({"c": 7}))
    assert mode_name(batch.copy_for_forward()) == "top_k"


@pytest.mark.usefixtures("hooked")
def test_a_batch_as_sglang_makes_it_is_drawn_from():
    from sglang.srt.layers.sampler import create_sampler

    from compiled_sampler import functional

    logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    batch, positions = batch_of({"a": 5, "b": None}), torch.tensor([3, 8])
    drawn = create_sampler()(outputs_of(logits), batch, False, [0, 0], [None, None], positions)
    wanted = functional.sample(logits, seeds=batch.sampling_seed, positions=positions + 1, backend="eager")
    assert drawn.tolist() == wanted.token_ids.tolist()


def test_the_example_of_the_page_runs_up_to_the_engine(plugin):
    """The engine itself is a mock: what stands before it is what a user types, and it must switch the adapter on."""
    run_example("SGLang")
    assert from_text(os.environ[VARIABLE]) == "auto"


@pytest.mark.parametrize(("text", "version"), [("1", "0.0.1"), ("fast", None)])
def test_a_process_ends_where_the_adapter_cannot_be_switched_on(plugin, monkeypatch, text, version):
    """SGLang goes on behind an exception of a plugin, and would draw by a sampler that nobody asked for."""
    monkeypatch.setenv(VARIABLE, text)
    if version is not None:
        monkeypatch.setattr(plugin, "version", lambda name: version)
    with pytest.raises(SystemExit, match=f"{VARIABLE} is set, but .* must be .*, got"):
        plugin.load()
