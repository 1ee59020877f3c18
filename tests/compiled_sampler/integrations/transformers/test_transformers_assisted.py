"""``custom_generate=seeded_assisted`` inside ``generate``: the tokens of ``sample``, in fewer forward passes."""

import inspect
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import NoRepeatNGramLogitsProcessor

from compiled_sampler.integrations.transformers import sample, seeded_assisted
from tests.engines.tiny_models import padded, tiny_model

pytestmark = pytest.mark.full

PROMPTS = [[5, 6, 7, 8, 9], [9, 3], [7, 7, 7]]
SEEDS = [1, -5, 2**40]
LAWS: dict[str, dict[str, Any]] = {
    "k_p": {"top_k": 20, "top_p": 0.9},
    "greedy": {"do_sample": False},
    "edits": {"repetition_penalty": 1.4, "bad_words_ids": [[4], [6, 7]], "min_new_tokens": 20},
    "peaked": {"temperature": 0.2},
}


def run(model: Any, loop: Any, count: int = 3, **given: Any) -> Any:
    settings = {"seeds": SEEDS[:count], "sampler_backend": "eager", "max_new_tokens": 30, "do_sample": True}
    return model.generate(**padded(PROMPTS[:count]), custom_generate=loop, **{**settings, **given})


@pytest.fixture(scope="module")
def assisted() -> Any:
    """The loop with an assistant that is near the model."""
    return partial(seeded_assisted, assistant_model=tiny_model(noise=0.05))


def num_passes(model: Any, loop: Any, monkeypatch: pytest.MonkeyPatch, **given: Any) -> int:
    """Forward passes of a call."""
    passes, forward = [0], type(model).forward

    def counted(self: Any, *tensors: Any, **named: Any) -> Any:
        passes[0] += self is model
        return forward(self, *tensors, **named)

    counted.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", counted)
        run(model, loop, **given)
    return passes[0]


@pytest.mark.parametrize(
    ("family", "law", "count"),
    [("Qwen3", "k_p", 3), ("Qwen3", "greedy", 1), ("Llama", "edits", 3), ("Llama", "k_p", 1), ("Gemma", "peaked", 3)],
)
def test_an_assistant_changes_no_token(family: str, law: str, count: int) -> None:
    model, small = tiny_model(family), tiny_model(family, noise=0.1)
    loop = partial(seeded_assisted, assistant_model=small)
    assert torch.equal(run(model, loop, count, **LAWS[law]), run(model, sample, count, **LAWS[law]))


@pytest.mark.parametrize(("law", "count"), [("k_p", 3), ("greedy", 1), ("edits", 3), ("edits", 1), ("peaked", 3)])
def test_prompt_lookup_changes_no_token(law: str, count: int) -> None:
    model = tiny_model()
    given = {"max_new_tokens": 60, **LAWS[law]}
    found = run(model, seeded_assisted, count, prompt_lookup_num_tokens=3, **given)
    assert torch.equal(found, run(model, sample, count, **given))


@pytest.mark.parametrize("law", ["k_p", "edits"])
def test_an_assistant_with_a_larger_head_changes_no_token_and_drafts_none_of_its_rows_beyond(law: str) -> None:
    """Heads are padded to a multiple; the target has no embedding of such a draft. Their texts are unlike too."""
    model, larger = tiny_model(vocab_size=100), tiny_model(vocab_size=128, seed=5)
    loop = partial(seeded_assisted, assistant_model=larger)
    assert torch.equal(run(model, loop, **LAWS[law]), run(model, sample, **LAWS[law]))


def test_no_token_is_drawn_beyond_a_vocabulary_that_is_smaller_than_the_head() -> None:
    drawn = run(tiny_model(), sample, vocab_size=10, temperature=50.0, top_k=0)
    assert drawn.max() == 9


def test_a_near_assistant_saves_most_forward_passes(assisted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    given = {"min_new_tokens": 30}
    plain, num_assisted = (num_passes(model, each, monkeypatch, **given) for each in (sample, assisted))
    assert plain == 30
    assert num_assisted <= 15


def test_criteria_streamers_and_lengths_see_single_tokens(assisted: Any) -> None:
    model, seen = tiny_model(), list[int]()

    class Lengths(MaxLengthCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **named: Any) -> Any:
            seen.append(input_ids.shape[1])
            return super().__call__(input_ids, scores, **named)

    criteria = StoppingCriteriaList([Lengths(13)])
    assert run(model, assisted, stopping_criteria=criteria).shape[1] == 13
    assert seen == list(range(6, 14))
    assert run(model, assisted, max_new_tokens=1).shape[1] == 6


def test_batches_without_eos_draw_on(assisted: Any) -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = None
    assert torch.equal(run(model, assisted), run(model, sample))
    assert run(model, assisted).shape[1] == 35


def test_processors_of_the_caller_see_the_text_before_each_draft(assisted: Any) -> None:
    model = tiny_model()
    given = {"logits_processor": LogitsProcessorList([NoRepeatNGramLogitsProcessor(1)])}
    assert torch.equal(run(model, assisted, **given), run(model, sample, **given))


def test_scores_and_logits_are_those_of_single_tokens(assisted: Any) -> None:
    model = tiny_model()
    given = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "min_new_tokens": 30}
    made, plain = run(model, assisted, **given), run(model, sample, **given)
    assert torch.equal(made.sequences, plain.sequences)
    for name in ("scores", "logits"):
        assert len(made[name]) == len(plain[name]) == 30
        for ours, other in zip(made[name], plain[name], strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-5)


def test_seeds_that_the_sampler_draws_are_handed_to_the_assistant(assisted: Any) -> None:
    model = tiny_model()
    drawn = []
    for each in (assisted, sample):
        torch.manual_seed(3)
        drawn.append(run(model, each, seeds=None))
    assert torch.equal(*drawn)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "assistant_model or prompt_lookup_num_tokens must be given, got neither"),
        ({"prompt_lookup_num_tokens": 3, "use_cache": False}, "use_cache must be True for drafts"),
        (
            {"prompt_lookup_num_tokens": 3, "return_dict_in_generate": True, "output_hidden_states": True},
            "output_hidden_states must be False with drafts",
        ),
        ({"prompt_lookup_num_tokens": 3, "typical_p": 0.4}, "typical_p must be 1"),
        ({"assistant_early_exit": 1}, "assistant_early_exit must be None here"),
    ],
)
def test_what_the_loop_cannot_do_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(tiny_model(), seeded_assisted, **given)
