"""Samplers with one fault each; ``FAULTS`` names the questions that are meant for it."""

import os
import sys
import time
from dataclasses import replace

import torch

from compiled_sampler.conformance import Params, Verified
from tests.compiled_sampler.conformance.adapters.race_adapter import DRAFT, TARGET, Race, mixed

LIMIT = 2**14
"""Logits of a call from which ``OffsetsOf32Bits`` reads elsewhere, instead of 2**31."""


def other(name, **methods):
    """A race with other methods."""
    return type(name, (Race,), methods)


def misled(name, method, changed):
    """A race of which one method gets other arguments."""
    return other(name, **{method: lambda self, *given: getattr(Race, method)(self, *changed(*given))})


def keyed(name, changed):
    """A race whose noise is that of changed seeds, positions or streams."""
    return misled(name, "keys", changed)


def with_positions(seeds, positions):
    """Seeds with the positions added."""
    return [None if seed is None else seed + int(at) for seed, at in zip(seeds, positions, strict=True)]


KeyedBySize = keyed("KeyedBySize", lambda seeds, at, stream: (seeds, at, stream + 8 * len(seeds).bit_length()))
"""Noise depends on the bucket of the batch."""

OfItsProcess = keyed("OfItsProcess", lambda seeds, at, stream: (seeds, at, stream + 8 * os.getpid()))
"""Noise depends on the process."""

SeedIgnored = keyed("SeedIgnored", lambda seeds, at, stream: ([5] * len(seeds), at, stream))
"""Every request has seed 5."""

SeedOf32Bits = keyed("SeedOf32Bits", lambda seeds, at, stream: ([s and s % 2**32 for s in seeds], at, stream))
"""The high half of a seed is dropped."""

SeedReused = keyed("SeedReused", lambda seeds, at, stream: (seeds, at * 0, stream))
"""Every position of a request has the noise of the first."""

SeedPlusPosition = keyed("SeedPlusPosition", lambda seeds, at, stream: (with_positions(seeds, at), at * 0, stream))
"""Seed and position are added."""

UnseededAlike = keyed("UnseededAlike", lambda seeds, at, stream: ([seed or 0 for seed in seeds], at, stream))
"""A missing seed is 0."""

SharesNoise = keyed("SharesNoise", lambda seeds, at, stream: (seeds, at, min(stream, DRAFT)))
"""Drafts, tests and residuals have one noise."""

OneBit = keyed("OneBit", lambda seeds, at, stream: ([0 if seed == 1 else seed for seed in seeds], at, stream))
"""Takes one seed of a batch's 240 for another: the last bit of seed 1."""

OtherNoise = keyed("OtherNoise", lambda seeds, at, stream: (seeds, at, stream + 8 * (stream != TARGET)))
"""Samples alike, and verifies by rejection with other noise."""


TruncatedTail = other("TruncatedTail", uniform=lambda *given: (Race.uniform(*given) * 2**10).floor().add(0.5) / 2**10)
"""Uniform numbers of 10 bits: light tokens never win."""

KeepsOneTooMany = other("KeepsOneTooMany", before_cut=lambda self, before, cut, top_p: (before <= cut) | (top_p == 1.0))
"""The token at the boundary of top_p is kept, though it is not declared."""

DropsTop_p = misled(
    "DropsTop_p", "kept", lambda ordered, k, top_p, min_p: (ordered, k, torch.where(k > 0, 1.0, top_p), min_p)
)
"""Drops top_p where top_k is set."""

BatchDependent = misled(
    "BatchDependent",
    "sample",
    lambda logits, params, seeds, at: (logits, params, seeds, at + 10**6 * any(p.temperature == 0.0 for p in params)),
)
"""A greedy batchmate changes the noise of the others."""

KeyedByRow = other(
    "KeyedByRow", keys=lambda self, seeds, *given: mixed(Race.keys(self, seeds, *given) + torch.arange(len(seeds)))
)
"""Noise is that of the row in the batch."""

ReadsStorage = misled(
    "ReadsStorage", "sample", lambda logits, *rest: (logits.as_strided(logits.shape, (logits.shape[1], 1)), *rest)
)
"""Takes rows for contiguous ones."""

