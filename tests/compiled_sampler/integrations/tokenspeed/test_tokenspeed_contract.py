"""What the adapter expects of TokenSpeed, held to its published source; TokenSpeed itself is not run."""

import os
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.integrations.engine_interface import differences, found
from compiled_sampler.integrations.tokenspeed.pools import UNSUPPORTED
from compiled_sampler.integrations.tokenspeed.settings import PLACES, VARIABLE, Settings, from_text
from compiled_sampler.integrations.tokenspeed.versions import EXECUTOR, INTERFACE, OLDEST, PARAMS, check_version
from tests.engines.published_engine import require_source, run_example, without
from tests.engines.tokenspeed_engine import TOP_K_DISABLED, config_of, engine, named
from tools.engines.published_source import ROOT, unpacked_version

NAMES = [name for table in INTERFACE for name in table]
VOCAB = 64


@pytest.fixture
def modules() -> Iterator[None]:
    with engine("published"):
        yield


@pytest.mark.usefixtures("modules")
def test_the_published_source_has_everything() -> None:
    assert differences(INTERFACE, found) == []
    check_version(unpacked_version("tokenspeed"))


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("name", NAMES)
def test_a_version_that_lacks_something_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ImportError, match=f"must have {re.escape(name)}, got 9.9.9, where it differs; install"):
        check_version("9.9.9", without(name))


@pytest.mark.parametrize("version", ["0.1.0", "0.0.9", "dev"])
def test_an_older_version_is_refused_with_those_that_work(version: str) -> None:
    with pytest.raises(ImportError, match=rf"must be {OLDEST} or newer, got {version}; install a version"):
        check_version(version)


def test_what_is_relied_on_and_not_called_is_in_the_source() -> None:
    runtime = require_source("tokenspeed") / "tokenspeed" / "runtime"
    assert 'ENTRY_POINT_GROUP = "tokenspeed.plugins"' in (runtime / "plugins" / "__init__.py").read_text()
    assert f"_TOP_K_DISABLED = 1 << {TOP_K_DISABLED.bit_length() - 1}\n" in (
        (runtime / "sampling" / "sampling_params.py").read_text()
    )
    arguments = (runtime / "utils" / "server_args.py").read_text()
    choices = re.search(r'"--sampling-backend",\s+type=str,\s+choices=\[(.*?)\]', arguments, re.DOTALL)
    assert choices is not None
    assert tuple(re.findall(r'"(\w+)"', choices[1])) == PLACES
    cache = (runtime / "execution" / "cache_loc_kernel.py").read_text()
    assert "torch.add(input_lengths, valid_cache_lengths, out=seq_lens)" in cache


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", None),
        ("0", None),
        ("1", Settings()),
        ("triton", Settings("triton")),
        ("greedy,eager", Settings("greedy", "eager")),
        ("1,compiled", Settings(None, "compiled")),
    ],
)
def test_the_variable_holds_the_settings(text: str, settings: Settings | None) -> None:
    assert from_text(text) == settings
    assert settings is None or from_text(settings.text) == settings
    for wrong, field in (("vllm", "instead_of"), ("triton,graph", "backend")):
        with pytest.raises(ValueError, match=f"{field} must be one of"):
            from_text(wrong)


