"""Samplers with one fault each; ``FOUND_BY`` names the question that is meant for it."""

import os
import sys
import time
from dataclasses import replace
from typing import ClassVar

import torch

from compiled_sampler.conformance import Params, Verified
from tests.compiled_sampler.conformance.adapters.race_adapter import DRAFT, TARGET, Race, mixed

LIMIT = 2**14
"""Logits of a call from which ``OffsetsOf32Bits`` reads elsewhere, instead of 2**31."""


def keyed(name, changed):
    """A race whose noise is that of changed seeds, positions or streams."""
    return type(name, (Race,), {"keys": lambda self, *given: Race.keys(self, *changed(*given))})


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


class Biased(Race):
    """The likelier half of each row gets 1 % of the law too much."""

    def raced(self, scaled, keys):
        p, ids = scaled.softmax(-1).sort(dim=-1, descending=True)
        likely = torch.zeros_like(p).scatter(1, ids, (p.cumsum(-1) - p < 0.5).double()) > 0.0
        share = (scaled.softmax(-1) * likely).sum(-1, keepdim=True)
        return super().raced(scaled + torch.where(likely, 1 + 0.01 / share, 1 - 0.01 / (1 - share)).log(), keys)


class TruncatedTail(Race):
    """Uniform numbers of 10 bits: light tokens never win."""

    def uniform(self, keys, columns):
        return (super().uniform(keys, columns) * 2**10).floor().add(0.5) / 2**10


class KeepsOneTooMany(Race):
    """The token at the boundary of top_p is kept, though it is not declared."""

    def before_cut(self, before, cut, top_p):
        return (before <= cut) | (top_p == 1.0)


class DropsTop_p(Race):
    """Drops top_p where top_k is set."""

    def kept(self, ordered, top_k, top_p, min_p):
        return super().kept(ordered, top_k, torch.where(top_k > 0, 1.0, top_p), min_p)


class TiesByValue(Race):
    """All tokens equal to the k-th are kept."""

    def kept(self, ordered, top_k, top_p, min_p):
        last = ordered.gather(1, (top_k.long() - 1).clamp(0, ordered.shape[1] - 1))
        return super().kept(ordered, (ordered >= last).sum(-1, keepdim=True) * (top_k > 0), top_p, min_p)


class BatchDependent(Race):
    """A greedy batchmate changes the noise of the others."""

    def sample(self, logits, params, seeds, positions):
        return super().sample(logits, params, seeds, positions + 10**6 * any(p.temperature == 0.0 for p in params))


class KeyedByRow(Race):
    """Noise is that of the row in the batch."""

    def keys(self, seeds, positions, stream):
        return mixed(super().keys(seeds, positions, stream) + torch.arange(len(seeds)))


class Stateful(Race):
    """A hidden counter advances with each call."""

    calls = 0

    def keys(self, seeds, positions, stream):
        Stateful.calls += 1
        return super().keys(seeds, positions, stream + 8 * Stateful.calls)


class ReadsStorage(Race):
    """Takes rows for contiguous ones."""

    def sample(self, logits, params, seeds, positions):
        rows, columns = logits.shape
        return super().sample(logits.as_strided((rows, columns), (columns, 1)), params, seeds, positions)


class AcceptsImpossible(Race):
    """The acceptance test is not strict, and its uniform number is often 0."""

    def accepts(self, p, q, keys):
        u = (self.uniform(keys, 1)[:, 0] - 0.01).clamp(min=0.0)
        return (u * q <= p) & (q > 0)


class StreamShifted(Race):
    """With drafts the noise of the next position is taken."""

    def verify(self, drafted, rule):
        return super().verify(drafted._replace(positions=drafted.positions + 1), rule)


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


class ClampsDrafts(Race):
    """Takes a draft that is no token for the nearest one."""

    def verify(self, drafted, rule):
        return super().verify(drafted._replace(drafts=drafted.drafts.clamp(0, self.vocab_size - 1)), rule)


class HalfPrecision(Race):
    """Rounds logits to 16 bits."""

    def scaled(self, logits, params):
        return super().scaled(logits.bfloat16(), params)


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


class SilentStatus(Race):
    """Reports nothing."""

    def status(self, logits, params, seeds, positions):
        return [set() for _ in seeds]