StreamShifted = misled(
    "StreamShifted", "verify", lambda drafted, rule: (drafted._replace(positions=drafted.positions + 1), rule)
)


"""With drafts the noise of the next position is taken."""

ClampsDrafts = misled(
    "ClampsDrafts",
    "verify",
    lambda drafted, rule: (drafted._replace(drafts=drafted.drafts.clamp(0, drafted.logits.shape[1] - 1)), rule),
)
"""Takes a draft that is no token for the nearest one."""

HalfPrecision = misled("HalfPrecision", "scaled", lambda logits, params: (logits.bfloat16(), params))
"""Rounds logits to 16 bits."""

SilentStatus = other("SilentStatus", status=lambda self, logits, params, seeds, positions: [set() for _ in seeds])
"""Reports nothing."""

ShiftedLogprobs = misled("ShiftedLogprobs", "logprobs", lambda logits, params, ids: (logits, params, ids.roll(1)))
"""Logprobs are those of the next token."""

LawBeforeFilters = misled(
    "LawBeforeFilters", "probs", lambda logits, params: (logits, [Params(each.temperature) for each in params])
)
"""``probs`` forgets the filters."""

FrozenReplay = other(
    "FrozenReplay", capture=lambda self, x, p, s, positions: lambda x, p, s, _: self.sample(x, p, s, positions)
)
"""A replay keeps the positions of its capture."""

Undeclared = other("Undeclared", semantics=None)
"""Declares nothing."""

DeclaresDict = other("DeclaresDict", semantics={"seeds": "row"})
"""Declares its choices in a dict."""

PathOfOneBit = other("PathOfOneBit", paths=lambda self: {"one bit": OneBit})
"""Names another path, which takes one seed for another."""

PathOfOtherNoise = other("PathOfOtherNoise", paths=lambda self: {"other noise": OtherNoise})
"""Names another path, whose verifications have other noise."""


class Biased(Race):
    """The likelier half of each row gets 1 % of the law too much."""

    def raced(self, scaled, keys):
        p, ids = scaled.softmax(-1).sort(dim=-1, descending=True)
        likely = torch.zeros_like(p).scatter(1, ids, (p.cumsum(-1) - p < 0.5).double()) > 0.0
        share = (scaled.softmax(-1) * likely).sum(-1, keepdim=True)
        return super().raced(scaled + torch.where(likely, 1 + 0.01 / share, 1 - 0.01 / (1 - share)).log(), keys)


class TiesByValue(Race):
    """All tokens equal to the k-th are kept."""

    def kept(self, ordered, top_k, top_p, min_p):
        last = ordered.gather(1, (top_k.long() - 1).clamp(0, ordered.shape[1] - 1))
        return super().kept(ordered, (ordered >= last).sum(-1, keepdim=True) * (top_k > 0), top_p, min_p)


class Stateful(Race):
    """A hidden counter advances with each call."""

    calls = 0

    def keys(self, seeds, positions, stream):
        Stateful.calls += 1
        return super().keys(seeds, positions, stream + 8 * Stateful.calls)


class AcceptsImpossible(Race):
    """The acceptance test is not strict, and its uniform number is often 0."""

    def accepts(self, p, q, keys):
        u = (self.uniform(keys, 1)[:, 0] - 0.01).clamp(min=0.0)
        return (u * q <= p) & (q > 0)


class ResidualOfTarget(Race):
    """A rejected draft is replaced by a draw of the target, not of the residual."""

    def rejected(self, scaled, q, drafts, seeds, places):
        passes, _ = super().rejected(scaled, q, drafts, seeds, places)
        return passes, self.raced(scaled, self.keys(seeds, places, TARGET))


class CountsPastRejection(Race):
    """Matches behind the first rejection are counted as accepted."""

    def counted(self, verified, drafted):
        matching = (verified.token_ids[:, :-1] == drafted.drafts) & (drafted.drafts >= 0)
        more = matching.sum(-1) + (torch.tensor(drafted.num_drafts) > verified.num_accepted)
        return Verified(verified.token_ids, verified.num_emitted, torch.maximum(more, verified.num_accepted))


