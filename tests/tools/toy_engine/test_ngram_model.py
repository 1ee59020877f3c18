"""The trigram model against its formulas in dictionaries of Python floats, and the layout it writes to."""

import math
from collections import Counter, defaultdict
from itertools import product

import pytest
import torch
from torch import Tensor

from tools.toy_engine.corpus import BOS_ID, EOS_ID, UNK_ID, tokenize
from tools.toy_engine.ngram_model import DISCOUNT, NgramModel

DOCS = [
    "the cat sat on the mat\nthe cat ran",
    "a cat sat on a mat\nthe dog sat on the cat",
    "def f(x):\n    return x\n\ndef g(x):\n    return f(x)",
]
MAX_SUCCESSORS = (512, 2, 1)


class DictModel:
    """The formulas of the model's docstring, one probability at a time."""

    def __init__(self, model: NgramModel, docs: list[str], max_successors: int) -> None:
        """Count the same documents, with the model's vocabulary."""
        self.vocab_size = model.vocab_size
        self.unigrams: Counter[int] = Counter()
        self.all_counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for text in docs:
            ids = [BOS_ID, BOS_ID, *model.encode(text), EOS_ID]
            for i in range(2, len(ids)):
                if ids[i] != UNK_ID:
                    self.unigrams[ids[i]] += 1
                    self.all_counts[(ids[i - 1],)][ids[i]] += 1
                    self.all_counts[(ids[i - 2], ids[i - 1])][ids[i]] += 1
        self.kept = {
            context: sorted(counts, key=lambda word: (-counts[word], word))[:max_successors]
            for context, counts in self.all_counts.items()
        }

    def prob(self, context: tuple[int, ...], word: int) -> float:
        """Return P(word | context) for a context of 0, 1 or 2 tokens."""
        if not context:
            return (self.unigrams[word] + 0.5) / (self.unigrams.total() + 0.5 * self.vocab_size)
        shorter = self.prob(context[1:], word)
        if context not in self.kept:
            return shorter
        counts, kept = self.all_counts[context], self.kept[context]
        backoff = 1.0 - sum(counts[successor] - DISCOUNT for successor in kept) / counts.total()
        gain = (counts[word] - DISCOUNT) / counts.total() if word in kept else 0.0
        return gain + backoff * shorter

    def row(self, context: tuple[int, ...]) -> list[float]:
        """Return the log-probabilities of all words."""
        return [math.log(self.prob(context, word)) for word in range(self.vocab_size)]


def all_contexts(model: NgramModel) -> Tensor:
    """Return int64 ``[V * V, 2]``, every pair of tokens, seen or not."""
    return torch.tensor(list(product(range(model.vocab_size), repeat=2)))


