"""``custom_generate`` of transformers, on tiny random models: ``sample``, and ``seeded_assisted``: the same draws."""

import inspect
from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import NoRepeatNGramLogitsProcessor, TemperatureLogitsWarper
from transformers.generation.streamers import BaseStreamer

from compiled_sampler import SamplingParams
from compiled_sampler.integrations.transformers import requests, sample, seeded_assisted
from tests.engines.tiny_models import (
    EOS,
    FAMILIES,
    PAD,
    VOCAB_SIZE,
    continuation,
    padded,
    slowly,
    tiny_model,
    with_larger_embedding,
)

pytestmark = pytest.mark.full

PROMPTS = [[5, 6, 7, 8, 9], [9, 3], [7, 7, 7]]
SEEDS = [1, -5, 2**40]
LAWS = {
    "temperature": {"top_k": 0, "temperature": 1.3},
    "k_p": {"top_k": 20, "top_p": 0.9, "temperature": 0.8},
    "p": {"top_k": 0, "top_p": 0.7},
    "min_p": {"top_k": 0, "min_p": 0.05},
    "default": {},
    "edits": {
        "repetition_penalty": 1.4,
        "bad_words_ids": [[4], [6, 7], [9, 3, 26]],
        "min_new_tokens": 5,
        "suppress_tokens": [11, 12],
        "sequence_bias": {(13,): 2.5},
    },
}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def run(model, prompts, seeds=None, **given):
    settings = {"custom_generate": sample, "sampler_backend": "eager", "max_new_tokens": 12, "do_sample": True}
    return model.generate(**padded(prompts), seeds=seeds, **{**settings, **given})


def continuations(tokens, prompts):
    return [continuation(row, max(map(len, prompts))) for row in tokens]


@pytest.mark.parametrize(
    ("family", "law", "backend"),
    [
        *(("Qwen3", law, "eager") for law in LAWS),
        *((family, "k_p", "eager") for family in FAMILIES[1:]),
        ("Qwen3", "k_p", "auto"),
    ],
)
def test_tokens_are_those_of_a_loop_without_cache_that_draws_by_the_definition(family, law, backend):
    model, fields = tiny_model(family), LAWS[law]
    config = model.generation_config.__class__(do_sample=True, eos_token_id=EOS, **fields)
    drawn = run(model, PROMPTS, SEEDS, sampler_backend=backend, **fields)
    for row, prompt, seed in zip(continuations(drawn, PROMPTS), PROMPTS, SEEDS, strict=True):
        params = SamplingParams.from_generation_config(config, seed)
        assert row == slowly(model, prompt, params, 12)


def test_the_position_of_a_token_is_one_behind_that_of_the_last_input_token(model):
    inputs = padded(PROMPTS)
    theirs = model._prepare_position_ids_for_generation(inputs["input_ids"], dict(inputs))[:, -1]
    ours = requests.first_positions(inputs["input_ids"], dict(inputs), model.generation_config)
    assert torch.equal(ours, theirs + 1)
    assert ours.tolist() == [len(prompt) for prompt in PROMPTS]
    unmasked = requests.first_positions(inputs["input_ids"], {}, object())
    assert unmasked.tolist() == [5, 5, 5]


def test_a_call_that_goes_on_from_a_cache_draws_the_same(model):
    whole = run(model, PROMPTS[:1], SEEDS[:1], max_new_tokens=8)
    first = run(model, PROMPTS[:1], SEEDS[:1], max_new_tokens=3, return_dict_in_generate=True)
    (name,) = {"cache", "past_key_values"} & set(first.keys())
    cache = {name: first[name]}
    given = {"max_new_tokens": 5, "do_sample": True, "seeds": SEEDS[:1], "sampler_backend": "eager"}
    assert torch.equal(model.generate(first.sequences, custom_generate=sample, **given, **cache), whole)
    assert torch.equal(model.generate(first.sequences, custom_generate=sample, use_cache=False, **given), whole)