class ShiftedLogprobs(Race):
    """Logprobs are those of the next token."""

    def logprobs(self, logits, params, token_ids):
        return super().logprobs(logits, params, token_ids.roll(1))


class LawBeforeFilters(Race):
    """``probs`` forgets the filters."""

    def probs(self, logits, params):
        return super().probs(logits, [Params(each.temperature) for each in params])


class FrozenReplay(Race):
    """A replay keeps the positions of its capture."""

    def capture(self, logits, params, seeds, positions):
        return lambda x, p, s, _: self.sample(x, p, s, positions)


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


class Undeclared(Race):
    """Declares nothing."""

    semantics = None


class DeclaresDict(Race):
    """Declares its choices in a dict."""

    semantics: ClassVar = {"seeds": "row"}


class PathOfOneBit(Race):
    """Names another path, which takes one seed for another."""

    def paths(self):
        return {"one bit": OneBit}


class PathOfOtherNoise(Race):
    """Names another path, whose verifications have other noise."""

    def paths(self):
        return {"other noise": OtherNoise}


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


FOUND_BY = {
    "law.no_filter": Biased,
    "law.top_p_boundary": KeepsOneTooMany,
    "law.top_p_base": DropsTop_p,
    "law.top_k_ties": TiesByValue,
    "law.large_logits": HalfPrecision,
    "law.greedy_ties": LastOfTies,
    "law.probs": LawBeforeFilters,
    "law.logprobs": ShiftedLogprobs,
    "determinism.twice": Stateful,
    "determinism.alone": KeyedByRow,
    "determinism.order": KeyedByRow,
    "determinism.batch_size": KeyedBySize,
    "determinism.batchmates": BatchDependent,
    "determinism.equal_rows": KeyedByRow,
    "determinism.strides": ReadsStorage,
    "determinism.other_work": Stateful,
    "determinism.preemption": KeyedBySize,
    "determinism.new_process": OfItsProcess,
    "determinism.replay": FrozenReplay,
    "randomness.seed_1": SeedIgnored,
    "randomness.seed_2**32": SeedOf32Bits,
    "randomness.seed_2**63": SeedOf32Bits,
    "randomness.position_1": SeedReused,
    "randomness.position_2**32": SeedReused,
    "randomness.serial": SeedReused,
    "randomness.serial_top_p": SeedReused,
    "randomness.swapped": SeedPlusPosition,
    "randomness.sum": SeedPlusPosition,
    "randomness.seed_negative": SeedIgnored,
    "randomness.unseeded": UnseededAlike,
    "verification.one_hot": ResidualOfTarget,
    "verification.drawn": ResidualOfTarget,
    "verification.own_drafts": SharesNoise,
    "verification.stream": StreamShifted,
    "verification.impossible": AcceptsImpossible,
    "verification.impossible_drawn": AcceptsImpossible,
    "verification.out_of_range": ClampsDrafts,
    "verification.counters": CountsPastRejection,
    "verification.trees": LooksAtOneChild,
    "robustness.nan": NanCrash,
    "robustness.all_masked": OutOfRange,
    "robustness.padded_vocab": DrawsPadding,
    "robustness.inputs": InPlace,
    "robustness.status": SilentStatus,
    "determinism.paths": PathOfOneBit,
    "verification.paths": PathOfOtherNoise,
    "robustness.single_token": PadsOddRows,
    "robustness.empty_batch": NeedsARow,
    "robustness.large_offsets": OffsetsOf32Bits,
}
"""The question that is meant for a fault, and a sampler that has it."""

ALSO_FOUND = (
    ("determinism.twice", StaticBuffer),
    ("determinism.strides", StaticBuffer),
    ("determinism.other_work", StaticBuffer),
    ("robustness.empty_batch", Exits),
    ("robustness.infinity", LastOfTies),
    ("robustness.inputs", MovesPositions),
    ("robustness.inputs", RewritesParents),
    ("robustness.inputs", SortsIds),
    ("robustness.inputs", ForgetsSeeds),
)
"""More faults of such questions."""

COSTLY = {
    "cost.allocations": Allocates,
    "cost.synchronisations": Waits,
    "cost.host_time": Slow,
}
"""The same of what a replay costs; these need a device, or a simulated one."""
