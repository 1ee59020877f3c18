"""Continuous batching of transformers with our draw: the tokens of ``generate``, on the CPU and on CUDA."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

import functools

import pytest
from transformers.generation import LogitsProcessorList, TopKLogitsWarper
from transformers.generation.configuration_utils import CompileConfig
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.model_runner import ModelRunner

from compiled_sampler import functional
from compiled_sampler.functional import warmup
from compiled_sampler.integrations.engine_interface import seed_of
from compiled_sampler.integrations.transformers import continuous_batching
from compiled_sampler.integrations.transformers.continuous_batching import (
    SeededProcessors,
    SeededRunner,
    drawn_positions,
    generate_batch,
    installed,
)
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.scalars import as_int64
from tests.engines.tiny_models import LAWS, PROMPTS, SEEDS, batched, cache_of, config_of, generated, tiny_model

pytestmark = pytest.mark.full

ALL = range(len(PROMPTS))
CLASSES = {name: getattr(continuous_api, name) for name in ("ModelRunner", "ContinuousBatchingLogitsProcessorList")}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(autouse=True)
def kept_classes():
    """The classes of transformers stand again behind every test."""
    yield
    assert {name: getattr(continuous_api, name) for name in CLASSES} == CLASSES


@pytest.mark.parametrize(("family", "law"), [*(("Qwen3", law) for law in LAWS), ("Llama", "k_p")])
def test_tokens_are_those_of_generate(family, law):
    model = tiny_model(family)
    assert batched(model, ALL, LAWS[law]) == generated(model, ALL, LAWS[law])


def test_tokens_do_not_depend_on_who_runs_beside(model):
    together = batched(model, ALL, LAWS["k_p"])
    assert batched(model, [3, 1, 0, 2], LAWS["k_p"]) == [together[row] for row in (3, 1, 0, 2)]
    assert [batched(model, [row], LAWS["k_p"])[0] for row in ALL] == together
    assert len({tuple(each) for each in together}) == len(PROMPTS)


@pytest.mark.parametrize(
    "cache", [{"max_requests_per_batch": 2}, {"max_batch_tokens": 4}, {"allow_block_sharing": False}]
)
def test_small_batches_and_prompts_read_in_parts_change_no_token(model, cache):
    assert batched(model, ALL, LAWS["k_p"], **cache) == batched(model, ALL, LAWS["k_p"])


def test_the_compiled_backend_draws_the_same(model):
    assert batched(model, ALL, LAWS["k_p"], backend="auto") == batched(model, ALL, LAWS["k_p"])


def served(model, requests):
    """What a manager gives for each request, its prompt with its keywords."""
    given = {"generation_config": config_of(), "continuous_batching_config": cache_of(per_request_processors=True)}
    found = {}
    with installed("eager"), model.continuous_batching_context_manager(**given) as manager:
        names = [manager.add_request(prompt, **keywords) for prompt, keywords in requests]
        while len(found) < len(names):
            output = manager.get_result(timeout=5)
            assert output is not None or manager.is_running()
            if output is not None:
                found[output.request_id] = output
    return [found[name] for name in names]


def test_each_request_may_have_its_own_parameters(model):
    laws = [{"temperature": 0.7, "top_k": 9}, {"top_p": 0.6}, {"min_p": 0.1, "temperature": 1.9}, {}]
    outputs = served(model, [(PROMPTS[n], {"seed": SEEDS[n], **laws[n]}) for n in ALL])
    for n in ALL:
        assert [outputs[n].generated_tokens] == generated(model, [n], laws[n])


def test_keywords_out_of_range_and_unknown_ones_fail_their_request_alone(model):
    wrong = [{"seed": 2**64}, {"top_p": 1.5}, {"typical_p": 0.5}, {"seed": "1"}]
    *failed, right = served(model, [(PROMPTS[0], {"seed": 3, **each}) for each in (*wrong, {})])
    assert right.error is None
    for output, keyword in zip(failed, wrong, strict=True):
        assert next(iter(keyword)) in output.error


def test_requests_without_seeds_get_one_from_the_seed_of_the_config_and_their_name(model):
    def run(seed):
        with installed("eager"):
            outputs = model.generate_batch([PROMPTS[0]] * 3, config_of(), cache_of(seed=seed))
        return [output.generated_tokens for output in outputs.values()]

    first = run(5)
    assert run(5) == first
    assert run(6) != first
    assert len({tuple(each) for each in first}) == 3


def test_a_seed_that_is_not_given_is_that_of_every_engine():
    processors = SeededProcessors(LogitsProcessorList())
    processors.salt = 2**61
    arguments = processors.prepare_tensor_args([request_of("req_7")], torch.zeros(2, 4, dtype=torch.int32))
    assert processors.numbers(arguments, 1)[0].tolist() == [as_int64(seed_of("req_7", 2**61))]


def test_logprobs_are_of_the_law_that_was_drawn_from(model):
    law = {"top_k": 20, "top_p": 0.9, "temperature": 0.8}
    given = config_of(**law), cache_of(return_logprobs=True)
    (output,) = generate_batch(model, PROMPTS[:1], SEEDS[:1], *given, backend="eager")
    tokens, width = torch.tensor(output.generated_tokens), len(PROMPTS[0])
    with torch.no_grad():
        logits = model(torch.cat([torch.tensor(PROMPTS[0]), tokens])[None]).logits[0, width - 1 : -1].float()
    wanted = functional.probs(logits, **law, backend="eager").gather(1, tokens[:, None]).log()
    torch.testing.assert_close(torch.tensor(output.logprobs), wanted[:, 0], rtol=0, atol=1e-5)


def test_the_position_of_a_drawn_token_is_one_behind_that_of_its_input_token():
    data = {"position_ids": torch.tensor([[0, 1, 2, 7, 0]], dtype=torch.int32), "logits_indices": torch.tensor([2, 3])}
    assert drawn_positions(data).tolist() == [3, 8]
    assert drawn_positions(data).dtype == torch.int64


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"repetition_penalty": 1.3}, "penalties"),
        ({"min_length": 3}, "min_tokens"),
        ({"bad_words_ids": [[4]], "suppress_tokens": [5]}, "bad_words, logit_bias"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"typical_p": 0.5}, "typical_p"),
    ],
)
def test_fields_that_continuous_batching_cannot_honour_are_refused_by_name(model, fields, named):
    with pytest.raises(ValueError, match=named):
        generate_batch(model, PROMPTS, SEEDS, config_of(**fields), cache_of(), backend="eager")


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`:UserWarning")
def test_a_manager_refuses_processors_that_it_cannot_run(model):
    given = {"generation_config": config_of(repetition_penalty=1.3), "continuous_batching_config": cache_of()}
    with installed("eager"), pytest.raises(ValueError, match="must have no RepetitionPenaltyLogitsProcessor"):
        model.init_continuous_batching(**given)
    twice = LogitsProcessorList([TopKLogitsWarper(3), TopKLogitsWarper(4)])
    with pytest.raises(ValueError, match="must have one TopKLogitsWarper, got two"):
        SeededProcessors(twice)


def test_processors_of_the_caller_run_before_the_sampler(model):
    def only_even(token_ids, scores):
        odd = torch.arange(scores.shape[1]) % 2 == 1
        return scores.masked_fill(odd, -torch.inf)

    processors = SeededProcessors(LogitsProcessorList([only_even]))
    scores = processors(torch.zeros(2), torch.randn(2, 10), torch.zeros(2, 2, dtype=torch.int32))
    assert scores.isfinite().sum(1).tolist() == [5, 5]
    assert processors.tensors_required == 2


def request_of(name="r", draws=True, **given):
    """What transformers hands over of a request."""
    state = SimpleNamespace(logit_processor_kwargs=given, request_id=name)
    return SimpleNamespace(has_new_token=draws, state=state)


def test_numbers_of_64_bits_pass_through_two_words():
    processors = SeededProcessors(LogitsProcessorList(), per_request_processors=True)
    first = request_of(seed=2**64 - 1, temperature=0.1, top_k=7, top_p=0.9, min_p=1e-9)
    arguments = processors.prepare_tensor_args(
        [first, request_of(seed=-(2**63))], torch.zeros(10, 4, dtype=torch.int32)
    )
    seeds, found = processors.numbers(arguments, 2)
    assert seeds.tolist() == [-1, -(2**63)]
    assert {name: each.tolist() for name, each in found.items()} == {
        "temperature": [0.1, 1.0],
        "top_k": [7, 0],
        "top_p": [0.9, 1.0],
        "min_p": [1e-9, 0.0],
    }


def test_a_batch_in_which_no_request_draws_writes_nothing():
    processors = SeededProcessors(LogitsProcessorList(), per_request_processors=True)
    storage = torch.full((10, 4), 7, dtype=torch.int32)
    assert processors.prepare_tensor_args([request_of(draws=False)], storage).eq(7).all()


def test_numbers_are_written_when_other_requests_draw_and_for_each_storage():
    processors = SeededProcessors(LogitsProcessorList())
    first, second = (request_of(name, seed=7) for name in "ab")
    for storage in (torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)):
        processors.prepare_tensor_args([first], storage)
        assert processors.numbers(storage, 1)[0].tolist() == [7]
        storage.zero_()
        assert not processors.prepare_tensor_args([first], storage).any()
        assert processors.numbers(processors.prepare_tensor_args([second], storage), 1)[0].tolist() == [7]
        assert processors.numbers(processors.prepare_tensor_args([second, first], storage), 2)[0].tolist() == [7, 7]


def test_what_a_call_cannot_do_is_an_error(model):
    with pytest.raises(ValueError, match="seeds must be one for each of the 4 prompts, got 1"):
        generate_batch(model, PROMPTS, [1], config_of(), cache_of())
    with pytest.raises(ValueError, match="num_return_sequences must be 1, got 2"):
        generate_batch(model, PROMPTS, SEEDS, config_of(num_return_sequences=2), cache_of())
    with pytest.raises(ValueError, match=r"stop_strings must be None here, got .*END"):
        generate_batch(model, PROMPTS, SEEDS, config_of(stop_strings=["END"]), cache_of())
    with pytest.raises(ValueError, match="backend must be auto, compiled or eager, got 'graph'"), installed("graph"):
        pass
    assert generate_batch(model, [], [], config_of(), cache_of()) == []


def test_a_runner_refuses_compiled_steps_and_processors_from_before():
    config = cache_of(varlen_compile_config=CompileConfig())
    with pytest.raises(ValueError, match="varlen_compile_config must be None"):
        SeededRunner(SeededProcessors(LogitsProcessorList()), config, backend="eager")
    theirs = CLASSES["ContinuousBatchingLogitsProcessorList"](LogitsProcessorList())
    with pytest.raises(RuntimeError, match="made after install"):
        SeededRunner(theirs, cache_of(), backend="eager")


def test_a_row_without_a_token_ends_with_a_message(model):
    masking = model.lm_head.register_forward_hook(lambda _, __, logits: logits * torch.nan)
    try:
        with pytest.raises(RuntimeError, match=r"tokens are all masked|requests done"):
            batched(model, [0], {})
    finally:
        masking.remove()


def test_installing_twice_and_within_a_block_leaves_what_was_there():
    continuous_batching.install("eager")
    continuous_batching.install("eager")
    outer = continuous_api.ModelRunner
    with installed("auto"):
        assert continuous_api.ModelRunner is not outer
    assert continuous_api.ModelRunner is outer
    continuous_batching.uninstall()


def test_a_step_is_captured_once_its_draw_is_compiled(monkeypatch):
    captured = []
    monkeypatch.setattr(CompiledStages, "compiles_at_calls", False)  # as users have it
    monkeypatch.setattr(ModelRunner, "_capture_graph", lambda self, *given: captured.append(given))
    runner, drawn, rows = SeededRunner.__new__(SeededRunner), [], torch.arange(3)
    runner._backend = "auto"

    def step():
        drawn.append(functional.sample(torch.zeros(3, 1031), seeds=rows, positions=rows).token_ids.tolist())

    runner._capture_graph(step, None)
    assert not captured
    functional.warmup()
    runner._capture_graph(step, None)
    assert captured == [(step, None)]
    assert drawn[0] == drawn[1]


@pytest.fixture(scope="module")
def moved():
    return tiny_model().to("cuda")


@pytest.fixture
def captures(monkeypatch):
    """Every capture of a step that transformers makes."""
    from transformers.generation.continuous_batching.model_runner import ModelRunner

    made, original = [], ModelRunner._capture_graph

    @functools.wraps(original)  # its signature is checked
    def counted(self, *arguments):
        made.append(self)
        original(self, *arguments)

    monkeypatch.setattr(ModelRunner, "_capture_graph", counted)
    return made


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("law", ["k_p", "p", "temperature", "greedy"])
def test_tokens_are_those_of_the_cpu(moved, captures, law, is_graph, is_async, monkeypatch):
    monkeypatch.setattr(CompiledStages, "compiles_at_calls", False)  # as users have it
    cache = {"use_cuda_graph": is_graph, "use_async_batching": is_async}
    wanted = generated(tiny_model(), ALL, LAWS[law])
    assert batched(moved, ALL, LAWS[law], backend="auto", **cache) == wanted  # steps in eager torch are not captured
    warmup()
    drawn = batched(moved, ALL, LAWS[law], backend="auto", **cache)
    assert bool(captures) == is_graph
    assert drawn == wanted


def test_a_captured_step_draws_the_same_beside_others(moved):
    together = batched(moved, ALL, LAWS["k_p"], backend="auto", use_cuda_graph=True)
    turned = [3, 1, 0, 2]
    assert batched(moved, turned, LAWS["k_p"], backend="auto", use_cuda_graph=True) == [together[n] for n in turned]
    alone = [batched(moved, [n], LAWS["k_p"], backend="auto", use_cuda_graph=True)[0] for n in ALL]
    assert alone == together == generated(moved, ALL, LAWS["k_p"])


def test_logprobs_are_captured_too(moved):
    from compiled_sampler.integrations.transformers.continuous_batching import generate_batch
    from tests.engines.tiny_models import SEEDS, cache_of, config_of, eagerly_paged

    def logprobs(is_graph):
        cache = cache_of(use_cuda_graph=is_graph, return_logprobs=True)
        with eagerly_paged(moved):
            outputs = generate_batch(moved, PROMPTS, SEEDS, config_of(**LAWS["k_p"]), cache)
        return torch.tensor([value for output in outputs for value in output.logprobs])

    torch.testing.assert_close(logprobs(True), logprobs(False), rtol=0, atol=1e-5)