def test_sequences_end_with_eos_and_are_padded(model):
    drawn = run(model, PROMPTS, SEEDS, max_new_tokens=60)
    ended = [row for row in drawn.tolist() if EOS in row[5:-1]]
    assert ended
    for row in ended:
        assert set(row[row.index(EOS) + 1 :]) == {PAD}
    early = run(model, PROMPTS, SEEDS, max_new_tokens=60, min_new_tokens=40)
    assert not (early[:, 5:45] == EOS).any()


def test_min_length_counts_the_prompt_of_a_sequence_without_padding(model):
    biased = {"sequence_bias": {(EOS,): 1e4}, "min_length": 8, "max_new_tokens": 10}
    rows = continuations(run(model, PROMPTS, SEEDS, **biased), PROMPTS)
    assert [len(prompt) + len(row) for prompt, row in zip(PROMPTS, rows, strict=True)] == [9, 9, 9]


def test_stopping_criteria_of_the_caller_and_max_length_end_a_call(model):
    assert run(model, PROMPTS, SEEDS, max_new_tokens=3).shape[1] == 8
    assert run(model, PROMPTS, SEEDS, max_new_tokens=None, max_length=9).shape[1] == 9
    criteria = StoppingCriteriaList([MaxLengthCriteria(7)])
    assert run(model, PROMPTS, SEEDS, stopping_criteria=criteria).shape[1] == 7


class Collected(BaseStreamer):
    """Keeps what it is given, and None at the end."""

    def __init__(self):
        self.parts = []

    def put(self, value):
        self.parts.append(value.flatten().tolist())

    def end(self):
        self.parts.append(None)


def test_a_streamer_gets_every_token(model):
    streamer = Collected()
    bound = partial(sample, streamer=streamer)
    drawn = run(model, PROMPTS[:1], SEEDS[:1], custom_generate=bound, streamer=streamer)
    *given, end = streamer.parts
    assert given[0] == PROMPTS[0]
    assert [token for part in given for token in part or ()] == drawn[0].tolist()
    assert end is None


def compared(model, input_ids, logits_processor, stopping_criteria, *, seeds, **given):
    """The loop, whose laws are compared with what the processors of transformers make of the same logits and text."""
    made = sample(model, input_ids, logits_processor, stopping_criteria, seeds=seeds, sampler_backend="eager", **given)
    for step, (law, logits) in enumerate(zip(made.scores, made.logits, strict=True)):
        text = made.sequences[:, : input_ids.shape[1] + step]
        theirs = logits_processor(text, logits.clone()).softmax(-1)
        goes_on = ~(text[:, input_ids.shape[1] :] == EOS).any(-1)
        torch.testing.assert_close(law[goes_on].exp(), theirs[goes_on], rtol=1e-4, atol=1e-6)
        assert law.gather(1, made.sequences[:, text.shape[1], None])[goes_on].isfinite().all()
        assert logits.dtype == torch.float32
    return made


@pytest.mark.parametrize("law", LAWS)
def test_scores_are_the_law_of_the_processors_of_transformers_that_each_token_was_drawn_from(model, law):
    unpadded = [[5, 6, 7], [9, 3, 26], [7, 7, 7]]  # stock penalties of 5.17 count padding as a token
    given = {"seeds": SEEDS, "max_new_tokens": 20, "do_sample": True, **LAWS[law]}
    shown = ("output_scores", "output_logits", "output_hidden_states", "output_attentions", "return_dict_in_generate")
    made = model.generate(**padded(unpadded), custom_generate=compared, **dict.fromkeys(shown, True), **given)
    assert len(made.scores) == len(made.hidden_states) == len(made.attentions) == made.sequences.shape[1] - 3
    drawn = model.generate(**padded(unpadded), custom_generate=sample, sampler_backend="eager", **given)
    assert torch.equal(made.sequences, drawn)


