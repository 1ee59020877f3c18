"""What the adapter expects of vLLM, held to the classes of the one that is installed; its warm-up at a start."""

import gc
import inspect
import os
import weakref
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from compiled_sampler import Verification
from compiled_sampler.integrations.engine_interface import differences, found
from compiled_sampler.integrations.vllm import VARIABLE, install, plugin, uninstall
from compiled_sampler.integrations.vllm.engine_sampler import EngineSampler, verifications
from compiled_sampler.integrations.vllm.parameters import (
    ENGINES,
    MAPPED,
    REFUSED,
    Settings,
    settings_of_text,
    unsupported,
)
from compiled_sampler.integrations.vllm.v1_sampler import RunnerSampler, RunnerState
from compiled_sampler.integrations.vllm.versions import BUILTIN_PROCESSORS, INTERFACE, check_version, unsupported_engine
from graph_cache import PinnedRing
from tests.engines.published_engine import without
from tests.engines.vllm_stand_in import runner

pytestmark = pytest.mark.full

ATTRIBUTES = INTERFACE.attributes
V, HIDDEN = 40, 8


@pytest.fixture(autouse=True)
def clean():
    uninstall()
    yield
    uninstall()


def test_the_installed_version_has_everything():
    assert differences(INTERFACE, found) == []
    check_version(vllm.__version__)


@pytest.mark.parametrize("name", [*INTERFACE.parameters, *INTERFACE.fields, *ATTRIBUTES])
def test_a_version_that_lacks_something_or_where_it_differs_is_refused_by_its_name(name):
    with pytest.raises(ImportError, match=f"must have {name.replace('.', '[.]')}, got 9.9.9, .*install a version from"):
        check_version("9.9.9", without(name))
    other = SimpleNamespace(_fields=("other",)) if name in INTERFACE.fields else lambda other: None
    differing = differences(INTERFACE, lambda asked: other if asked == name else found(asked))
    assert name in differing or not ATTRIBUTES.get(name, True)


@pytest.mark.parametrize("version", ["0.31.4", "0.9.1", "dev"])
def test_an_older_version_is_refused_with_those_that_work(version):
    with pytest.raises(ImportError, match=r"must be 0.32 or newer, got .*; install a version from 0.32 to 0.32"):
        check_version(version)


def test_each_field_of_a_request_is_mapped_or_the_engines_or_refused():
    fields = set(vllm.SamplingParams.__struct_fields__)
    assert fields == MAPPED | ENGINES | set(REFUSED)
    assert not MAPPED & ENGINES
    assert unsupported(vllm.SamplingParams()) is None
    for name, value in {"logprob_token_ids": [1], "thinking_token_budget": 3, "watermarking": True}.items():
        assert name in str(unsupported(vllm.SamplingParams(**{name: value})))


def test_positions_of_an_input_batch_are_those_of_the_drawn_tokens():
    batch = InputBatch(4, 64, 64, torch.device("cpu"), 100, [16], [4])
    for request_id, prompt, drawn in (("a", [1, 2, 3], []), ("b", [4], [5, 6])):
        given = {"prompt_token_ids": prompt, "output_token_ids": drawn, "mm_features": [], "num_computed_tokens": 0}
        given |= {"sampling_params": vllm.SamplingParams(), "generator": None, "block_ids": ([0],)}
        batch.add_request(CachedRequestState(request_id, **given))
    sampler, positions = RunnerSampler.__new__(RunnerSampler), torch.zeros(2, dtype=torch.int64)
    sampler._runner, sampler._ring = SimpleNamespace(input_batch=batch), PinnedRing(8, torch.device("cpu"))
    sampler._write_positions(positions)
    assert positions.tolist() == [3, 3]  # tokens before the drawn one; the input token of each is at 2


