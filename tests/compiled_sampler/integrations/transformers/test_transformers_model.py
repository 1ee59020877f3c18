"""transformers as it is installed: its versions, our small models and the page's examples inside it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from compiled_sampler.integrations.engine_interface import found
from compiled_sampler.integrations.transformers import sample
from compiled_sampler.integrations.transformers.requests import CALLED, REPLACED, check_version
from tests.engines.published_engine import without
from tools.model import corpus
from tools.model.tokenizer import END_ID, Tokenizer
from tools.model.transformer import Model
from tools.readme import ROOT
from tools.toy_engine.cached_model import CachedModel

pytestmark = pytest.mark.full

FOLDER = Path(corpus.__file__).parent
TEXT = 'The "with" statement is used to wrap a block\n   with methods:\n\n\t x = f(1234) # \u00e9\u4e2d\U0001f600_a '


def theirs(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float64).eval()


@pytest.mark.parametrize("name", ["target", "draft"])
def test_logits_are_those_of_a_llama_of_transformers(name):
    """Norms and softmax of transformers are float32 also in a float64 model: hence the tolerance."""
    model, token_ids = theirs(name), torch.tensor(Tokenizer(FOLDER / "tokenizer.json").encode(TEXT))
    positions = torch.arange(len(token_ids))
    ours = CachedModel(Model.load(FOLDER / name), 1, len(token_ids)).logits(
        torch.zeros_like(positions), positions, token_ids
    )
    with torch.no_grad():
        expected = model(token_ids[None]).logits[0].to(torch.float32)
    assert expected.std() > 1
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-4)


def test_generate_and_continuous_batching_draw_the_same_text():
    from compiled_sampler.integrations.transformers.continuous_batching import generate_batch
    from tests.engines.tiny_models import cache_of, config_of

    model, tokenizer = theirs("target"), Tokenizer(FOLDER / "tokenizer.json")
    prompts = [tokenizer.encode(text)[:9] for text in corpus.paragraphs(corpus.documents())[:40:10]]
    seeds, law = [1, 2, 3, 4], {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "max_new_tokens": 20}
    outputs = generate_batch(model, prompts, seeds, config_of(eos_token_id=END_ID, **law), cache_of(), backend="eager")
    given = {"custom_generate": sample, "sampler_backend": "eager", "do_sample": True, **law}
    for prompt, seed, output in zip(prompts, seeds, outputs, strict=True):
        drawn = model.generate(torch.tensor([prompt]), seeds=[seed], **given)
        assert output.generated_tokens == drawn[0, len(prompt) :].tolist()


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
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)


def test_a_version_with_everything_that_is_called_is_taken_and_an_older_one_refused_with_those_that_work():
    for version in ("5.17.0", "5.24.1", "5.25.0.dev0", "6.0"):
        check_version(CALLED, version)
    for version in ("4.57.1", "5.0.0", "5.16.3"):
        with pytest.raises(
            ImportError, match=r"must be 5.17 or newer, got .*; pip install 'transformers>=5.17,<=5.24'"
        ):
            check_version(CALLED, version)


@pytest.mark.parametrize("name", CALLED.passed | REPLACED.passed)
def test_a_newer_version_without_something_that_is_called_or_replaced_is_refused(name):
    interface = CALLED if name in CALLED.passed else REPLACED
    with pytest.raises(ImportError, match=f"must have {re.escape(name)}, got 5.99.0.*pip install"):
        check_version(interface, "5.99.0", without(name))

    def without_parameters(asked: str) -> Any:
        return (lambda: None) if asked == name else found(asked)

    if interface.passed[name]:
        with pytest.raises(ImportError, match=f"must have {re.escape(name)}, got 5.99.0"):
            check_version(interface, "5.99.0", without_parameters)