def test_torch_manual_seed_repeats_calls_without_seeds(model):
    drawn = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        drawn.append(run(model, PROMPTS))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_each_returned_sequence_has_a_seed_of_its_own(model):
    drawn = run(model, PROMPTS[:1], [1, 2, 1], num_return_sequences=3)
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    with pytest.raises(ValueError, match="seeds must be one for each of the 3 sequences, got 1; num_return_sequences"):
        run(model, PROMPTS[:1], [1], num_return_sequences=3)
    with pytest.raises(TypeError, match="seeds must be a sequence of ints"):
        run(model, PROMPTS[:1], 7)


def test_text_that_stops_and_returned_sequences_are_the_matter_of_generate(model):
    config = model.generation_config.__class__(stop_strings=["END"], num_return_sequences=3, do_sample=True)
    made, _ = requests.parameters(config, LogitsProcessorList(), [1], [3])
    assert made == [SamplingParams(top_k=50, seed=1, bad_words_scope="all")]
    assert (config.stop_strings, config.num_return_sequences) == (["END"], 3)


def only(token):
    """Masks all tokens but one; all for -1."""

    def masked(input_ids, scores):
        assert scores.dtype == torch.float32
        none = torch.full_like(scores, -torch.inf)
        return none if token < 0 else none.index_fill(1, torch.tensor([token]), 0.0)

    return LogitsProcessorList([masked])


def test_processors_of_the_caller_run_before_the_sampler(model):
    drawn = run(model, PROMPTS, SEEDS, logits_processor=only(42), max_new_tokens=3)
    assert (drawn[:, 5:] == 42).all()
    ngrams = LogitsProcessorList([NoRepeatNGramLogitsProcessor(1)])
    (row,) = run(model, PROMPTS[:1], SEEDS[:1], logits_processor=ngrams, max_new_tokens=30).tolist()
    assert len(set(row)) == len(row)


def test_an_own_processor_of_the_caller_counts_as_its_field(model):
    warped = run(model, PROMPTS, SEEDS, logits_processor=LogitsProcessorList([TemperatureLogitsWarper(0.5)]))
    assert torch.equal(warped, run(model, PROMPTS, SEEDS, temperature=0.5))
    twice = LogitsProcessorList([TemperatureLogitsWarper(0.5)])
    with pytest.raises(ValueError, match="logits_processor must have one TemperatureLogitsWarper, got two"):
        run(model, PROMPTS, SEEDS, logits_processor=twice, temperature=0.7)


def test_a_row_whose_tokens_are_all_masked_is_an_error(model):
    with pytest.raises(RuntimeError, match="each row of logits must have a token to draw"):
        run(model, PROMPTS, SEEDS, logits_processor=only(-1))


@pytest.mark.parametrize(
    ("field", "value"),
    [("typical_p", 0.5), ("num_beams", 2), ("guidance_scale", 1.5), ("prompt_lookup_num_tokens", 2)],
)
def test_a_field_that_the_sampler_does_not_have_is_refused_by_name(model, field, value):
    with pytest.raises(ValueError, match=f"^{field} must be "):
        run(model, PROMPTS, SEEDS, **{field: value})


FOREIGN = {
    "plain": {},
    "penalty": {"repetition_penalty": 1.5},
    "suppressed": {"suppress_tokens": [91, VOCAB_SIZE + 3]},
    "eos": {"eos_token_id": [EOS, VOCAB_SIZE + 2], "min_new_tokens": 4},
    "no eos": {"eos_token_id": VOCAB_SIZE + 2, "min_new_tokens": 4},
    "words": {"bad_words_ids": [[91, 91], [7, 91]]},
}


@pytest.mark.parametrize(
    ("field", "loop"),
    [*((field, sample) for field in FOREIGN), *((field, seeded_assisted) for field in ("penalty", "eos", "words"))],
)
def test_ids_that_no_logit_has_count_for_nothing_as_in_transformers(field, loop):
    """Placeholders of images in a prompt, eos and suppressed ids; drafts looked up behind one end before the next."""
    model = with_larger_embedding(tiny_model(), VOCAB_SIZE + 11)
    image = VOCAB_SIZE + 8
    prompts = torch.tensor([[5, image, image, 6, 7], [9, image, 3, image, 3]])
    given = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 8, "do_sample": False, **FOREIGN[field]}
    theirs = model.generate(prompts, **given)
    drafts = {"prompt_lookup_num_tokens": 3} if loop is seeded_assisted else {}
    ours = model.generate(prompts, custom_generate=loop, sampler_backend="eager", **drafts, **given)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("field", [{"sequence_bias": {(VOCAB_SIZE,): 2.0}}, {"bad_words_ids": [[VOCAB_SIZE]]}])