@pytest.fixture
def plugin(modules: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the adapter, with TokenSpeed's version known and the variable put back behind the test."""
    from compiled_sampler.integrations.tokenspeed import plugin

    monkeypatch.setattr(plugin, "version", lambda name: unpacked_version(name))
    monkeypatch.setenv(VARIABLE, "0")
    return plugin


def test_tokenspeed_finds_the_plugin_which_does_nothing_unless_it_is_told(plugin: Any) -> None:
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert entries["tokenspeed.plugins"] == {"compiled_sampler": "compiled_sampler.integrations.tokenspeed.plugin:load"}
    plugin.load()
    assert not import_module("tokenspeed.runtime.sampling.registry")._BACKEND_REGISTRY  # type: ignore[attr-defined]


@pytest.mark.parametrize("place", [None, PLACES[0]])
def test_tokenspeed_makes_the_adapter_under_its_name_and_under_the_one_that_it_takes(
    plugin: Any, place: str | None
) -> None:
    from tokenspeed.runtime.sampling.registry import create_sampling_backend

    plugin.install(instead_of=place, backend="eager")
    plugin.load()
    assert os.environ[VARIABLE] == f"{place or 1},eager"
    config = config_of(VOCAB)
    arguments = {"sampling_stream": config.sampling_stream, "disable_sampling_tp_sync": True}
    for name in ("logprob_order", "enable_nan_detection", "enable_output_logprobs", "enable_speculative_sampling"):
        arguments[name] = getattr(config, name)
    arguments["spec_reject_draft_prob_threshold"] = config.spec_reject_draft_prob_threshold
    for asked in (place or "compiled_sampler", "compiled_sampler"):
        server = SimpleNamespace(sampling_backend=asked, **arguments)
        made = create_sampling_backend(
            server, max_bs=2, max_draft_tokens_per_req=1, device="cpu", max_req_pool_size=3, vocab_size=VOCAB
        )
        assert (type(made).__name__, made.backend) == ("CompiledSamplingBackend", "eager")


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_request_with_edits_is_refused_where_tokenspeed_checks_it(plugin: Any, name: str) -> None:
    params = found(PARAMS)
    value: Any = {"5": 1.0} if name == "logit_bias" else 1.5
    params(**{name: value}).verify(VOCAB)
    plugin.install(backend="eager")
    params(temperature=0.5, top_k=5, top_p=0.9, min_p=0.1).verify(VOCAB)
    with pytest.raises(ValueError, match=f"{name} must be left out; the adapter of compiled_sampler has none"):
        params(**{name: value}).verify(VOCAB)


def test_an_executor_tells_the_backend_where_the_lengths_stand(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, bound = found(EXECUTOR), []

    def init(self: Any, backend: Any) -> None:
        self.sampling_backend, self.input_buffers = backend, SimpleNamespace(seq_lens_buf="buffer")

    monkeypatch.setattr(executor, "__init__", init)
    monkeypatch.setattr(plugin, "check_version", lambda version: None)  # __init__ is replaced
    plugin.install(backend="eager")
    executor(SimpleNamespace(bind_lengths=bound.append))
    executor(SimpleNamespace())  # a backend of TokenSpeed's own
    assert bound == ["buffer"]


def test_tokenspeeds_executor_draws_a_batch_of_prefills_and_decodes(plugin: Any) -> None:
    """Its method that runs the sampler, on a mixed batch: two prompts, one of them unfinished, and a decode."""
    from tokenspeed.runtime.execution.output_layout import ForwardOutputLayout

    from compiled_sampler.integrations.tokenspeed.drawing import CompiledSamplingBackend

    backend = type("Eager", (CompiledSamplingBackend,), {"backend": "eager"})(config_of(VOCAB))
    backend.bind_lengths(torch.tensor([10, 20, 9, 1, 1, 1, 1, 1], dtype=torch.int32))
    laws: list[dict[str, Any]] = [{"top_k": 5, "seed": 1}, {"seed": 2}, {"temperature": 0.7, "seed": 3}]
    params = [found(PARAMS)(**law) for law in laws]
    backend.prepare_step(["a", "b", "c"], [4, 2, 9], params)
    cached = torch.zeros(16, dtype=torch.int32)
    cached[9] = 8
    info = named("sampling_batch_info:SamplingBatchInfo")(
        req_pool_indices=torch.tensor([4, 2, 9]), valid_cache_lengths=cached
    )
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    layout = ForwardOutputLayout(num_extends=2, num_prefill_outputs=1, num_decodes=1, decode_width=1)
    context = SimpleNamespace(num_extends=2, bs=3, output_layout=layout, decode_input_ids=None)
    executor = found(EXECUTOR)
    itself = SimpleNamespace(
        sampling_backend=backend, tree_spec=None, _apply_force_single_token_verify=lambda lengths, *_: lengths
    )
    model: Any = import_module("tokenspeed.runtime.execution.model_executor")
    model.LogitsProcessorOutput = lambda next_token_logits: SimpleNamespace(
        next_token_logits=next_token_logits, next_token_logprobs=None
    )
    given = SimpleNamespace(next_token_logits=logits, next_token_logprobs=None)
    tokens, lengths = executor._run_sampling(itself, given, info, context, torch.zeros(1, 1, dtype=torch.int32))
    sampler = Sampler(VOCAB, 2, backend="eager")
    slots = [sampler.add_request(SamplingParams(**laws[row])) for row in (0, 2)]
    wanted = sampler.sample(sampler.plan(slots), logits, torch.tensor([10, 9])).token_ids
    assert tokens.tolist() == wanted.tolist()
    assert lengths.tolist() == [1, 0, 1]


def test_the_example_of_the_page_runs_up_to_the_engine(plugin: Any) -> None:
    """The engine itself is a mock: what stands before it is what a user types, and it must switch the adapter on."""
    run_example("TokenSpeed")
    assert from_text(os.environ[VARIABLE]) == Settings("triton")


@pytest.mark.parametrize(("text", "version"), [("1", "0.0.1"), ("fast", None)])
def test_a_process_ends_where_the_adapter_cannot_be_switched_on(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, text: str, version: str | None
) -> None:
    """TokenSpeed goes on behind an exception of a plugin, and would draw by a sampler that nobody asked for."""
    monkeypatch.setenv(VARIABLE, text)
    if version is not None:
        monkeypatch.setattr(plugin, "version", lambda name: version)
    with pytest.raises(SystemExit, match=f"{VARIABLE} is set, but .* must be .*, got"):
        plugin.load()