class LooksAtOneChild(Race):
    """Of several children the last one alone is compared."""

    def walked(self, tree, drafts, own):
        last = {parent: child for child, parent in enumerate(tree)}
        alone = [draft if last[tree[child]] == child else -1 for child, draft in enumerate(drafts)]
        return super().walked(tree, alone, own)


class NanCrash(Race):
    """Raises where a logit is NaN."""

    def sample(self, logits, params, seeds, positions):
        if logits.isnan().any():
            raise RuntimeError("probability tensor contains nan")
        return super().sample(logits, params, seeds, positions)


class DrawsPadding(Race):
    """Columns beyond the vocabulary are tokens."""

    def scaled(self, logits, params):
        self.vocab_size = logits.shape[1]
        return super().scaled(logits, params)


class OutOfRange(Race):
    """A row of -inf gives the id V."""

    semantics = replace(Race.semantics, all_masked="any")

    def sample(self, logits, params, seeds, positions):
        tokens = super().sample(logits, params, seeds, positions)
        return torch.where(tokens < 0, self.vocab_size, tokens)


class Buffered(Race):
    """Right, and returns one buffer from all calls of a size."""

    def __init__(self, vocab_size, device):
        super().__init__(vocab_size, device)
        self.buffers = {}

    def sample(self, logits, params, seeds, positions):
        tokens = super().sample(logits, params, seeds, positions)
        return self.buffers.setdefault(len(tokens), tokens).copy_(tokens)


class StaticBuffer(Buffered):
    """Draws without a seed, too: each call overwrites the one before."""

    def sample(self, logits, params, seeds, positions):
        return super().sample(logits, params, [None] * len(seeds), positions)


class InPlace(Buffered):
    """Right, but writes its logits in place, too."""

    def scaled(self, logits, params):
        scaled = super().scaled(logits, params)
        logits.fill_(7.0)
        return scaled


class MovesPositions(Race):
    """A drafter that adds its offset to the positions that it is given."""

    def draft(self, logits, params, seeds, positions, offset, rule):
        positions += offset + 1
        return super().draft(logits, params, seeds, positions, 0, rule)


class RewritesParents(Race):
    """Makes the root of a tree its own parent."""

    def verify_trees(self, drafted, parents):
        verified = super().verify_trees(drafted, parents)
        parents.clamp_(min=0)
        return verified


class SortsIds(Race):
    """Sorts the tokens whose logprobs are asked for."""

    def logprobs(self, logits, params, token_ids):
        wanted = super().logprobs(logits, params, token_ids)
        token_ids.copy_(token_ids.sort().values)
        return wanted


class ForgetsSeeds(Race):
    """A replay empties the list of seeds."""

    def capture(self, logits, params, seeds, positions):
        def replay(logits, params, seeds, positions):
            tokens = self.sample(logits, params, seeds, positions)
            seeds.clear()
            return tokens

        return replay


class Consumes(InPlace):
    """The same, declared."""

    semantics = replace(Race.semantics, consumes_logits=True)


class LastOfTies(Race):
    """Of equal largest logits, takes the last where a row is greedy."""

    def sample(self, logits, params, seeds, positions):
        top = logits.amax(-1, keepdim=True)
        is_last = torch.tensor([p.temperature == 0.0 for p in params]) & (top > -torch.inf)[:, 0]
        last = logits.shape[1] - 1 - (logits == top).flip(-1).int().argmax(-1)
        return torch.where(is_last, last, super().sample(logits, params, seeds, positions))


class TakesAnyOfTies(LastOfTies):
    """The same, declared."""

    semantics = replace(Race.semantics, greedy_ties="any")


class Exits(Race):
    """An engine that gives up where a batch is empty."""

    def sample(self, logits, params, seeds, positions):
        if len(logits) == 0:
            sys.exit(0)
        return super().sample(logits, params, seeds, positions)


class PadsOddRows(Race):
    """Pads a row of odd length by a zero, and draws it too."""

    def sample(self, logits, params, seeds, positions):
        self.vocab_size += self.vocab_size % 2
        padded = torch.nn.functional.pad(logits, (0, logits.shape[1] % 2))
        return super().sample(padded, params, seeds, positions)


