"""transformers as it is installed: its versions, models, the page's examples, and each of our edits against its own."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import math
import random

import pytest
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.generation import (
    GenerationConfig,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.integrations.engine_interface import found
from compiled_sampler.integrations.transformers.requests import CALLED, REPLACED, check_version
from compiled_sampler.request_formats import KNOWN
from tests.engines.published_engine import without
from tools.model import corpus
from tools.model.tokenizer import Tokenizer
from tools.model.transformer import Model
from tools.readme import ROOT
from tools.toy_engine.cached_model import CachedModel

pytestmark = pytest.mark.full

FOLDER = Path(corpus.__file__).parent
TEXT = 'The "with" statement is used to wrap a block\n   with methods:\n\n\t x = f(1234) # \u00e9\u4e2d\U0001f600_a '


@pytest.mark.parametrize("name", ["target", "draft"])
def test_logits_are_those_of_a_llama_of_transformers(name):
    """Norms and softmax of transformers are float32 also in a float64 model: hence the tolerance."""
    token_ids = torch.tensor(Tokenizer(FOLDER / "tokenizer.json").encode(TEXT))
    positions, cached = torch.arange(len(token_ids)), CachedModel(Model.load(FOLDER / name), 1, len(token_ids))
    ours = cached.logits(torch.zeros_like(positions), positions, token_ids)
    model = AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float64).eval()
    with torch.no_grad():
        expected = model(token_ids[None]).logits[0].to(torch.float32)
    assert expected.std() > 1
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-4)


def test_token_ids_are_those_of_the_library():
    ours = Tokenizer(FOLDER / "tokenizer.json")
    library = PreTrainedTokenizerFast(tokenizer_file=str(FOLDER / "tokenizer.json"))
    for text in [TEXT, *corpus.documents()[::5]]:
        token_ids = ours.encode(text)
        assert token_ids == library(text)["input_ids"]
        assert ours.decode(token_ids) == text


def test_the_examples_of_the_page_run():
    page = ROOT / "docs" / "transformers.md"
    blocks = re.findall(r"^```py\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 2
    names = {}
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)


def test_a_version_with_everything_that_is_called_is_taken_and_an_older_one_refused_with_those_that_work():
    for version in ("5.17.0", "5.24.1", "5.25.0.dev0", "6.0"):
        check_version(CALLED, version)
    message = r"must be 5.17 or newer, got .*; pip install 'transformers>=5.17,<=5.24'"
    for version in ("4.57.1", "5.0.0", "5.16.3"):
        with pytest.raises(ImportError, match=message):
            check_version(CALLED, version)


@pytest.mark.parametrize("name", CALLED.passed | REPLACED.passed)
def test_a_newer_version_without_something_that_is_called_or_replaced_is_refused(name):
    interface = CALLED if name in CALLED.passed else REPLACED
    with pytest.raises(ImportError, match=f"must have {re.escape(name)}, got 5.99.0.*pip install"):
        check_version(interface, "5.99.0", without(name))

    def without_parameters(asked):
        return (lambda: None) if asked == name else found(asked)

    if interface.passed[name]:
        with pytest.raises(ImportError, match=f"must have {re.escape(name)}, got 5.99.0"):
            check_version(interface, "5.99.0", without_parameters)


V, HISTORY, ROWS = 1000, 64, 8
PENALTIES = [1.1, 1.3, 0.7, 5.17, 3.0, 1.0000001, 2.0**-20 * 3, 2.0, 0.25, 2.0**20]
STOPS = [7, 2, 998]


def test_every_field_of_a_generation_config_is_known():
    """A field that a later transformers adds is to be read, refused or said to be of no weight."""
    assert {name for name in vars(GenerationConfig()) if not name.startswith("_")} <= KNOWN
    assert SamplingParams.from_generation_config(GenerationConfig().to_dict()) == SamplingParams.from_generation_config(
        GenerationConfig()
    )


def texts(source, ids):
    """A prompt and what was drawn for each row, of a few ids, so that they repeat."""

    def drawn(count):
        return [source.randrange(ids) for _ in range(count)]

    return [(drawn(source.randrange(3, 20)), drawn(source.randrange(12))) for _ in range(ROWS)]


def hard_scores(source):
    """Of many sizes, with zeros of both signs and masked tokens; nothing becomes a denormal, which counts as 0 here."""
    generator = torch.Generator().manual_seed(source.getrandbits(32))
    sizes = torch.tensor([1e-25, 1e-3, 1.0, 1.0, 8.0, 8.0, 1e4, 1e30])
    scores = sizes[:, None] * torch.randn(ROWS, V, generator=generator)
    where = torch.rand(ROWS, V, generator=generator)
    scores[where < 0.02] = -math.inf
    scores[(where > 0.02) & (where < 0.04)] = 0.0
    scores[(where > 0.04) & (where < 0.06)] = -0.0
    return scores


def edited(scores, given, of_rows):
    """The logits after the edits of requests with such parameters and texts."""
    sampler = Sampler(V, ROWS, backend="eager", history_len=HISTORY)
    pairs = zip(given, of_rows, strict=True)
    slots = [sampler.add_request(SamplingParams(seed=1, **each), *text) for each, text in pairs]
    positions = torch.tensor([len(prompt) + len(output) for prompt, output in of_rows])
    return sampler.edited_logits(sampler.plan(slots), scores, positions)


def processed(processors, scores, of_rows):
    """What the processor of each row makes of it and of its text, which has no padding."""
    rows = zip(processors, scores, of_rows, strict=True)
    return torch.cat([each(torch.tensor([prompt + output]), row[None].clone()) for each, row, (prompt, output) in rows])


def ulps_apart(left, right):
    """How many float32 numbers from one to the other: int64; zeros of both signs are one number."""

    def place(x):
        bits = x.view(torch.int32).to(torch.int64)
        return torch.where(bits < 0, -(bits + 2**31), bits)

    return (place(left) - place(right)).abs()


@pytest.mark.parametrize("penalty", PENALTIES)
def test_repetition_penalties_are_within_one_ulp_of_those_of_transformers(penalty):
    """It divides positive scores of tokens of the text; all other scores, and all by powers of two, are the same."""
    source = random.Random(penalty)
    scores, of_rows = hard_scores(source), texts(source, 400)
    found = edited(scores, [{"repetition_penalty": penalty}] * ROWS, of_rows)
    wanted = processed([RepetitionPenaltyLogitsProcessor(penalty)] * ROWS, scores, of_rows)
    apart = ulps_apart(found, wanted)
    may_differ = torch.zeros_like(scores, dtype=torch.bool)
    for row, (prompt, output) in enumerate(of_rows):
        may_differ[row, prompt + output] = math.frexp(penalty)[0] != 0.5
    may_differ &= scores > 0.0
    assert apart.max() <= 1
    assert not apart[~may_differ].any()
    assert not torch.equal(found, scores)


def test_some_repetition_penalties_differ_by_the_one_ulp():
    """The control: were the two the same formula, a test within one ulp would say too little."""
    source, apart = random.Random(1), 0
    for penalty in PENALTIES:
        scores, of_rows = hard_scores(source), texts(source, 400)
        found = edited(scores, [{"repetition_penalty": penalty}] * ROWS, of_rows)
        wanted = processed([RepetitionPenaltyLogitsProcessor(penalty)] * ROWS, scores, of_rows)
        apart += int(ulps_apart(found, wanted).sum())
    assert apart > 0


def test_biases_are_those_of_transformers():
    source = random.Random(2)
    values = [2.5, -1.125, 1e-3, 1e30, -100.0, -math.inf, 1 / 3]
    biases = [{source.randrange(1, V): source.choice(values) for _ in range(40)} for _ in range(ROWS)]
    scores, of_rows = hard_scores(source), texts(source, 9)
    found = edited(scores, [{"logit_bias": each} for each in biases], of_rows)
    processors = [SequenceBiasLogitsProcessor({(token,): bias for token, bias in each.items()}) for each in biases]
    assert torch.equal(found, processed(processors, scores, of_rows))
    assert not torch.equal(found, scores)


def test_bad_words_are_those_of_transformers():
    """Of one to four tokens, of few ids, so that many begin in the text; also where that is in the prompt.

    Texts are no shorter than words: transformers passes over a word whose beginning is the whole text.
    """
    source, ended = random.Random(3), 0
    for _ in range(20):
        words = [[[source.randrange(4) for _ in range(source.randrange(1, 5))] for _ in range(12)] for _ in range(ROWS)]
        scores, of_rows = hard_scores(source), [([*prompt, 3, 3], output) for prompt, output in texts(source, 4)]
        given = [{"bad_words_token_ids": each, "bad_words_scope": "all"} for each in words]
        found = edited(scores, given, of_rows)
        assert torch.equal(found, processed([NoBadWordsLogitsProcessor(each) for each in words], scores, of_rows))
        single = [[word for word in each if len(word) == 1] or [[V - 1]] for each in words]
        ended += int((found != processed([NoBadWordsLogitsProcessor(each) for each in single], scores, of_rows)).sum())
    assert ended > 50


@pytest.mark.parametrize("kind", ["new", "all"])
def test_least_lengths_are_those_of_transformers(kind):
    """``min_new_tokens``, and ``min_length``, which counts the prompt: before, at and behind the last token of it."""
    source = random.Random(4)
    scores, of_rows, given, processors = hard_scores(source), texts(source, V), [], []
    for row, (prompt, output) in enumerate(of_rows):
        least = max(len(output) + (-1, 0, 1, 5)[row % 4], 0)
        config = {"do_sample": True, "eos_token_id": STOPS, "top_k": 0}
        config |= {"min_new_tokens": least} if kind == "new" else {"min_length": len(prompt) + least}
        params = SamplingParams.from_generation_config(config, seed=1, prompt_len=len(prompt))
        given.append({"min_tokens": params.min_tokens, "stop_token_ids": params.stop_token_ids})
        of_all = MinLengthLogitsProcessor(len(prompt) + least, STOPS)
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), least, STOPS) if kind == "new" else of_all)
    found = edited(scores, given, of_rows)
    assert torch.equal(found, processed(processors, scores, of_rows))
    assert {bool(row[STOPS].isneginf().all()) for row in found} == {True, False}