def test_positions_with_drafts_are_of_the_device_where_the_host_does_not_know_them():
    """Rows 0 to 2 are of a request with two drafts whose first input token is at 9, row 3 of one at 4."""
    fields = {"use_async_scheduling": True, "positions": torch.tensor([9, 10, 11, 4, 99])}
    drafts = {"logits_indices": torch.tensor([0, 1, 2, 3]), "bonus_logits_indices": torch.tensor([2, 3])}
    sampler, positions = RunnerSampler.__new__(RunnerSampler), torch.zeros(2, dtype=torch.int64)
    sampler._runner = SimpleNamespace(**fields)
    plan = SimpleNamespace(counts=torch.tensor([2, 0]))
    sampler._write_positions(positions, SimpleNamespace(**drafts), plan)
    assert positions.tolist() == [10, 5]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, "None"),
        ({"use_async_scheduling": True}, "None"),
        ({"logprobs_mode": "processed_logits"}, "logprobs_mode"),
        ({"speculative_config": SimpleNamespace(rejection_sample_method="synthetic")}, "rejection_sample_method"),
        ({"speculative_config": SimpleNamespace(rejection_sample_method="fly")}, "rejection_sample_method"),
        ({"watermark_config": SimpleNamespace()}, "watermark_config"),
        ({"return_sampling_mask": True}, "return_sampling_mask"),
        ({"is_diffusion": True}, "diffusion"),
        ({"logitsprocs": [SimpleNamespace()]}, "logits_processors must be vLLM's own, got SimpleNamespace"),
    ],
)
def test_an_engine_that_cannot_be_served_is_named(changed, named):
    assert named in str(unsupported_engine(runner(**changed)))


def test_the_processors_of_an_engine_are_known():
    from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS

    assert sorted(each.__name__ for each in BUILTIN_LOGITS_PROCESSORS) == sorted(BUILTIN_PROCESSORS)


def test_it_is_installed_once_and_taken_back():
    before = GPUModelRunner._sample, GPUModelRunner.__init__, vllm.SamplingParams._validate_spec_decode
    install()
    first = GPUModelRunner._sample
    install(rule="rejection", on_unsupported="stock")
    plugin.load()
    assert GPUModelRunner._sample is first is not before[0]
    assert os.environ[VARIABLE] == "on_unsupported=stock,rule=rejection"
    uninstall()
    assert before == (GPUModelRunner._sample, GPUModelRunner.__init__, vllm.SamplingParams._validate_spec_decode)
    assert VARIABLE not in os.environ


def test_vllm_finds_the_plugin_which_does_nothing_unless_it_is_told(monkeypatch):
    (entry,) = entry_points(group="vllm.general_plugins", name="compiled_sampler")
    before = GPUModelRunner._sample
    entry.load()()
    assert GPUModelRunner._sample is before
    monkeypatch.setenv(VARIABLE, "1")
    entry.load()()
    assert GPUModelRunner._sample is not before


def test_the_word_that_v2_runners_needed_is_taken_with_a_warning_and_no_other():
    with pytest.warns(DeprecationWarning, match="v2='untested' is the default now"):
        install(v2="untested")
    with pytest.raises(ValueError, match=r"v2 must be one of .*, got 'refuse'; leave it out"):
        install(v2="refuse")
    with pytest.warns(DeprecationWarning, match="is the default now"):
        assert settings_of_text("v2=untested,backend=eager") == Settings(backend="eager")


@pytest.fixture
def warmed(monkeypatch):
    """The samplers that are warmed up, which compile nothing here."""
    found = []
    monkeypatch.setattr(EngineSampler, "warm_up", lambda self: found.append(self))
    return found


def test_a_state_makes_the_sampler_of_its_batches_once(warmed):
    state = RunnerState(runner(), Settings(backend="eager"))
    state.warm_up(torch.zeros(3, HIDDEN))
    state.warm_up(torch.zeros(3, HIDDEN))
    (made,) = warmed
    assert (made.sampler.vocab_size, made.sampler.max_num_requests) == (V, 4)
    assert made.sampler.logits_dtype is torch.bfloat16
    assert state._sampler_of(torch.zeros(2, V)).engine is made
    assert state.counts == {"batches": 0, "stock_batches": 0}


def test_nothing_is_prepared_where_it_is_off_or_vllm_draws(warmed):
    RunnerState(runner(), Settings(warmup="off")).warm_up(torch.zeros(3, HIDDEN))
    RunnerState(runner(is_diffusion=True), Settings(on_unsupported="stock")).warm_up(torch.zeros(3, HIDDEN))
    assert warmed == []


