"""Questions to a sampler whose vocabulary is split over gloo processes: each rank compares with whole rows."""

import gc
import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from traceback import format_exc
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from compiled_sampler import Draft, Logprobs, Plan, Sampler, SamplingParams, Verification, VocabularyShard, functional
from compiled_sampler import shard as shard_module
from compiled_sampler.edits.edit_spec import EditSizes
from compiled_sampler.modes import RULES
from compiled_sampler.passes.logprobs import LAW_BLOCK
from compiled_sampler.pipeline import sharded
from tests.builders.custom_edits import EDITS, HISTORY, V, params_with, random_inputs
from tests.builders.edits import EDITS as EVERY_EDIT
from tests.builders.edits import Request, random_mask, random_request
from tests.builders.filters import hard_rows
from tools.bench.cases import CASES
from tools.bench.sharded import COUNTED

F32, BF16 = torch.float32, torch.bfloat16
ROW_TENSORS = ("logits", "draft_logits", "draft_probs", "target_probs")
"""What a call gets that a rank has columns of alone."""
LAWS_OF_MODES: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}, {"top_k": 1}],
    "no_filter": [{}, {"temperature": 0.6}, {"temperature": 0.0}, {"temperature": 1e-5}],
    "min_p": [{"min_p": 0.1}, {"min_p": 1.0}, {"temperature": 1.7, "min_p": 1e-4}, {}],
    "top_k_top_p[64]": [{"top_k": 50, "top_p": 0.9}, {"top_k": 3}, {"top_k": 64, "top_p": 0.5, "min_p": 0.02}],
    "top_k": [{"top_k": 100}, {"top_k": 200, "min_p": 0.05}],
    "full": [{"top_p": 0.9}, {"top_k": 100, "top_p": 0.95, "min_p": 0.01}, {"top_p": 0.3}],
}
EDITS_OF_MODES: tuple[tuple[str, Sequence[str]], ...] = (
    ("greedy", ()),
    ("no_filter", ()),
    ("top_k_top_p[64]", ("allowed_token_ids",)),
    ("min_p", ("allowed_token_ids", "stops")),
    ("greedy", ("penalties", "dry", "allowed_token_ids")),
    ("no_filter", ("dry", "logit_bias", "allowed_token_ids")),
    ("min_p", ("min_tokens", "bad_words", "stops")),
    ("top_k_top_p[64]", ("penalties", "logit_bias", "watermark")),
    ("full", EVERY_EDIT),
)
"""Of random requests; masks come with calls, too."""


