"""Trees under the rule ``rejection`` are lossless: the exact law of a token, summed over all siblings and numbers.

Nothing is drawn here, as in ``test_verification_law``: every order of siblings is weighed by the drafter's law, how
many of the 2**32 numbers accept each of them is found by bisecting the production comparison, and the law of the token
after all of them is read from the production keys without noise. Levels of a tree share no number and no draft, so that
one level says it; a second one is there to be walked to.
"""

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler.batch import VerifyInputs
from compiled_sampler.engine.requests.slots import unfiltered_table
from compiled_sampler.modes import verifying
from compiled_sampler.params import SamplingParams
from compiled_sampler.pipeline import verify as pipeline
from compiled_sampler.speculation import trees
from tests.builders.exact_races import LARGEST, SMALLEST, WORDS, Race, accepted_words, weights, without_noise
from tests.builders.inputs import full_mode, slot_table
from tests.builders.trees import path_of, random_parents
from tests.tiers import tiers

BOUND, DETECTED = 1e-5, 1e-3
LAWS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "probabilities"),
    "logits": ({"temperature": 0.7}, "logits"),
    "filtered": ({"top_k": 3, "min_p": 0.02}, "logits"),
    "processed": ({"top_p": 0.8}, "processed"),
}


def verified(inputs: VerifyInputs, drafts: str, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each sibling is accepted, bool ``[N, K]``, and the law of the last token ``[N, V]``, without noise."""
    races = list[Race]()
    with without_noise(races) as patch:
        patch.setattr(trees, "accept_number", lambda *_: numbers)
        out = pipeline.verify_step(verifying(full_mode(inputs.logits.shape[1]), "rejection", drafts), inputs)
    assert out.node_ids is not None
    place, last = torch.arange(numbers.shape[1]), weights(races[0], inputs.logits.shape[1])
    return out.node_ids[:, :1] == place, last / last.sum(-1, keepdim=True)


def law_of_a_token(name: str, size: int, width: int, claimed: float = 1.0) -> tuple[Tensor, Tensor]:
    """The law of the first token that is emitted and the target's, float64 ``[V]``, for random logits of both."""
    source = torch.Generator().manual_seed(size * 10 + width)
    params, drafts = LAWS[name]
    target, draft = (2.0 * torch.randn(size, generator=source) for _ in range(2))
    orders = list(itertools.permutations(range(size), width))
    count, nodes = len(orders), width + 1
    table = slot_table([SamplingParams(seed=1, **params)], size)
    inputs = VerifyInputs(
        logits=target.expand(count * (nodes + 1), size).contiguous(),
        slots=torch.zeros(count, dtype=torch.int64),
        positions=torch.arange(0, 10 * count, 10),
        num_drafts=torch.full((count,), nodes),
        draft_token_ids=torch.tensor([[*order, order[0]] for order in orders]),
        proposals=(draft.softmax(-1) if drafts == "probabilities" else draft).expand(count * nodes, size).contiguous(),
        table=table,
        draft_table=unfiltered_table(table, size),
        parents=torch.tensor([[-1] * width + [0]]).expand(count, nodes),
    )
    p = law(target, params)
    q = law(draft * claimed, {} if drafts in ("probabilities", "processed") else params)
    numbers = torch.full((count, nodes), LARGEST, dtype=torch.float64)
    _, last = verified(inputs, drafts, numbers)
    weight = torch.tensor([weight_of(q, order) for order in orders], dtype=torch.float64)
    emitted = torch.zeros(size, dtype=torch.float64)
    for place in range(width):

        def accepts(number: Tensor, place: int = place) -> Tensor:
            numbers[:, place] = number
            return verified(inputs, drafts, numbers)[0][:, place]

        words = accepted_words(accepts, count)
        numbers[:, place] = torch.where(words == WORDS, numbers.new_tensor(SMALLEST), LARGEST)
        share = words.double() / WORDS
        emitted.index_add_(0, inputs.draft_token_ids[:, place], weight * share)
        weight = weight * (1 - share)
    return emitted + weight @ last, p


def law(logits: Tensor, params: dict[str, Any]) -> Tensor:
    """The law that a row is drawn from, float64 ``[V]``."""
    mass = (logits.double() / params.get("temperature", 1.0)).softmax(-1)
    order = mass.sort(descending=True, stable=True)
    keep = torch.arange(len(mass)) < (params.get("top_k") or len(mass))
    keep &= order.values.cumsum(0) - order.values < params.get("top_p", 1.0)
    keep &= order.values >= params.get("min_p", 0.0) * order.values[0]
    kept = torch.where(keep, order.values, 0.0)
    return torch.zeros_like(mass).scatter(0, order.indices, kept / kept.sum())


def weight_of(q: Tensor, order: tuple[int, ...]) -> float:
    """The probability of drawing tokens in this order without replacement; the last stand for any where q has fewer."""
    weight, rest, size = 1.0, 1.0, len(q)
    for number, token in enumerate(order):
        if rest < 1e-12:
            return weight / len(list(itertools.permutations(range(size - number), len(order) - number)))
        weight, rest = weight * float(q[token]) / rest, rest - float(q[token])
    return weight


@pytest.mark.parametrize(("size", "width"), tiers([(4, 3)], [(3, 2), (4, 2), (5, 3), (4, 4), (5, 5)]))
@pytest.mark.parametrize("name", LAWS)
def test_a_token_has_the_law_of_the_target(name, size, width):
    emitted, p = law_of_a_token(name, size, width)
    assert 0.5 * float((emitted - p).abs().sum()) <= BOUND


def test_siblings_of_another_law_are_detected():
    emitted, p = law_of_a_token("logits", 4, 3, claimed=0.7)
    assert 0.5 * float((emitted - p).abs().sum()) > DETECTED


@pytest.mark.parametrize("name", ["spent", "debt"])
def test_a_walk_that_forgets_what_rejected_siblings_took_is_detected(monkeypatch, name):
    walk_on = trees.walk_on

    def forgetful(walk: trees.Walk, *others: Any) -> trees.Walk:
        after = walk_on(walk, *others)
        return after._replace(**{name: torch.full_like(getattr(after, name), name == "debt")})

    monkeypatch.setattr(pipeline, "walk_on", forgetful)
    emitted, p = law_of_a_token("plain", 4, 3)
    assert 0.5 * float((emitted - p).abs().sum()) > DETECTED


# Depths and paths of nodes, whatever parents are.


@pytest.mark.parametrize("kind", ["random", "chain", "garbage"])
@pytest.mark.parametrize("width", [1, 8, 9, 64])
def test_nodes_have_the_depth_and_the_path_of_a_climb(kind, width):
    source = random.Random(width)
    every = [random_parents(source, width, kind) for _ in range(20)]
    counts = [source.randrange(width + 1) for _ in every]
    parents, num_drafts = torch.tensor(every), torch.tensor(counts)
    made = trees.tree_of(trees.first_ways(parents, num_drafts), parents, num_drafts)
    for n, (tree, count) in enumerate(zip(every, counts, strict=True)):
        for node in range(width):
            path = path_of(tree, node) if node < count else None
            assert made.depths[n, node] == len(path or ())
            if path is not None:
                assert int(made.paths[n, node]) % 2**64 == sum(1 << each for each in path)
        assert made.is_wrong[n] == any(not -1 <= tree[node] < node for node in range(count))
