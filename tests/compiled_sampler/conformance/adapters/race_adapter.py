"""A sampler that is right, small and shares no code with the package: an exponential race in float64.

The broken samplers of ``broken_adapters.py`` differ from it in one method each.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from compiled_sampler.conformance import Drafted, Params, Semantics, Verified

TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)
Seeds = Sequence[int | None]


def mixed(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, int64 of any shape."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * (factor - 2**64)
    return x ^ ((x >> 31) & (2**33 - 1))


class Race:
    """Right under every declared default, with verification by match and by rejection."""

    semantics: ClassVar[Semantics] = Semantics(padded_vocab=True, rules=("match", "rejection"))

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size

    def keys(self, seeds: Seeds, positions: Tensor, stream: int) -> Tensor:
        """int64 ``[R]``."""
        numbers = [torch.randint(2**62, ()).item() if seed is None else seed for seed in seeds]
        words = torch.tensor([(n + 2**63) % 2**64 - 2**63 for n in numbers], dtype=torch.int64)
        return mixed(mixed(mixed(words + 77) + positions) + stream)

    def uniform(self, keys: Tensor, columns: int) -> Tensor:
        """float64 ``[R, V]`` in (0, 1)."""
        bits = mixed(keys[:, None] + 0x632BE59BD9B4E019 * (torch.arange(columns) + 1))
        return (((bits >> 11) & (2**53 - 1)) + 0.5) * 2.0**-53

    def scaled(self, logits: Tensor, params: Sequence[Params]) -> Tensor:
        """Kept logits by the temperature, the others -inf: float64 ``[R, V]``."""
        x = logits[:, : self.vocab_size].double()
        x = torch.where(x.isnan(), -torch.inf, x)
        top = x.amax(-1, keepdim=True)
        x = torch.where(top == torch.inf, torch.where(x == torch.inf, 0.0, -torch.inf), x - top.clamp(-1e300, 1e300))
        settings = torch.tensor([[p.temperature, p.top_k, p.top_p, p.min_p] for p in params], dtype=torch.float64)
        temperature, top_k, top_p, min_p = settings.reshape(-1, 4, 1).unbind(1)
        greedy = temperature == 0.0
        x = x / torch.where(greedy, 1.0, temperature)
        ordered, ids = x.sort(dim=-1, descending=True, stable=True)
        kept = self.kept(ordered, torch.where(greedy, 1.0, top_k), top_p, min_p)
        return torch.full_like(x, -torch.inf).scatter(1, ids, torch.where(kept, ordered, -torch.inf))

    def kept(self, ordered: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        """Bool ``[R, V]`` over the order of each row."""
        rank = torch.arange(ordered.shape[1])
        mass = ordered.exp() * ((rank < top_k) | (top_k == 0))
        before = mass.cumsum(-1) - mass
        return (mass > 0.0) & self.before_cut(before, top_p * mass.sum(-1, keepdim=True), top_p) & (mass >= min_p)

    def before_cut(self, before: Tensor, cut: Tensor, top_p: Tensor) -> Tensor:
        return (before < cut) | (top_p == 1.0)

    def raced(self, scaled: Tensor, keys: Tensor) -> Tensor:
        """The winner of each row, -1 where every token is masked."""
        scores = scaled - torch.log(-torch.log1p(-self.uniform(keys, scaled.shape[1])))
        return torch.where((scaled > -torch.inf).any(-1), scores.argmax(-1), -1) if len(scaled) else keys

    def sample(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> Tensor:
        return self.raced(self.scaled(logits, params), self.keys(seeds, positions, TARGET))

    def probs(self, logits: Tensor, params: Sequence[Params]) -> Tensor:
        return self.scaled(logits, params).softmax(-1)

    def logprobs(self, logits: Tensor, params: Sequence[Params], token_ids: Tensor) -> Tensor:
        return self.probs(logits, params).log().gather(1, token_ids[:, None])[:, 0]

    def status(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> list[set[str]]:
        tests = {"nan": logits.isnan().any(-1), "infinity": (logits == torch.inf).any(-1)}
        tests["all_masked"] = ~(logits > -torch.inf).any(-1)
        return [{name for name, found in tests.items() if found[row]} for row in range(len(logits))]

    def draft(
        self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor, offset: int, rule: str
    ) -> Tensor:
        stream = TARGET if rule == "match" else DRAFT
        return self.raced(self.scaled(logits, params), self.keys(seeds, positions, stream))

    def verify(self, drafted: Drafted, rule: str) -> Verified:
        """Place by place; a request that was ended keeps what it has."""
        counts = torch.tensor(drafted.num_drafts)
        first = (counts + 1).cumsum(0) - counts - 1
        n, width = drafted.drafts.shape
        tokens, accepted = torch.full((n, width + 1), -1), torch.zeros(n, dtype=torch.int64)
        for j in range(width + 1):
            alive = ((accepted == j) & (counts >= j)).nonzero()[:, 0]
            rows, places = (first + j)[alive], drafted.positions[alive] + j
            seeds, params = [drafted.seeds[i] for i in alive], [drafted.params[i] for i in alive]
            scaled = self.scaled(drafted.logits[rows], params)
            is_last = counts[alive] == j
            drafts = torch.where(is_last, -1, drafted.drafts[alive, min(j, width - 1)])
            proposed = self.proposed(drafted, first[alive] - alive + j, drafts, is_last)
            if rule == "match":
                found = self.raced(scaled, self.keys(seeds, places, TARGET))
                passes = (found == drafts) & (found >= 0)
            else:
                passes, found = self.rejected(scaled, proposed, drafts, seeds, places)
            tokens[alive, j] = torch.where(passes, drafts, found)
            accepted[alive] += passes
        return self.counted(Verified(tokens, accepted + 1, accepted), drafted)

    def verify_trees(self, drafted: Drafted, parents: Tensor) -> Verified:
        """Draws every row, then walks."""
        width, tokens, accepted = parents.shape[1], [], []
        for n, tree in enumerate(parents.tolist()):
            depths = [0]
            for parent in tree:
                depths.append(depths[parent + 1] + 1)
            rows = drafted.logits[n * (width + 1) : (n + 1) * (width + 1)]
            scaled = self.scaled(rows, [drafted.params[n]] * len(rows))
            places = drafted.positions[n] + torch.tensor(depths)
            own = self.raced(scaled, self.keys([drafted.seeds[n]] * len(rows), places, TARGET)).tolist()
            path = self.walked(tree, drafted.drafts[n].tolist(), own)
            made = [own[row] for row in (0, *(node + 1 for node in path))]
            tokens.append(made + [-1] * (width + 1 - len(made)))
            accepted.append(len(path))
        return Verified(torch.tensor(tokens), torch.tensor(accepted) + 1, torch.tensor(accepted))

    def walked(self, tree: list[int], drafts: list[int], own: list[int]) -> list[int]:
        """The nodes that are accepted."""
        node, path = -1, list[int]()
        for child, parent in enumerate(tree):
            if parent == node and drafts[child] == own[node + 1]:
                node = child
                path.append(node)
        return path

    def proposed(self, drafted: Drafted, rows: Tensor, drafts: Tensor, is_last: Tensor) -> Tensor:
        """The law of each draft, float64 ``[N, V]``; 0 where there is none."""
        is_token = (drafts >= 0) & (drafts < self.vocab_size) & ~is_last
        if drafted.probs is None:
            one_hot = torch.nn.functional.one_hot(drafts.clamp(0, self.vocab_size - 1), self.vocab_size)
            return one_hot.double() * is_token[:, None]
        return drafted.probs[rows.clamp(max=len(drafted.probs) - 1)].double() * is_token[:, None]

    def rejected(
        self, scaled: Tensor, q: Tensor, drafts: Tensor, seeds: Seeds, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Which drafts pass, and the token instead: of the residual, or of the target where there was no draft."""
        p, at = scaled.softmax(-1), drafts.clamp(0, self.vocab_size - 1)[:, None]
        passes = self.accepts(p.gather(1, at)[:, 0], q.gather(1, at)[:, 0], self.keys(seeds, places, ACCEPT))
        residual = self.raced((p - q).clamp(min=0.0).log(), self.keys(seeds, places, RESIDUAL))
        return passes, torch.where(q.sum(-1) > 0, residual, self.raced(scaled, self.keys(seeds, places, TARGET)))

    def accepts(self, p: Tensor, q: Tensor, keys: Tensor) -> Tensor:
        return (self.uniform(keys, 1)[:, 0] * q < p) & (q > 0)

    def counted(self, verified: Verified, drafted: Drafted) -> Verified:
        return verified
