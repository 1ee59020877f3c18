"""Distances from the target's law: known answers, every rule within the limit, and controls that stand out."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from compiled_sampler import SamplingParams
from tools.convergence import __main__ as convergence
from tools.convergence.contexts import Contexts, contexts_of, law
from tools.convergence.distances import FALSE_ALARM, expected, limit, total_variation
from tools.convergence.draws import Drawer, ways, wrong_ways
from tools.model.transformer import Model
from tools.toy_engine.cached_model import CachedModel
from tools.toy_engine.runs import load_models

pytestmark = pytest.mark.usefixtures("kept_threads")
LENGTH, TOP_K, DRAWS = 3, 2, 3000


def three_tokens() -> Contexts:
    """Contexts of up to two of three tokens, where the drafter says the opposite of the target."""
    target = torch.randn(13, 3, generator=torch.Generator().manual_seed(1))
    following = torch.full((13, 3), -1)
    following[:4] = torch.arange(1, 13).view(4, 3)
    return Contexts(target, -target, following)


def test_the_law_is_the_product_of_the_softmaxes_of_kept_tokens() -> None:
    contexts = three_tokens()
    found = law(contexts.target, contexts.following, LENGTH, TOP_K).view(13, 3)
    assert math.isclose(found.sum(), 1.0)
    assert (found > 0).sum() == TOP_K**LENGTH
    first, second = contexts.target[0].argmax(), contexts.target[0].argmin()
    gap = contexts.target[0].sort().values.double()
    child = contexts.following[0, first]
    grandchildren = contexts.following[child]
    assert math.isclose(found[grandchildren].sum(), 1 / (1 + math.exp(gap[1] - gap[2])), rel_tol=1e-12)
    assert found[contexts.following[contexts.following[0, second]]].sum() == 0.0


def test_contexts_hold_what_both_models_keep_behind_every_text() -> None:
    models, tokenizer = load_models()
    prompt = tokenizer.encode(convergence.PROMPT)
    contexts = contexts_of(models, prompt, 2, 3)
    for model, found in zip(models, contexts[:2], strict=True):
        assert len(found) == 1 + int((contexts.following[0] > 0).sum())
        texts = [tuple(prompt)]
        for n, text in enumerate(texts):
            of_text = [all_logits(each, text) for each in models]
            kept = sorted({token for each in of_text for token in each.topk(3).indices.tolist()})
            torch.testing.assert_close(found[n, : len(kept)], all_logits(model, text)[kept])
            assert found[n, len(kept) :].isneginf().all()
            assert contexts.following[n].tolist() == (  # children stand in the order of their texts
                [*range(1, 1 + len(kept)), *[-1] * (6 - len(kept))] if n == 0 else [-1] * 6
            )
            texts += [(*text, token) for token in kept if n == 0]


def all_logits(model: Model, text: tuple[int, ...]) -> torch.Tensor:
    """The logits behind a text, float32 ``[vocabulary]``."""
    cached = CachedModel(model, 1, len(text))
    zeros = torch.zeros(len(text), dtype=torch.int64)
    return cached.logits(zeros, torch.arange(len(text)), torch.tensor(text))[-1]


def test_expected_distance_is_that_of_every_outcome_of_few_draws() -> None:
    probabilities = np.array([0.2, 0.3, 0.5])
    outcomes = [np.array([a, b, 4 - a - b]) for a in range(5) for b in range(5 - a)]
    weights = [
        math.factorial(4) * np.prod([p**n / math.factorial(n) for p, n in zip(probabilities, counts, strict=True)])
        for counts in outcomes
    ]
    wanted = sum(w * total_variation(counts, probabilities) for w, counts in zip(weights, outcomes, strict=True))
    assert math.isclose(expected(4, probabilities), wanted, rel_tol=1e-12)
    assert math.isclose(limit(4, probabilities) - wanted, math.sqrt(math.log(1 / FALSE_ALARM) / 8))
    assert total_variation(np.array([3, 0, 0]), np.array([0.0, 0.5, 0.5])) == 1.0


def test_every_rule_converges_and_every_control_stands_out() -> None:
    """Each of the four ways fails by chance with probability below ``FALSE_ALARM``; ``match`` gives plain tokens."""
    contexts = three_tokens()
    target = law(contexts.target, contexts.following, LENGTH, TOP_K).numpy()
    drawer = Drawer(contexts, LENGTH, SamplingParams(top_k=TOP_K, seed=1), "eager")
    for way in ways(drawer).values():
        assert convergence.distances(way, [DRAWS], target)[0] <= limit(DRAWS, target)
    for way in wrong_ways(drawer).values():
        assert convergence.distances(way, [DRAWS], target)[0] > limit(DRAWS, target)
    numbers = torch.arange(DRAWS)
    assert torch.equal(drawer.verified(numbers, "match"), drawer.plain(numbers))
    assert not torch.equal(drawer.verified(numbers, "block"), drawer.plain(numbers))


def test_the_tool_stores_and_draws_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = tmp_path / "numbers.json"
    assert convergence.main(["--draws", "4000", "--json", str(numbers)]) == 0
    measured = json.loads(numbers.read_text())
    assert measured["draws"] == [100, 300, 1000, 3000, 4000]
    assert convergence.rendered(measured) in capsys.readouterr().out
    assert {len(found) for kind in ("right", "controls") for found in measured[kind].values()} == {5}
    pytest.importorskip("matplotlib")
    convergence.draw(measured, tmp_path / "folder" / "picture.png")
    assert (tmp_path / "folder" / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_rule_or_a_control_that_converges_is_an_exit_status_of_1(monkeypatch: pytest.MonkeyPatch) -> None:
    right = {"draws": [100], "limit": [0.5], "right": {"a": [0.4]}, "controls": {"c": [0.6]}}
    assert convergence.wrong(right) == []
    assert convergence.wrong({**right, "right": {"a": [0.6]}}) == ["a"]
    assert convergence.wrong({**right, "controls": {"c": [0.4]}}) == ["c"]
    monkeypatch.setattr(convergence, "wrong_ways", ways)
    assert convergence.main(["--draws", "100"]) == 1


def test_too_few_draws_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        convergence.main(["--draws", "99"])
    assert "--draws must be at least 100, got 99" in capsys.readouterr().err
