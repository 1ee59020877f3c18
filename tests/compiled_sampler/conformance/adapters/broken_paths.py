"""Samplers with one fault each in their paths, at the edge of shapes, or in what a replay costs."""

import time

import torch

from tests.compiled_sampler.conformance.adapters.race_adapter import TARGET, Race

LIMIT = 2**14
"""Logits of a call from which ``OffsetsOf32Bits`` reads elsewhere, instead of 2**31."""


class OneBit(Race):
    """Takes one seed of a batch's 240 for another: the last bit of seed 1."""

    def keys(self, seeds, positions, stream):
        return super().keys([0 if seed == 1 else seed for seed in seeds], positions, stream)


class PathOfOneBit(Race):
    """Names another path, which takes one seed for another."""

    def paths(self):
        return {"one bit": OneBit}


class OtherNoise(Race):
    """Samples alike, and verifies by rejection with other noise."""

    def keys(self, seeds, positions, stream):
        return super().keys(seeds, positions, stream + 8 * (stream != TARGET))


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
    "determinism.paths": PathOfOneBit,
    "verification.paths": PathOfOtherNoise,
    "robustness.single_token": PadsOddRows,
    "robustness.empty_batch": NeedsARow,
    "robustness.large_offsets": OffsetsOf32Bits,
}
COSTLY = {
    "cost.allocations": Allocates,
    "cost.synchronisations": Waits,
    "cost.host_time": Slow,
}
"""The question that is meant for a fault, and a sampler that has it; the latter need a device, or a simulated one."""