@pytest.mark.parametrize(
    ("num_drafts", "method", "rule", "wanted"),
    [
        (0, "greedy", "block", ()),
        (3, "probabilistic", "match", (Verification("match", 3),)),
        (3, "greedy", "rejection", (Verification("match", 3),)),
        (2, "probabilistic", "block", (Verification("match", 2), Verification("block", 2, "probabilities"))),
    ],
)
def test_drafts_are_prepared_for_as_they_will_be_verified(num_drafts, method, rule, wanted):
    config = runner(num_drafts).vllm_config
    if num_drafts:
        config.speculative_config.draft_sample_method = method
    assert verifications(config, rule) == wanted


def held_runner(order):
    """One that an installed adapter holds."""
    install(backend="eager")
    made = Runner(order)
    plugin._INSTALLED.hold(made, RunnerState(runner(), Settings(backend="eager")))
    return made


def test_the_cpu_worker_warms_up_before_the_engine_serves(monkeypatch, warmed):
    monkeypatch.setattr("vllm.distributed.parallel_state.get_pp_group", lambda: SimpleNamespace(is_last_rank=True))
    order = []
    monkeypatch.setattr(CPUWorker, "compile_or_warm_up_model", lambda self: order.append(f"{len(warmed)} warmed"))
    for each in (held_runner(order), Runner(order)):  # the other was there before the adapter
        CPUWorker.compile_or_warm_up_model(SimpleNamespace(model_runner=each))
    assert order == ["1 row", "1 warmed", "1 warmed"]


def test_a_runner_is_freed_with_its_engine_and_counted_until_then():
    install(backend="eager")

    class OfEngine:
        is_pooling_model = False
        __init__ = plugin._checked_init(lambda self: vars(self).update(vars(runner())))

    made = OfEngine()
    plugin.state_of(made).counts["batches"] = 3
    assert plugin.statistics()["batches"] == 3
    freed = weakref.ref(made)
    del made
    gc.collect()
    assert freed() is None
    assert plugin.statistics()["batches"] == 0


def test_elsewhere_the_runner_does_behind_vllms_own_sampler_unless_it_is_an_encoder_alone(monkeypatch, warmed):
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    order, before = [], CPUWorker.compile_or_warm_up_model

    def stock(self, hidden_states):
        order.append(f"{len(warmed)} warmed")
        return hidden_states[:, 0]  # of an encoder nothing

    monkeypatch.setattr(GPUModelRunner, "_dummy_sampler_run", stock)
    of_worker = held_runner(order)
    assert CPUWorker.compile_or_warm_up_model is before
    for each, rows in ((of_worker, 0), (of_worker, 3), (Runner(order), 3)):
        assert len(GPUModelRunner._dummy_sampler_run(each, torch.zeros(rows, HIDDEN))) == rows
    assert order == ["0 warmed", "0 warmed", "1 warmed"]
    uninstall()
    assert GPUModelRunner._dummy_sampler_run is stock


class Runner:
    """A key of the adapter's table, whose dummy run says how many rows it had."""

    def __init__(self, order):
        self._order = order

    def _dummy_run(self, num_tokens):
        self._order.append(f"{num_tokens} row")
        return None, torch.zeros(num_tokens, HIDDEN)


def test_vllm_calls_them_where_the_adapter_expects_it():
    """The GPU worker behind its captures, but before it watches for late compilation; the CPU worker not at all."""
    of_gpu = inspect.getsource(Worker.compile_or_warm_up_model)
    places = [of_gpu.index(each) for each in ("capture_model()", "_dummy_sampler_run(", "_maybe_activate_jit_monitor")]
    assert places == sorted(places)
    assert "_dummy_sampler_run(last_hidden_states)" in inspect.getsource(GPUModelRunner.profile_run)
    assert "_dummy_sampler_run" not in inspect.getsource(CPUWorker.compile_or_warm_up_model)
    assert list(inspect.signature(CPUWorker.compile_or_warm_up_model).parameters) == ["self"]
    assert "num_tokens" in inspect.signature(GPUModelRunner._dummy_run).parameters