def asked(
    ranks: int,
    *questions: tuple[Callable[..., None], *tuple[Any, ...]],
    timeout_s: float = 60,
    backend: str = "gloo",
) -> None:
    """Ask each question, a function and its arguments, in as many processes; what one of them raises, fails."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_ask, (ranks, folder, questions, timeout_s, backend), nprocs=ranks)
        except Exception as error:  # of the rank that ended first, often one that lost its peer
            first, *others = sorted(Path(folder).glob("rank*"), key=lambda path: path.stat().st_mtime_ns) or [None]
            if first is None:
                raise
            raise AssertionError("\n".join(path.read_text() for path in (first, *others))) from error


def _ask(
    rank: int, ranks: int, folder: str, questions: Sequence[tuple[Any, ...]], timeout_s: float, backend: str
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    dist.init_process_group(backend, store, timedelta(seconds=timeout_s), world_size=ranks, rank=rank)
    try:
        for question, *args in questions:
            torch.manual_seed(0)  # torch's own first state is another one on each rank
            question(*args)
        gc.collect()  # closing a communicator of NCCL waits for graphs that hold its collectives
    except BaseException:  # written before its peers lose it
        Path(folder, f"rank{rank}").write_text(f"rank {rank} of {ranks}, {question.__name__}:\n{format_exc()}")
        raise
    finally:
        dist.destroy_process_group()


def shard_of(sizes: Sequence[int], *, slow_wire: bool = False) -> VocabularyShard:
    """The shard of this rank, whose ranks have so many columns."""
    ends = [0, *itertools.accumulate(sizes)]
    rank = dist.get_rank()
    return VocabularyShard(ends[rank], ends[rank + 1], slow_wire=slow_wire)


class Pair:
    """A sampler of whole rows, and one of the columns of this rank, which must return the same."""

    def __init__(self, vocab_size: int, sizes: Sequence[int], *, slow_wire: bool = False, **options: Any) -> None:
        self.shard, self.vocab_size = shard_of(sizes, slow_wire=slow_wire), vocab_size
        self.device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        backend = options.pop("backend", "eager")
        self.whole = Sampler(vocab_size, 256, self.device, backend="eager", **options)
        self.split = Sampler(vocab_size, 256, self.device, backend=backend, shard=self.shard, **options)
        self.rows = 0
        self.masks_are_columns = False

    def columns(self, rows: Tensor) -> Tensor:
        """Those of this rank, with columns of padding behind them, which hold NaN."""
        own = self.shard.own(rows, self.vocab_size)
        return torch.cat([own, own.new_full((len(rows), 3), torch.nan)], 1)

    def mask_of_columns(self, mask: Tensor) -> Tensor:
        """The bits of this rank's columns, packed anew; what is behind them is ones."""
        bits = (mask[:, :, None] >> torch.arange(32) & 1).flatten(1)[:, : self.vocab_size]
        own = self.shard.own(bits, self.vocab_size)
        own = F.pad(own, (0, -(-(self.shard.stop - self.shard.start) // 32) * 32 - own.shape[1]), value=1)
        return (own.view(len(mask), -1, 32) << torch.arange(32)).sum(-1).to(torch.int32)

    def added(self, params: SamplingParams, *tokens: Any) -> int:
        """The slot of a new request, in both."""
        slot = self.whole.add_request(params, *tokens)
        assert self.split.add_request(params, *tokens) == slot
        return slot

    def added_of(self, mode: str, count: int) -> list[int]:
        """The slots of new requests of a mode, of each of its laws in turn."""
        laws = LAWS_OF_MODES[mode]
        return [self.added(SamplingParams(seed=row, **laws[row % len(laws)])) for row in range(count)]

    def remove(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.whole.remove_request(slot)
            self.split.remove_request(slot)

    def plans(self, *args: Any, **options: Any) -> tuple[Plan, Plan]:
        return self.whole.plan(*args, **options), self.split.plan(*args, **options)

    def call(self, method: str, plans: tuple[Plan, Plan], logits: Tensor, *args: Any, **options: Any) -> Any:
        """What a method returns for whole rows, compared with what it returns for columns."""
        logits, args, options = tree_map_only(Tensor, lambda each: each.to(self.device), (logits, args, options))
        whole = getattr(self.whole, method)(plans[0], logits, *_of(0, args), **_of(0, options))
        columns = {
            name: self.columns(each) if name in ROW_TENSORS and each is not None else each
            for name, each in _of(1, options).items()
        }
        if self.masks_are_columns and columns.get("token_bitmask") is not None:
            columns["token_bitmask"] = self.mask_of_columns(columns["token_bitmask"])
        split = getattr(self.split, method)(plans[1], self.columns(logits), *_of(1, args), **columns)
        self.rows += len(logits)
        if isinstance(whole, Draft):
            same(whole.drawn, split.drawn)
            return whole, split
        own = self.shard.own(whole, self.vocab_size) if method in ("probs", "edited_logits") else whole
        same(own, split)
        return whole


def _of(place: int, values: Any) -> Any:
    """Of handles, which are pairs, those of the sampler of whole rows, or of the other one."""
    if isinstance(values, dict):
        return {name: _of(place, each) for name, each in values.items()}
    if isinstance(values, tuple):
        return tuple(_of(place, each) for each in values)
    return [pair[place] for pair in values] if isinstance(values, list) else values


def same(whole: Any, split: Any) -> None:
    whole_leaves, split_leaves = (
        [each for each in tree_leaves(results) if each is not None] for results in (whole, split)
    )
    assert len(whole_leaves) == len(split_leaves)
    for left, right in zip(whole_leaves, split_leaves, strict=True):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        bits = [each.contiguous().view(torch.uint8) if each.numel() else each for each in (left, right)]
        assert torch.equal(*bits), f"{(left != right).nonzero()[:5].tolist()}: {left} and {right}"


def rows_like(count: int, vocab_size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Hard rows and others, whose best tokens stand anywhere."""
    plain = 3.0 * torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed))
    hard = hard_rows(vocab_size)
    plain[: len(hard)] = hard[:count, torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))]
    return plain.to(dtype)


def every_mode(
    vocab_size: int,
    sizes: Sequence[int],
    count: int,
    dtypes: Sequence[torch.dtype],
    names: Sequence[str] = (*LAWS_OF_MODES,),
    slow_wire: bool = False,
) -> None:
    """Draws in each mode, by ``Sampler`` and by ``functional.sample``."""
    for base, dtype in (("top_k", dtypes[0]), ("all", dtypes[-1])):
        pair = Pair(vocab_size, sizes, slow_wire=slow_wire, top_p_base=base, logits_dtype=dtype)
        for name in names:
            laws = LAWS_OF_MODES[name]
            requests = [SamplingParams(seed=row, **laws[row % len(laws)]) for row in range(count)]
            slots = [pair.added(each) for each in requests]
            logits = rows_like(count, vocab_size, count + len(name), dtype)
            pair.call("sample", pair.plans([*slots[1:], -1], name), logits, torch.arange(count))
            pair.remove(slots)
            options: dict[str, Any] = {
                key: torch.tensor([getattr(each, key) for each in requests])
                for key in ("temperature", "top_k", "top_p", "min_p")
            }
            options |= {"seeds": torch.arange(count), "positions": 7, "mode": name, "top_p_base": base}
            options |= {"backend": "eager", "draw_index": 2, "vocab_size": vocab_size}
            whole = functional.sample(logits, **options)
            same(whole, functional.sample(pair.columns(logits), shard=pair.shard, **options))


def no_logits_travel() -> Any:
    """Within, rows of logits that a rank tells the others are an error."""
    refused = Mock(side_effect=AssertionError("logits must not travel"))
    return patch.multiple(VocabularyShard, whole_rows=refused, exchanged_rows=refused)


def with_law(request: Request, law: dict[str, Any]) -> None:
    """The random request draws by this law instead of its own."""
    for name in ("temperature", "top_k", "top_p", "min_p"):
        request.given.pop(name, None)
    request.given.update(law)


def counts_alone(vocab_size: int, sizes: Sequence[int]) -> None:
    """Draws and verifications that search on a slow wire, in which no logits travel."""
    with no_logits_travel():
        every_mode(vocab_size, sizes, 40, (F32, BF16), ("top_k", "full"), slow_wire=True)
        pair = Pair(vocab_size, sizes, slow_wire=True)
        slots = [pair.added(SamplingParams(seed=n, top_k=100, top_p=0.8)) for n in range(6)]
        verified, drafts = pair.plans(slots, num_drafts=[2] * 6), torch.zeros(6, 2, dtype=torch.int64)
        mask = random_mask(random.Random(1), 18, vocab_size)
        pair.call("verify", verified, rows_like(18, vocab_size, 1), drafts, torch.arange(6), token_bitmask=mask)


def compiled_counts(vocab_size: int) -> None:
    """A search on a slow wire runs compiled stages alone, and draws as eager torch does; on a single rank."""
    pair = Pair(vocab_size, (vocab_size,), slow_wire=True, backend="compiled")
    pair.split.warmup(modes=["full"])
    lowering = pair.split.statistics().lowering
    assert lowering is not None
    assert not lowering.eager_stages
    plans = pair.plans(pair.added_of("full", 32))
    for seed in range(5):
        pair.call("sample", plans, rows_like(32, vocab_size, seed), torch.arange(32))


def collectives_as_counted(vocab_size: int, sizes: Sequence[int]) -> None:
    """Draws make the collectives and send the bytes of ``tools.bench.sharded.COUNTED``, and logprobs those in docs."""
    sent: list[Tensor] = []

    def counting(function: Any, place: int) -> Any:
        return lambda *args, **options: (sent.append(args[place]), function(*args, **options))[1]

    reduces, gathers = counting(dist.all_reduce, 0), counting(shard_module._all_gather, 1)
    cases: list[tuple[str, Logprobs | None, int, int]] = [
        *((case, None, count, row_bytes) for case, (count, row_bytes, _) in COUNTED.items())
    ]
    wanted, blocks = Logprobs(top=5, rank=True, entropy=True, token_ids=(3, 4)), -(-vocab_size // LAW_BLOCK)
    cases += [
        ("greedy", Logprobs(), 1 + 2, 16 + 12 * blocks + 4),
        ("greedy", wanted, 1 + 3, 16 + 20 * blocks + 4 + 4 * 2 + 8 + 8 * (5 + 2)),
    ]
    for case, logprobs, count, row_bytes in cases:
        name, _, way = case.partition(", ")
        sampler = Sampler(vocab_size, 10, backend="eager", shard=shard_of(sizes, slow_wire=bool(way)))
        plan = sampler.plan([sampler.add_request(replace(CASES[name].params, seed=n)) for n in range(10)])
        columns, sent[:] = shard_of(sizes).own(rows_like(10, vocab_size, 0), vocab_size), []
        counted = patch.object(dist, "all_reduce", reduces), patch.object(shard_module, "_all_gather", gathers)
        with counted[0], counted[1], patch.object(sharded, "_EXCHANGED_BYTES", 0):
            sampler.sample(plan, columns, torch.arange(10), logprobs=logprobs)
        assert (len(sent), sum(each.nbytes for each in sent)) == (count, 10 * row_bytes), case


def captured(vocab_size: int, sizes: Sequence[int]) -> None:
    """Draws in some modes and a verification from captured variants, some of which are padded; others uncaptured."""
    modes, wanted = ("no_filter", "min_p", "top_k_top_p[64]", "full"), Logprobs(of="filtered", boundary=True)
    pair = Pair(vocab_size, sizes, backend="graph", buckets=[8, 32], verifications=[Verification("match", 2)])
    said(f"compiles and captures {modes}")
    pair.split.warmup(lambda done, total, label: said(f"{done} of {total}: {label}"), modes)
    for name in modes:
        said(f"replays {name}")
        laws = LAWS_OF_MODES[name]
        slots = [pair.added(SamplingParams(seed=row, **laws[row % len(laws)])) for row in range(32)]
        for count, seed in itertools.product((5, 8, 30, 32), range(3)):
            plans, logits = pair.plans(slots[:count], name), rows_like(count, vocab_size, seed)
            pair.call("sample", plans, logits, torch.arange(count) + seed)
        verified, drafts = pair.plans(slots[:8], num_drafts=[2] * 8), torch.randint(0, vocab_size, (8, 2))
        pair.call("verify", verified, rows_like(24, vocab_size, 1), drafts, torch.arange(8), "match")
        pair.call("sample", plans, logits, torch.arange(count), logprobs=wanted)  # in eager torch
        for slot in slots:
            pair.whole.remove_request(slot)
            pair.split.remove_request(slot)
    assert pair.split.statistics().replays >= 13 * len(modes)


def said(message: str) -> None:
    """Print what a rank does, and when: pytest shows it where a test fails or is cut off."""
    print(f"{time.strftime('%H:%M:%S')} rank {dist.get_rank()}: {message}", flush=True)


def every_rule(vocab_size: int, sizes: Sequence[int]) -> None:
    """Verifications by each rule, of each form of drafts, with logprobs or without."""
    counts, width, count = (2, 0, 3, 1), 3, 8
    for cached, names in ((0, ("greedy", "no_filter", "full")), (width, ("top_k_top_p[64]",))):
        pair = Pair(vocab_size, sizes, draft_cache_len=cached)
        for name in names:
            slots = pair.added_of(name, count)
            plans, positions = pair.plans(slots), torch.arange(count)
            verified = pair.plans(slots, num_drafts=[counts[n % 4] for n in range(count)])
            rows, drafted = verified[0].num_rows, verified[0].num_proposals
            logits, proposed = rows_like(rows, vocab_size, 1), rows_like(drafted, vocab_size, 1)
            handles: dict[bool, list[Any]] = {True: [], False: []}
            for coupled, offset in itertools.product((True, False), range(width)):
                drawn = pair.call(
                    "draft", plans, rows_like(count, vocab_size, offset), positions + offset, coupled, offset
                )
                handles[coupled].append(drawn)
            tokens = torch.stack([whole.token_ids for whole, _ in handles[True]], 1)
            for rule in RULES:
                pair.call("verify", verified, logits, tokens, positions, rule)
                pair.call("verify", verified, logits, handles[rule == "match"], positions, rule)
                probs = proposed.nan_to_num(0.0).softmax(-1)
                pair.call(
                    "verify_from_probs", verified, rows_like(rows, vocab_size, 2).abs(), tokens, positions, rule=rule
                )
                if rule != "match":
                    forms = ({"draft_logits": proposed}, {"draft_probs": probs})
                    processed = {"draft_logits": proposed, "draft_logits_are": "processed"}
                    for options in (*forms, processed):
                        pair.call("verify", verified, logits, tokens, positions, rule, **options)
                wanted = Logprobs(top=2, of="filtered", boundary=True)
                pair.call("verify", verified, logits, tokens, positions, rule, logprobs=wanted)
            pair.call("probs", verified, logits)
            pair.remove(slots)


def trees(vocab_size: int, sizes: Sequence[int]) -> None:
    """Trees of siblings that are drafted on every rank, and verified; with edits that read the history too."""
    width, count = 2, 6
    for edits in ((), ("penalties", "bad_words", "stops")):
        pair, source = Pair(vocab_size, sizes, history_len=48), random.Random(1)
        requests = [random_request(source, vocab_size, edits) for _ in range(count)]
        slots = [pair.added(each.params, each.prompt, each.output) for each in requests]
        positions = torch.tensor([each.position for each in requests])
        plans = pair.plans(slots)
        first, second = (rows_like(count, vocab_size, seed) for seed in (3, 4))
        drafted = [
            pair.call("draft", plans, logits, positions + depth, width=width)[0].token_ids
            for depth, logits in enumerate((first, second))
        ]
        tokens, parents = torch.cat(drafted, 1), torch.tensor([[-1, -1, 0, 0]] * count)
        verified = pair.plans(slots, num_drafts=[2 * width] * count)
        logits = torch.stack([first, second, *[rows_like(count, vocab_size, seed) for seed in (5, 6, 7)]], 1)
        out = pair.call("verify", verified, logits.flatten(0, 1), tokens, positions, parents=parents)
        assert edits or out.num_accepted.amax() == 2


def every_edit(vocab_size: int, sizes: Sequence[int]) -> None:
    """Steps with random edits, one after the other, whose tokens stand in the history; drafted and verified, too.

    First without masks, then with those of all tokens, then with those of each rank's columns and any bits of padding.
    """
    source = random.Random(3)
    pair = Pair(vocab_size, sizes, history_len=64, edit_sizes=EditSizes(bad_words=8))
    for mode, names in EDITS_OF_MODES:
        drawn_edits = [name for name in names if name != "watermark"]
        requests = [random_request(source, vocab_size, drawn_edits) for _ in range(10)]
        for row, (each, laws) in enumerate(zip(requests, itertools.cycle(LAWS_OF_MODES[mode]))):
            with_law(each, {**laws, **({"watermark_tokens": row % 3} if "watermark" in names else {})})
        slots = [pair.added(each.params, each.prompt, each.output) for each in requests]
        positions = torch.tensor([each.position for each in requests])
        plans = pair.plans(slots)
        assert plans[0].mode.name == mode
        for step in range(3):
            pair.masks_are_columns = step == 2
            logits = rows_like(10, vocab_size, step)
            mask = random_mask(source, 10, vocab_size) if step else None
            pair.call("probs", plans, logits, positions=positions + step, token_bitmask=mask)
            pair.call("edited_logits", plans, logits, positions + step, token_bitmask=mask)
            drawn = pair.call("sample", plans, logits, positions + step, token_bitmask=mask)
            assert drawn.token_ids.shape == (10,)
        drafts = torch.randint(0, vocab_size, (10, 2))
        if "watermark" not in names:
            drafted, _ = pair.call("draft", plans, logits, positions + 3, token_bitmask=mask)
            drafts[:, 0] = drafted.token_ids.clamp(min=0)
        verified, rows = pair.plans(slots, num_drafts=[2] * 10), rows_like(30, vocab_size, 9)
        masks = random_mask(source, 30, vocab_size)
        for rule, mask in itertools.product(RULES[: 1 if "watermark" in names else 3], (None, masks)):
            pair.call("verify", verified, rows, drafts, positions + 3, rule, token_bitmask=mask)
        pair.remove(slots)


def masks_that_might_be_either() -> None:
    """Where a shard takes as many words as all tokens, a mask of it is one of all; one of fewer words is refused."""
    pair = Pair(70, (3, 67))
    plans = pair.plans([pair.added(SamplingParams(seed=row)) for row in range(9)])
    mask = random_mask(random.Random(1), 9, 70)
    pair.call("sample", plans, rows_like(9, 70, 1), torch.arange(9), token_bitmask=mask)
    with pytest.raises(ValueError, match=r"token_bitmask must be \[9, >= 3\]"):
        pair.split.sample(plans[1], torch.zeros(9, 70), torch.arange(9), token_bitmask=mask[:, :2])
    pair = Pair(70, (35, 35))  # two words each, not one
    plans = pair.plans([pair.added(SamplingParams(seed=row)) for row in range(9)])
    with pytest.raises(ValueError, match=r"token_bitmask must be \[9, >= 3\]"):
        pair.split.sample(plans[1], torch.zeros(9, 70), torch.arange(9), token_bitmask=mask[:, :1])


def edits_of_the_user(sizes: Sequence[int]) -> None:
    """Steps with edits that need not look at a token by itself, for few rows and for more."""
    pair = Pair(V, sizes, history_len=HISTORY, edits=[*EDITS.values()])
    slots = [pair.added(params_with([*EDITS][: 1 + row % 4], seed=row, top_k=9), (1, 2, 3)) for row in range(11)]
    for count in (3, 11):
        positions, inputs = torch.full((count,), 3), random_inputs(count, count)
        plans, logits = pair.plans(slots[:count]), rows_like(count, V, count)
        pair.call("probs", plans, logits, positions=positions, edit_inputs=inputs)
        pair.call("sample", plans, logits, positions, edit_inputs=inputs)
        verified = pair.plans(slots[:count], num_drafts=[1] * count)
        inputs, drafts = random_inputs(2 * count, 1), torch.zeros(count, 1, dtype=torch.int64)
        for rule in RULES:
            pair.call("verify", verified, rows_like(2 * count, V, 2), drafts, positions, rule, edit_inputs=inputs)


def a_difference_is_seen() -> None:
    """The comparisons fail if a rank has the logits of other tokens, or another seed."""
    pair = Pair(300, (150, 150))
    plans = pair.plans([pair.added(SamplingParams(seed=row)) for row in range(20)])
    logits = rows_like(20, 300, 0)
    drawn = pair.whole.sample(plans[0], logits, torch.arange(20))
    own = pair.columns(logits)
    with pytest.raises(AssertionError):
        same(drawn, pair.split.sample(plans[1], own.flip(1)[:, 3:] if dist.get_rank() else own, torch.arange(20)))
    with pytest.raises(AssertionError):
        same(drawn, pair.split.sample(plans[1], own, torch.arange(20) + 1))


def disagreeing_plans() -> None:
    """Every rank raises where plans differ: in slots, requests, or in a request that one rank has not."""
    shard = shard_of((2, 2))
    sampler = Sampler(4, 4, backend="eager", shard=shard, check_plans=True)
    slots = [sampler.add_request(SamplingParams(seed=seed)) for seed in (1, 2)]
    sampler.plan(slots)
    with pytest.raises(RuntimeError, match="ranks must plan the same batch"):
        sampler.plan(slots[:: 1 - 2 * shard.rank])
    slot = sampler.add_request(SamplingParams(seed=3 + shard.rank))
    with pytest.raises(RuntimeError, match="ranks must plan the same batch"):
        sampler.plan([slot])
    if shard.rank:
        sampler.remove_request(slot)
    with pytest.raises(ValueError if shard.rank else RuntimeError, match="must"):
        sampler.plan([slot])


def seeds_of_none() -> None:
    """Requests without a seed get the same one on every rank, another for each sampler."""
    shard = shard_of((2, 2))
    samplers = [Sampler(4, 4, backend="eager", shard=shard) for _ in range(2)]
    seeds = [sampler.request(sampler.add_request(SamplingParams())).seed for sampler in samplers for _ in range(2)]
    assert len(set(seeds)) == 4
    assert shard.told(seeds) == [seeds, seeds]


def wrong_shards() -> None:
    """Bounds that do not follow each other are refused on every rank, as are shards of too few tokens."""
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"slow_wire must be one bool on all ranks, got \[False, True\]"):
        VocabularyShard(rank, rank + 1, slow_wire=rank == 1)
    for bounds, error in (
        (((0, 5), (6, 9)), ValueError),
        (((1, 5), (5, 9)), ValueError),
        (((0, 5), (5, 4)), ValueError),
        (((0, 5.0), (5, 9)), TypeError),
    ):
        with pytest.raises(error, match=r"must"):
            VocabularyShard(*bounds[rank])  # type: ignore[arg-type]
    shard = shard_of((5, 4))
    with pytest.raises(ValueError, match="shards must hold all 10 tokens, got 9"):
        Sampler(10, 1, shard=shard)
    with pytest.raises(ValueError, match=r"logits must be \[R, >= [54]\]"):
        functional.sample(torch.zeros(1, 3), seeds=1, positions=1, shard=shard)


def a_rank_that_leaves(seconds: float) -> None:
    """The other ranks get torch's error within the timeout of the group."""
    sampler = Sampler(4, 1, backend="eager", shard=shard_of((2, 2)))
    plan = sampler.plan([sampler.add_request(SamplingParams(seed=1))])
    if dist.get_rank():
        time.sleep(seconds)
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        sampler.sample(plan, torch.zeros(1, 2), torch.tensor([0]))
    assert time.monotonic() - began < 8