def test_what_a_caller_asks_of_an_id_that_no_logit_has_is_refused(model, field):
    with pytest.raises(ValueError, match=f"must be below vocab_size {VOCAB_SIZE}, got {VOCAB_SIZE}; leave it out"):
        run(model, PROMPTS, SEEDS, **field)


def test_padding_in_the_middle_of_a_row_counts_for_nothing(model):
    """P(9) is 0 for the row alone: it is in the prompt, before the padding."""
    alone = [9, 9, 6, 7, 8, 5]
    rows = torch.tensor([[9, 9, 6, 7, PAD, PAD, PAD, 8, 5], [9, 3, 4, 5, 6, 7, 8, 9, 3]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 1, 1], [1] * 9])
    shown = {"return_dict_in_generate": True, "output_scores": True}
    given = {"repetition_penalty": 1000.0, "bad_words_ids": [[7, 8, 5, 11]], "max_new_tokens": 6, **shown}
    one = run(model, [alone], [1], **given)
    settings = {"custom_generate": sample, "sampler_backend": "eager", "do_sample": True, **given}
    two = model.generate(rows, attention_mask=mask, seeds=[1, 2], **settings)
    assert two.sequences[0, 9:].tolist() == one.sequences[0, 6:].tolist()
    assert two.scores[0][0, 9] == one.scores[0][0, 9] == -torch.inf
    assert torch.equal(two.scores[0][0], one.scores[0][0])


def test_the_tokens_of_a_prompt_are_those_that_its_mask_marks():
    rows = torch.tensor([[9, 0, 9, 0], [1, 2, 3, 4]])
    mask = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 1]])
    assert requests.prompt_tokens(rows, {"attention_mask": mask}) == [[9, 9], [2, 3, 4]]
    cached = torch.cat([torch.ones(2, 3), mask], -1)
    assert requests.prompt_tokens(rows, {"attention_mask": cached}) == [[9, 9], [2, 3, 4]]
    assert requests.prompt_tokens(rows, {}) == rows.tolist()


DRAFTED_LAWS = {
    "k_p": {"top_k": 20, "top_p": 0.9},
    "greedy": {"do_sample": False},
    "edits": {"repetition_penalty": 1.4, "bad_words_ids": [[4], [6, 7]], "min_new_tokens": 20},
    "peaked": {"temperature": 0.2},
}


def run_loop(model, loop, count=3, seeds=SEEDS, **given):
    chosen = {"custom_generate": loop, "max_new_tokens": 30, **given}
    return run(model, PROMPTS[:count], seeds and seeds[:count], **chosen)


@pytest.fixture(scope="module")
def assisted():
    """The loop with an assistant that is near the model."""
    return partial(seeded_assisted, assistant_model=tiny_model(noise=0.05))


def num_passes(model, loop, monkeypatch, **given):
    """Forward passes of a call."""
    passes, forward = [0], type(model).forward

    def counted(self, *tensors, **named):
        passes[0] += self is model
        return forward(self, *tensors, **named)

    counted.__signature__ = inspect.signature(forward)
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", counted)
        run_loop(model, loop, **given)
    return passes[0]


@pytest.mark.parametrize(
    ("family", "law", "count"),
    [("Qwen3", "k_p", 3), ("Qwen3", "greedy", 1), ("Llama", "edits", 3), ("Llama", "k_p", 1), ("Gemma", "peaked", 3)],
)
def test_an_assistant_and_prompt_lookup_change_no_token(family, law, count):
    model, given = tiny_model(family), {"max_new_tokens": 60, **DRAFTED_LAWS[law]}
    plain = run_loop(model, sample, count, **given)
    assistant = partial(seeded_assisted, assistant_model=tiny_model(family, noise=0.1))
    assert torch.equal(run_loop(model, assistant, count, **given), plain)
    assert torch.equal(run_loop(model, seeded_assisted, count, prompt_lookup_num_tokens=3, **given), plain)


