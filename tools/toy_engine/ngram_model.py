"""Which token comes next, without a download?  An interpolated word trigram model with a dense row of logits.

Dims: ``R`` rows, ``V`` vocabulary size, ``E`` entries of a successor table, ``C`` its contexts, ``N`` counted tokens.

The probabilities are absolute discounting (Ney, Essen and Kneser, 1994) with one discount D::

    P1(w)     = (count(w) + 1/2) / (N + V/2)
    P2(w|b)   = max(count(b w) - D, 0) / count(b)     + backoff2(b)   * P1(w)
    P3(w|a,b) = max(count(a b w) - D, 0) / count(a b) + backoff3(a,b) * P2(w|b)

where each backoff is what its successors leave of 1, and 1 for a context never seen. They are worked out in float64
when the model is built. A lookup searches and gathers integers and adds float32 logs in a fixed order, so a CPU and
a GPU give the same bits, and a CUDA graph can hold it: no sync, no shape that depends on a value.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tools.toy_engine.corpus import BOS_ID, EOS_ID, UNK_ID, Vocabulary, tokenize

DISCOUNT = 0.75
Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]


@dataclass(frozen=True)
class _Counts:
    """Discounted counts of the successors of each context, in numpy.

    Attributes:
        contexts: int64 ``[C]``, ascending.
        backoff: float64 ``[C]``, in (0, 1): the probability that the successors leave to shorter contexts.
        owners: int64 ``[E]``, ascending: the place in ``contexts`` of each entry's context.
        words: int64 ``[E]``: the successor.
        gains: float64 ``[E]``: the discounted share of the successor.
    """

    contexts: Int64s
    backoff: Float64s
    owners: Int64s
    words: Int64s
    gains: Float64s

    @classmethod
    def from_ngrams(cls, contexts: Int64s, words: Int64s, vocab_size: int, max_successors: int) -> "_Counts":
        """Count ``[N]`` contexts and their next words; the rarest beyond ``max_successors`` go to the backoff."""
        ngrams, counts = np.unique(contexts * vocab_size + words, return_counts=True)
        owner_ids, successors = np.divmod(ngrams, vocab_size)
        unique, first, owners = np.unique(owner_ids, return_index=True, return_inverse=True)
        totals = np.add.reduceat(counts, first)
        ranked = np.lexsort((successors, -counts, owners))
        kept = np.sort(ranked[np.arange(len(ngrams)) - first[owners] < max_successors])
        owners = owners[kept]
        gains = (counts[kept] - DISCOUNT) / totals[owners]
        backoff = np.subtract(1.0, np.bincount(owners, gains, len(unique)), dtype=np.float64)
        return cls(unique, backoff, owners, successors[kept], gains)

    def backoff_of(self, contexts: Int64s) -> Float64s:
        """Return float64 ``[...]``, the backoff of any contexts; 1 for those never seen."""
        place = np.minimum(np.searchsorted(self.contexts, contexts), len(self.contexts) - 1)
        return np.where(self.contexts[place] == contexts, self.backoff[place], 1.0)


@dataclass(frozen=True)
class _Successors:
    """The successors of each context on a device, all contexts padded to the same width at lookup.

    Attributes:
        contexts: int64 ``[C]``, ascending.
        log_backoff: float32 ``[C]``.
        begins: int64 ``[C]``: the first entry of each context.
        ends: int64 ``[C]``: one past its last entry.
        token_ids: int64 ``[E + 1]``; the last is ``V``, the column that padding is written to.
        logits: float32 ``[E + 1]``: natural log of the whole interpolated probability; the last is -inf.
        slots: int64 ``[W]``, counting from 0; ``W`` is above the number of successors of any context.
    """

    contexts: Tensor
    log_backoff: Tensor
    begins: Tensor
    ends: Tensor
    token_ids: Tensor
    logits: Tensor
    slots: Tensor

    @classmethod
    def from_counts(cls, counts: _Counts, rows: Int64s, probs: Float64s, vocab_size: int) -> "_Successors":
        """Lay out the entries with probabilities ``probs`` ``[E]`` for the contexts ``rows`` ``[C]``, ascending."""
        entry_contexts = counts.contexts[counts.owners]
        begins = np.searchsorted(entry_contexts, rows, side="left")
        ends = np.searchsorted(entry_contexts, rows, side="right")
        return cls(
            contexts=torch.from_numpy(rows),
            log_backoff=torch.from_numpy(np.log(counts.backoff_of(rows)).astype(np.float32)),
            begins=torch.from_numpy(begins),
            ends=torch.from_numpy(ends),
            token_ids=torch.from_numpy(np.append(counts.words, vocab_size)),
            logits=torch.from_numpy(np.append(np.log(probs), -np.inf).astype(np.float32)),
            slots=torch.arange(int((ends - begins).max()) + 1),
        )

    def to(self, device: torch.device | str) -> "_Successors":
        """Return the same table on ``device``."""
        return _Successors(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def find(self, contexts: Tensor) -> Tensor:
        """Return int64 ``[R]``, the row of each context; the last row, which has no entries, where there is none."""
        row = torch.searchsorted(self.contexts, contexts)
        return torch.where(self.contexts[row] == contexts, row, self.contexts.shape[0] - 1)

    def overwrite(self, rows: Tensor, out: Tensor) -> None:
        """Write the successors of ``rows`` int64 ``[R]`` over their columns of ``out``; padding goes to column V."""
        entries = self.begins[rows, None] + self.slots
        entries = torch.where(entries < self.ends[rows, None], entries, self.token_ids.shape[0] - 1)
        out.scatter_(1, self.token_ids[entries], self.logits[entries])


@dataclass(frozen=True)
class NgramModel:
    """A trigram language model: every token has a finite logit after every context, and each row sums to 1.

    ``<bos>`` and ``<unk>`` stand in contexts but count as nobody's successor: they keep the least probability.

    Attributes:
        vocabulary: the tokens behind the ids.
        log_unigram: float32 ``[V]``: natural log of P1.
        bigrams: successors of one token; its context is its row.
        trigrams: successors of two tokens ``a, b``, its context ``a * V + b``.
    """

    vocabulary: Vocabulary
    log_unigram: Tensor
    bigrams: _Successors
    trigrams: _Successors

    @classmethod
    def from_documents(cls, docs: Iterable[str], vocab_size: int = 32_000, max_successors: int = 512) -> "NgramModel":
        """Count the documents, each framed by two ``<bos>`` and an ``<eos>``.

        Args:
            docs: the texts.
            vocab_size: the most entries to have, at least 4: three are special.
            max_successors: how many successors a context keeps, at least 1; the rarest share the backoff.

        Raises:
            ValueError: no document is given, or an option is out of range.
        """
        if max_successors < 1:
            raise ValueError(f"max_successors must be at least 1, got {max_successors}; 512 is the default")
        texts = list(docs)
        if not texts:
            raise ValueError("docs must hold at least one document, got none")
        # Tokens as Python strings take ten times the room of the text: cut twice rather than keep them.
        vocabulary = Vocabulary.from_tokens(map(tokenize, texts), vocab_size)
        framed = ([BOS_ID, BOS_ID, *vocabulary.encode(tokenize(text)), EOS_ID] for text in texts)
        return cls._from_ids(vocabulary, np.concatenate([np.array(ids, np.int64) for ids in framed]), max_successors)

    @classmethod
    def _from_ids(cls, vocabulary: Vocabulary, ids: Int64s, max_successors: int) -> "NgramModel":
        """Build the tables from int64 ``[N]``, the framed documents one after the other."""
        size = len(vocabulary)
        before, previous, words = ids[:-2], ids[1:-1], ids[2:]
        counted = (words != BOS_ID) & (words != UNK_ID)
        before, previous, words = before[counted], previous[counted], words[counted]
        unigram = np.divide(np.bincount(words, minlength=size) + 0.5, len(words) + 0.5 * size, dtype=np.float64)

        bi = _Counts.from_ngrams(previous, words, size, max_successors)
        bi_probs = bi.gains + bi.backoff[bi.owners] * unigram[bi.words]
        tri = _Counts.from_ngrams(before * size + previous, words, size, max_successors)
        # The bigram probability of each trigram's word: its own entry where it was kept, else backed off.
        after = tri.contexts[tri.owners] % size
        keys, pairs = bi.contexts[bi.owners] * size + bi.words, after * size + tri.words
        place = np.minimum(np.searchsorted(keys, pairs), len(keys) - 1)
        shorter = np.where(keys[place] == pairs, bi_probs[place], bi.backoff_of(after) * unigram[tri.words])
        tri_probs = tri.gains + tri.backoff[tri.owners] * shorter
        return cls(
            vocabulary,
            torch.from_numpy(np.log(unigram).astype(np.float32)),
            _Successors.from_counts(bi, np.arange(size, dtype=np.int64), bi_probs, size),
            # One context more, above every real one and without entries, is the row of those never seen.
            _Successors.from_counts(tri, np.append(tri.contexts, size * size), tri_probs, size),
        )

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens."""
        return len(self.vocabulary)

    def to(self, device: torch.device | str) -> "NgramModel":
        """Return the same model on ``device``."""
        bigrams, trigrams = self.bigrams.to(device), self.trigrams.to(device)
        return NgramModel(self.vocabulary, self.log_unigram.to(device), bigrams, trigrams)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text's tokens, without ``<bos>`` and ``<eos>``."""
        return self.vocabulary.encode(tokenize(text))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids in ``[0, V)``; it undoes :meth:`encode` where every token is known."""
        return self.vocabulary.decode(ids)

    def write_logits(self, context: Tensor, out: Tensor) -> None:
        """Write the log-probability of each token after its row's last two.

        Args:
            context: int64 ``[R, 2]``, the last two token ids in order, below V; negative ones are ``<bos>``.
            out: float32 ``[R, V + 1 or more]`` of any strides. Afterwards columns below V hold natural logs whose
                exponentials sum to 1, and column V, which takes the padding, -inf; later columns stay untouched.

        Raises:
            ValueError: a shape or a dtype is another.
        """
        _check("context", context, (2,), out, self.vocab_size)
        before, previous = context.clamp(min=BOS_ID).unbind(1)
        row = self.trigrams.find(before * self.vocab_size + previous)
        self.write_bigram_logits(previous, out)
        out[:, : self.vocab_size].add_(self.trigrams.log_backoff[row, None])
        self.trigrams.overwrite(row, out)

    def write_bigram_logits(self, previous: Tensor, out: Tensor) -> None:
        """Write P2's logs as :meth:`write_logits` writes P3's; ``previous`` int64 ``[R]`` is the last token."""
        _check("previous", previous, (), out, self.vocab_size)
        previous = previous.clamp(min=BOS_ID)
        torch.add(self.log_unigram, self.bigrams.log_backoff[previous, None], out=out[:, : self.vocab_size])
        self.bigrams.overwrite(previous, out)

    def logits(self, context: Tensor) -> Tensor:
        """Return float32 ``[R, V]`` (row stride V + 1), what :meth:`write_logits` writes for ``context`` ``[R, 2]``."""
        out = self.log_unigram.new_empty(context.shape[0], self.vocab_size + 1)
        self.write_logits(context, out)
        return out[:, : self.vocab_size]

    def bigram_logits(self, previous: Tensor) -> Tensor:
        """Return float32 ``[R, V]`` (row stride V + 1), what :meth:`write_bigram_logits` writes for ``[R]`` ids."""
        out = self.log_unigram.new_empty(previous.shape[0], self.vocab_size + 1)
        self.write_bigram_logits(previous, out)
        return out[:, : self.vocab_size]


def _check(name: str, ids: Tensor, columns: tuple[int, ...], out: Tensor, vocab_size: int) -> None:
    if ids.dtype != torch.int64 or ids.ndim != 1 + len(columns) or tuple(ids.shape[1:]) != columns:
        raise ValueError(f"{name} must be int64 {['R', *columns]}, got {ids.dtype} {list(ids.shape)}; convert it first")
    if out.dtype != torch.float32 or out.ndim != 2 or len(out) != len(ids) or out.shape[1] <= vocab_size:
        rule = f"out must be float32 [{len(ids)}, {vocab_size + 1} or more]"
        raise ValueError(f"{rule}, got {out.dtype} {list(out.shape)}; column V takes the padding")
