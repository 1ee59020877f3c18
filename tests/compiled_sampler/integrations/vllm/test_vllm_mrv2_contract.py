"""What the adapter expects of vLLM's V2 samplers, held to the classes that are installed; no V2 runner is run."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from compiled_sampler.integrations.engine_interface import differences, found
from compiled_sampler.integrations.vllm import install, mrv2_drawing, statistics, uninstall
from compiled_sampler.integrations.vllm.versions import check_version
from tests.engines.published_engine import without
from tests.engines.vllm_stand_in import context_of, sampler_of, states_of

pytestmark = pytest.mark.full

VOCAB = 100
REQUESTS: dict[int, dict[str, Any]] = {
    7: {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 11},
    0: {"temperature": 0.0, "seed": 1},
    11: {"temperature": 1.3, "seed": 3},
}
SLOTS, POSITIONS = list(REQUESTS), [3, 0, 100]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    uninstall()
    yield
    uninstall()


def real_sampler(**changed: Any) -> Any:
    """Classes of vLLM, with fields on the CPU; their ``__init__`` needs a GPU."""
    states = states_of(VOCAB, REQUESTS, SamplingStates.__new__(SamplingStates))
    return sampler_of(states, sampler=SamplerV2.__new__(SamplerV2), **changed)


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def test_the_installed_version_has_everything() -> None:
    assert differences(mrv2_drawing.INTERFACE, found) == []


@pytest.mark.parametrize("name", [name for table in mrv2_drawing.INTERFACE for name in table])
def test_a_version_that_lacks_something_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ImportError, match=f"must have {re.escape(name)}, got 9.9.9"):
        check_version("9.9.9", without(name), mrv2_drawing.INTERFACE)


@pytest.mark.parametrize("edits", [False, True])
def test_the_edited_logits_are_those_of_vllms_own_method_without_temperature_and_filters(edits: bool) -> None:
    sampler = real_sampler(edits=edits)
    sampler.sampling_states.temperature.np[:] = 1.0  # vLLM's kernels for other temperatures need a GPU
    context, logits = context_of(SLOTS, [1] * 3, POSITIONS, torch.zeros(3)), logits_of(3)
    stock = SamplerV2.apply_sampling_params(sampler, logits, **context, skip_top_k_top_p=True)
    assert torch.equal(mrv2_drawing.edited_logits(sampler, logits, LogitsContext(**context)), stock)
    assert torch.equal(stock, logits) is not edits


def test_vllms_sampler_draws_by_the_adapter_where_it_is_told() -> None:
    before = SamplerV2.sample, RejectionSampler._verify
    install()
    assert (SamplerV2.sample, RejectionSampler._verify) == before
    install(v2="untested", backend="eager")
    sampler, logits = real_sampler(edits=True), logits_of(3)
    context = context_of(SLOTS, [1] * 3, POSITIONS, torch.zeros(3))
    tokens, _ = sampler.sample(logits, *context_in_order(context), return_logprobs=False)
    wanted, _ = mrv2_drawing.sample(sampler, logits, LogitsContext(**context), "eager")
    assert tokens.tolist() == wanted.tolist()
    assert statistics()["batches"] == 1
    uninstall()
    assert (SamplerV2.sample, RejectionSampler._verify) == before


def context_in_order(context: dict[str, Any]) -> tuple[Any, ...]:
    """The fields as vLLM's ``Sampler.__call__`` passes them, by place."""
    order = ("expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos", "input_ids", "expanded_local_pos")
    return (*(context[name] for name in order), context["seq_lens_upper_bound_np"])


def test_vllms_verifier_verifies_by_the_adapter_from_its_own_chunks() -> None:
    """``_verify_in_chunks`` of vLLM, in one chunk and in several, calls what the adapter put there."""
    install(v2="untested", backend="eager")
    counts, verifier = [3, 1, 2], RejectionSampler.__new__(RejectionSampler)
    verifier.sampler, verifier.num_speculative_steps = real_sampler(), 2
    verifier.enable_adaptive_verification = False
    first, inputs = torch.tensor([0, 3, 4, 6], dtype=torch.int32), torch.arange(6, dtype=torch.int32)
    context, logits = context_of(SLOTS, counts, POSITIONS, inputs), logits_of(6)
    batch = type("Batch", (), {})()
    batch.cu_num_logits, batch.cu_num_logits_np, batch.num_reqs = first, first.numpy(), 3
    batch.seq_lens_cpu_upper_bound = torch.from_numpy(context["seq_lens_upper_bound_np"])
    for name in ("idx_mapping", "idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos"):
        setattr(batch, name, context[name])
    wanted = mrv2_drawing.verify(verifier, logits, LogitsContext(**context), first, inputs, "eager")
    for rows in (100, 3):
        made = verifier._verify_in_chunks(logits, batch, None, inputs, context["pos"], rows, -1)
        assert made[0].tolist() == wanted[1].tolist()
        assert made[1].tolist() == wanted[2].tolist()
        assert made[2:] == (None, None)
    assert statistics()["batches"] == 3


def test_a_runner_is_made_where_it_is_told_and_a_rule_that_it_has_not_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from types import SimpleNamespace

    def init(self: Any) -> None:
        self.vllm_config = SimpleNamespace(speculative_config=None, watermark_config=None)

    monkeypatch.setattr(GPUModelRunner, "__init__", init)
    install(v2="untested")
    GPUModelRunner()
    install(v2="untested", rule="block")
    with pytest.raises(RuntimeError, match="rule must be 'match' with a V2 runner, got 'block'"):
        GPUModelRunner()


def test_seeds_and_numbers_are_kept_as_the_adapter_reads_them() -> None:
    """The method ``add_request`` writes what the stand-in holds: float32 numbers, V for no top_k, int64 seeds."""
    from vllm import SamplingParams

    states = states_of(VOCAB, {}, SamplingStates.__new__(SamplingStates))
    states.seeds_set, states.num_logprobs = np.zeros(12, bool), np.zeros(12, np.int32)
    states.add_request(5, SamplingParams(temperature=0.7, top_k=-1, top_p=0.9, min_p=0.1, seed=2**40))
    arguments = mrv2_drawing.law_arguments(states, mrv2_drawing.Rows(torch.tensor([5]), np.array([5])))
    assert arguments["top_k"] == 0
    assert [arguments[name].item() for name in ("temperature", "top_p", "min_p")] == [
        float(np.float32(each)) for each in (0.7, 0.9, 0.1)
    ]
    assert arguments["seeds"].tolist() == [2**40]