@pytest.mark.parametrize("law", ["k_p", "edits"])
def test_an_assistant_with_a_larger_head_changes_no_token_and_drafts_none_of_its_rows_beyond(law):
    """Heads are padded to a multiple; the target has no embedding of such a draft. Their texts are unlike too."""
    model, larger = tiny_model(vocab_size=100), tiny_model(vocab_size=128, seed=5)
    loop = partial(seeded_assisted, assistant_model=larger)
    assert torch.equal(run_loop(model, loop, **DRAFTED_LAWS[law]), run_loop(model, sample, **DRAFTED_LAWS[law]))


def test_no_token_is_drawn_beyond_a_vocabulary_that_is_smaller_than_the_head():
    drawn = run_loop(tiny_model(), sample, vocab_size=10, temperature=50.0, top_k=0)
    assert drawn.max() == 9


def test_a_near_assistant_saves_most_forward_passes(assisted, monkeypatch):
    model = tiny_model()
    given = {"min_new_tokens": 30}
    plain, num_assisted = (num_passes(model, each, monkeypatch, **given) for each in (sample, assisted))
    assert plain == 30
    assert num_assisted <= 15


def test_criteria_streamers_and_lengths_see_single_tokens(assisted):
    model, seen = tiny_model(), []

    class Lengths(MaxLengthCriteria):
        def __call__(self, input_ids, scores, **named):
            seen.append(input_ids.shape[1])
            return super().__call__(input_ids, scores, **named)

    criteria = StoppingCriteriaList([Lengths(13)])
    assert run_loop(model, assisted, stopping_criteria=criteria).shape[1] == 13
    assert seen == list(range(6, 14))
    assert run_loop(model, assisted, max_new_tokens=1).shape[1] == 6


def test_batches_without_eos_draw_on_and_processors_of_the_caller_see_the_text_before_each_draft(assisted):
    model = tiny_model()
    given = {"logits_processor": LogitsProcessorList([NoRepeatNGramLogitsProcessor(1)])}
    assert torch.equal(run_loop(model, assisted, **given), run_loop(model, sample, **given))
    model.generation_config.eos_token_id = None
    assert torch.equal(run_loop(model, assisted), run_loop(model, sample))
    assert run_loop(model, assisted).shape[1] == 35


def test_scores_and_logits_are_those_of_single_tokens(assisted):
    model = tiny_model()
    given = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "min_new_tokens": 30}
    made, plain = run_loop(model, assisted, **given), run_loop(model, sample, **given)
    assert torch.equal(made.sequences, plain.sequences)
    for name in ("scores", "logits"):
        assert len(made[name]) == len(plain[name]) == 30
        for ours, other in zip(made[name], plain[name], strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-5)


def test_seeds_that_the_sampler_draws_are_handed_to_the_assistant(assisted):
    model = tiny_model()
    drawn = []
    for each in (assisted, sample):
        torch.manual_seed(3)
        drawn.append(run_loop(model, each, seeds=None))
    assert torch.equal(*drawn)


LOOKED_UP = {"prompt_lookup_num_tokens": 3}
HIDDEN = {"return_dict_in_generate": True, "output_hidden_states": True}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "assistant_model or prompt_lookup_num_tokens must be given, got neither"),
        ({**LOOKED_UP, "use_cache": False}, "use_cache must be True for drafts"),
        ({**LOOKED_UP, **HIDDEN}, "output_hidden_states must be False with drafts"),
        ({**LOOKED_UP, "typical_p": 0.4}, "typical_p must be 1"),
        ({"assistant_early_exit": 1}, "assistant_early_exit must be None here"),
    ],
)
def test_what_the_loop_cannot_do_is_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        run_loop(tiny_model(), seeded_assisted, **given)