@pytest.mark.parametrize("max_successors", MAX_SUCCESSORS)
@pytest.mark.parametrize("vocab_size", [14, 1000], ids=["with_unknown_words", "all_words_known"])
def test_every_trigram_row_is_the_formula(vocab_size: int, max_successors: int) -> None:
    model = NgramModel.from_documents(DOCS, vocab_size, max_successors)
    truth = DictModel(model, DOCS, max_successors)
    contexts = all_contexts(model)
    expected = torch.tensor([truth.row((a, b)) for a, b in contexts.tolist()])
    torch.testing.assert_close(model.logits(contexts), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("max_successors", MAX_SUCCESSORS)
def test_every_bigram_row_is_the_formula(max_successors: int) -> None:
    model = NgramModel.from_documents(DOCS, max_successors=max_successors)
    truth = DictModel(model, DOCS, max_successors)
    expected = torch.tensor([truth.row((b,)) for b in range(model.vocab_size)])
    torch.testing.assert_close(model.bigram_logits(torch.arange(model.vocab_size)), expected, rtol=0, atol=1e-5)


def test_a_corpus_counted_by_hand() -> None:
    model = NgramModel.from_documents(["x x y"])
    # Three words and three special tokens; counted are "x", " x", " y" and <eos>, each of them once.
    first, second, third = model.encode("x x y")
    assert sorted((first, second, third)) == [3, 4, 5]
    unigram = 1.5 / (4 + 0.5 * 6)
    bigram = 0.25 + 0.75 * unigram
    trigram = 0.25 + 0.75 * bigram
    row = model.logits(torch.tensor([[first, second]]))[0].exp()
    assert row[third].item() == pytest.approx(trigram, rel=1e-6)
    assert row[EOS_ID].item() == pytest.approx(0.75 * 0.75 * unigram, rel=1e-6)
    assert row[UNK_ID].item() == pytest.approx(0.75 * 0.75 * 0.5 / 7, rel=1e-6)
    assert model.bigram_logits(torch.tensor([second]))[0, third].exp().item() == pytest.approx(bigram, rel=1e-6)


@pytest.mark.parametrize("max_successors", MAX_SUCCESSORS)
def test_rows_are_finite_and_sum_to_one(max_successors: int) -> None:
    model = NgramModel.from_documents(DOCS, 14, max_successors)
    for rows in (model.logits(all_contexts(model)), model.bigram_logits(torch.arange(model.vocab_size))):
        assert rows.isfinite().all()
        assert (rows.double().exp().sum(1) - 1).abs().max() < 1e-6


def test_an_unseen_pair_backs_off_to_the_bigram_and_an_unseen_token_to_the_unigram() -> None:
    model = NgramModel.from_documents(DOCS)
    (cat,), (g,) = model.encode(" cat"), model.encode(" g")
    assert torch.equal(model.logits(torch.tensor([[g, cat]])), model.bigram_logits(torch.tensor([cat])))
    assert torch.equal(model.bigram_logits(torch.tensor([EOS_ID]))[0], model.log_unigram)
    assert torch.equal(model.logits(torch.tensor([[cat, EOS_ID]]))[0], model.log_unigram)


def test_negative_ids_are_the_beginning_of_a_document() -> None:
    model = NgramModel.from_documents(DOCS)
    (the,) = model.encode("the")
    contexts = torch.tensor([[-1, -7], [-1, the]])
    as_bos = torch.tensor([[BOS_ID, BOS_ID], [BOS_ID, the]])
    assert torch.equal(model.logits(contexts), model.logits(as_bos))
    assert torch.equal(model.bigram_logits(contexts[:, 1]), model.bigram_logits(as_bos[:, 1]))


def test_encode_and_decode_undo_each_other() -> None:
    model = NgramModel.from_documents(DOCS)
    for text in DOCS:
        assert model.decode(model.encode(text)) == text
    assert model.decode([BOS_ID, *model.encode("the cat"), EOS_ID]) == "the cat"


def test_unknown_words_are_marked() -> None:
    model = NgramModel.from_documents(DOCS)
    ids = model.encode("the zebra sat")
    assert ids[1] == UNK_ID
    assert model.decode(ids) == "the<unk> sat"


def test_builds_are_the_same_bits() -> None:
    first, second = NgramModel.from_documents(DOCS, 14, 2), NgramModel.from_documents(iter(DOCS), 14, 2)
    assert first.vocabulary == second.vocabulary
    assert torch.equal(first.logits(all_contexts(first)), second.logits(all_contexts(second)))


def test_vocabulary_keeps_the_most_frequent_tokens() -> None:
    model = NgramModel.from_documents(["b b b a a c", "d"], vocab_size=6)
    assert model.vocab_size == 6
    counts = Counter(token for text in ("b b b a a c", "d") for token in tokenize(text))
    assert model.vocabulary.tokens[3:] == tuple(sorted(counts, key=lambda token: (-counts[token], token))[:3])


@pytest.mark.parametrize("bigram", [False, True], ids=["trigram", "bigram"])
def test_only_the_first_columns_of_a_strided_output_are_written(bigram: bool) -> None:
    model = NgramModel.from_documents(DOCS)
    context = torch.tensor([[BOS_ID, BOS_ID], model.encode(" cat sat"), [UNK_ID, EOS_ID]])
    num_rows, width = len(context), model.vocab_size + 1
    buffer = torch.full((2 * num_rows, width + 9), math.pi)
    out = buffer[::2, 2 : width + 5]
    if bigram:
        model.write_bigram_logits(context[:, 1], out)
        expected = model.bigram_logits(context[:, 1])
    else:
        model.write_logits(context, out)
        expected = model.logits(context)
    assert torch.equal(out[:, : model.vocab_size], expected)
    assert torch.equal(out[:, model.vocab_size], torch.full((num_rows,), -math.inf))
    out[:, :width] = math.pi
    assert torch.equal(buffer, torch.full_like(buffer, math.pi))


def test_what_the_output_held_before_leaves_no_trace() -> None:
    model = NgramModel.from_documents(DOCS)
    context = all_contexts(model)[:50]
    out = torch.full((50, model.vocab_size + 1), math.nan)
    model.write_logits(context, out)
    assert torch.equal(out[:, : model.vocab_size], model.logits(context))


def test_a_row_does_not_depend_on_its_batch() -> None:
    model = NgramModel.from_documents(DOCS)
    contexts = all_contexts(model)
    batch = model.logits(contexts)
    assert torch.equal(batch.flip(0), model.logits(contexts.flip(0)))
    for i in range(0, len(contexts), 37):
        assert torch.equal(batch[i : i + 1], model.logits(contexts[i : i + 1]))


def test_no_rows_are_no_work() -> None:
    model = NgramModel.from_documents(DOCS)
    assert model.logits(torch.empty(0, 2, dtype=torch.int64)).shape == (0, model.vocab_size)


def test_mistakes_are_named() -> None:
    model = NgramModel.from_documents(DOCS)
    context, out = torch.zeros(2, 2, dtype=torch.int64), torch.empty(2, model.vocab_size + 1)
    with pytest.raises(ValueError, match="context must be int64"):
        model.write_logits(context.int(), out)
    with pytest.raises(ValueError, match="context must be int64"):
        model.write_logits(context[:, :1], out)
    with pytest.raises(ValueError, match="previous must be int64"):
        model.write_bigram_logits(context, out)
    for wrong in (out.double(), out[:, :-1], out[:1], out[0]):
        with pytest.raises(ValueError, match="out must be float32"):
            model.write_logits(context, wrong)
    with pytest.raises(ValueError, match="at least one document"):
        NgramModel.from_documents([])
    with pytest.raises(ValueError, match="max_successors must be at least 1, got 0"):
        NgramModel.from_documents(DOCS, max_successors=0)
    with pytest.raises(ValueError, match="size must be above 3"):
        NgramModel.from_documents(DOCS, vocab_size=3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_replayed_cuda_graph_writes_the_bits_of_the_cpu() -> None:
    on_cpu = NgramModel.from_documents(DOCS, 14, 2)
    on_gpu = on_cpu.to("cuda")
    contexts = all_contexts(on_cpu)
    static_context = torch.zeros_like(contexts, device="cuda")
    out = torch.empty(len(contexts), on_cpu.vocab_size + 1, device="cuda")
    on_gpu.write_logits(static_context, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        on_gpu.write_logits(static_context, out)
    static_context.copy_(contexts)
    graph.replay()
    assert torch.equal(out[:, : on_cpu.vocab_size].cpu(), on_cpu.logits(contexts))
    previous = contexts[:, 1]
    assert torch.equal(on_gpu.bigram_logits(previous.to("cuda")).cpu(), on_cpu.bigram_logits(previous))