class NeedsARow(Race):
    """Looks at the first row of every batch."""

    def sample(self, logits, params, seeds, positions):
        if params[0].temperature == 0.0:
            return logits.argmax(-1)
        return super().sample(logits, params, seeds, positions)


class OffsetsOf32Bits(Race):
    """The offset of a row wraps around."""

    def sample(self, logits, params, seeds, positions):
        rows, columns = logits.shape
        offsets = torch.arange(rows)[:, None] * columns + torch.arange(columns)
        return super().sample(logits.flatten()[offsets % LIMIT], params, seeds, positions)


class Replays(Race):
    """Replays what it would draw otherwise: a host that does nothing but launch."""

    def capture(self, logits, params, seeds, positions):
        tokens = self.sample(logits.cpu(), params, seeds, positions.cpu()).to(logits.device)
        return lambda *_: self.replayed(tokens)

    def replayed(self, tokens):
        return tokens


class Allocates(Replays):
    """Returns a new tensor from every replay."""

    def replayed(self, tokens):
        return tokens.clone()


class Waits(Replays):
    """Looks at a token of every replay."""

    def replayed(self, tokens):
        tokens[0].item()
        return tokens


class Slow(Replays):
    """Keeps the host for two milliseconds."""

    def replayed(self, tokens):
        time.sleep(0.002)
        return tokens


FAULTS = {
    Biased: ["law.no_filter"],
    KeepsOneTooMany: ["law.top_p_boundary"],
    DropsTop_p: ["law.top_p_base"],
    TiesByValue: ["law.top_k_ties"],
    HalfPrecision: ["law.large_logits"],
    LawBeforeFilters: ["law.probs"],
    ShiftedLogprobs: ["law.logprobs"],
    Stateful: ["determinism.twice", "determinism.other_work"],
    KeyedByRow: ["determinism.alone", "determinism.order", "determinism.equal_rows"],
    KeyedBySize: ["determinism.batch_size", "determinism.preemption"],
    BatchDependent: ["determinism.batchmates"],
    ReadsStorage: ["determinism.strides"],
    OfItsProcess: ["determinism.new_process"],
    FrozenReplay: ["determinism.replay"],
    SeedIgnored: ["randomness.seed_1", "randomness.seed_negative"],
    SeedOf32Bits: ["randomness.seed_2**32", "randomness.seed_2**63"],
    SeedReused: ["randomness.position_1", "randomness.position_2**32", "randomness.serial", "randomness.serial_top_p"],
    SeedPlusPosition: ["randomness.swapped", "randomness.sum"],
    UnseededAlike: ["randomness.unseeded"],
    ResidualOfTarget: ["verification.one_hot", "verification.drawn"],
    SharesNoise: ["verification.own_drafts"],
    StreamShifted: ["verification.stream"],
    AcceptsImpossible: ["verification.impossible", "verification.impossible_drawn"],
    ClampsDrafts: ["verification.out_of_range"],
    CountsPastRejection: ["verification.counters"],
    LooksAtOneChild: ["verification.trees"],
    NanCrash: ["robustness.nan"],
    OutOfRange: ["robustness.all_masked"],
    DrawsPadding: ["robustness.padded_vocab"],
    InPlace: ["robustness.inputs"],
    MovesPositions: ["robustness.inputs"],
    RewritesParents: ["robustness.inputs"],
    SortsIds: ["robustness.inputs"],
    ForgetsSeeds: ["robustness.inputs"],
    SilentStatus: ["robustness.status"],
    PathOfOneBit: ["determinism.paths"],
    PathOfOtherNoise: ["verification.paths"],
    PadsOddRows: ["robustness.single_token"],
    NeedsARow: ["robustness.empty_batch"],
    OffsetsOf32Bits: ["robustness.large_offsets"],
    StaticBuffer: ["determinism.twice", "determinism.strides", "determinism.other_work"],
    Exits: ["robustness.empty_batch"],
    LastOfTies: ["law.greedy_ties", "robustness.infinity"],
}
"""Samplers by their fault, and the questions that are meant for it."""

COSTLY = {
    "cost.allocations": Allocates,
    "cost.synchronisations": Waits,
    "cost.host_time": Slow,
}
"""The same of what a replay costs; these need a device, or a simulated one."""
