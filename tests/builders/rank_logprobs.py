"""Questions on logprobs to a sampler whose vocabulary is split over gloo processes, and on what they replay."""

import itertools
import random
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from compiled_sampler import Logprobs, SamplingParams, replay
from compiled_sampler.core.filters import KEEP_ALL
from compiled_sampler.logprobs import LAWS
from compiled_sampler.pipeline import sharded
from tests.builders.edits import random_mask, random_request
from tests.builders.ranks import BF16, F32, LAWS_OF_MODES, Pair, no_logits_travel, rows_like, same, shard_of, with_law


def logprobs_of_columns(vocab_size: int, sizes: Sequence[int]) -> None:
    """Logprobs of the laws that need no filters, in which no logits travel; with edits, and of a verification."""
    source, count, tokens = random.Random(5), 20, (0, vocab_size // 2, vocab_size - 1)
    everything: dict[str, Any] = {"token_ids": tokens, "rank": True, "entropy": True}
    raw, processed = Logprobs(top=20, **everything), Logprobs(of="processed", top=64, **everything)
    with no_logits_travel(), patch.multiple(sharded, _EXCHANGED_BYTES=0, _GATHERED_BYTES=0):
        for (name, laws), dtype in zip(LAWS_OF_MODES.items(), itertools.cycle((F32, BF16))):
            slow_wire = name in ("top_k", "full")
            pair = Pair(vocab_size, sizes, slow_wire=slow_wire, logits_dtype=dtype, history_len=48)
            slots = pair.added_of(name, count - 1)
            plans, logits = pair.plans([*slots, -1], name), rows_like(count, vocab_size, count, dtype)
            mask, positions = random_mask(source, count, vocab_size), torch.arange(count)
            for wanted in (raw, processed):
                pair.call("sample", plans, logits, positions, logprobs=wanted)
                pair.call("sample", plans, logits, positions, logprobs=wanted, token_bitmask=mask)
            pair.call("sample", plans, logits, positions, logprobs=Logprobs())
            pair.call("sample", plans, logits, positions, logprobs=Logprobs(of="processed", rank=True, top=1))
            requests = [random_request(source, vocab_size, ("penalties", "logit_bias", "stops")) for _ in range(4)]
            for each in requests:
                with_law(each, laws[0])
            slots = [pair.added(each.params, each.prompt, each.output) for each in requests]
            positions = torch.tensor([each.position for each in requests])
            verified, logits = pair.plans(slots, num_drafts=[2] * 4), rows_like(12, vocab_size, 3, dtype)
            for wanted in (raw, processed):
                pair.call("verify", verified, logits, logits[:8].argmax(-1).view(4, 2), positions, logprobs=wanted)


def compiled_logprobs(vocab_size: int, sizes: Sequence[int]) -> None:
    """After a warm-up, draws with logprobs need no further stage, whether logits travel or not, nor change a bit."""
    wanted = Logprobs(top=5, of="processed", rank=True, entropy=True, token_ids=(3, vocab_size - 1))
    options = {"backend": "compiled", "buckets": [2, 140, 200], "captured_logprobs": [wanted]}
    with patch.object(sharded, "_EXCHANGED_BYTES", 150 * vocab_size * 4):
        pair = Pair(vocab_size, sizes, **options)
        pair.split.warmup(modes=["min_p"])
        slots = pair.added_of("min_p", 200)
        for count in (2, 140, 200):
            whole, split = pair.plans(slots[:count], "min_p")
            logits, positions = rows_like(count, vocab_size, count), torch.arange(count)
            columns = pair.shard.own(logits, vocab_size).contiguous()
            of_columns = pair.split.sample(split, columns, positions, logprobs=wanted)
            same(pair.whole.sample(whole, logits, positions, logprobs=wanted), of_columns)
    lowering = pair.split.statistics().lowering
    assert lowering is not None
    assert not lowering.eager_stages
    assert not lowering.queued_stages


def every_law(vocab_size: int, sizes: Sequence[int]) -> None:
    """Logprobs, distributions and edited logits in each mode."""
    pair = Pair(vocab_size, sizes)
    for name in LAWS_OF_MODES:
        slots = pair.added_of(name, 16)
        plans, logits = pair.plans(slots, name), rows_like(16, vocab_size, 5)
        for law in LAWS:
            wanted = Logprobs(top=5, of=law, token_ids=(0, 7), rank=True, entropy=True, num_kept=True, boundary=True)
            pair.call("sample", plans, logits, torch.arange(16), logprobs=wanted)
        pair.call("probs", plans, logits)
        pair.call("edited_logits", plans, logits, torch.arange(16))


def a_replay(vocab_size: int, sizes: Sequence[int]) -> None:
    """Replayed logprobs, kept sets and gradients of rows of every mode; and of tokens that nothing filters."""
    pair, laws = Pair(vocab_size, sizes), [law for laws in LAWS_OF_MODES.values() for law in laws]
    params = [SamplingParams(seed=row, **laws[row % len(laws)]) for row in range(3 * len(laws))]
    plans, logits = pair.plans([pair.added(each) for each in params]), rows_like(len(params), vocab_size, 4)
    drawn = pair.call("sample", plans, logits, torch.arange(len(params)), logprobs=Logprobs(boundary=True))
    tokens, boundary = drawn.token_ids.clone(), drawn.logprobs.boundary
    tokens[-2:] = torch.tensor([vocab_size + 1, -1])
    whole, own = logits.clone().requires_grad_(), pair.shard.own(logits, vocab_size).clone().requires_grad_()
    of_whole, kept = replay(whole, params, tokens, boundary)
    of_own, own_kept = replay(own, params, tokens, boundary, shard=pair.shard)
    torch.testing.assert_close(of_own, of_whole, rtol=1e-12, atol=1e-12)
    same(pair.shard.own(kept, vocab_size), own_kept)
    for logprobs in (of_whole, of_own):
        finite = logprobs.isfinite()
        (torch.where(finite, logprobs, 0.0) * torch.arange(len(params))).sum().backward()
    assert whole.grad is not None
    assert own.grad is not None
    assert bool(whole.grad.any())
    torch.testing.assert_close(own.grad, pair.shard.own(whole.grad, vocab_size), rtol=1e-6, atol=1e-7)


def a_loss_of_torch(vocab_size: int, sizes: Sequence[int]) -> None:
    """The logprobs of requests without filters are what torch's loss of a split head is, gradients too."""
    shard, count = shard_of(sizes), 20
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(count) * vocab_size // count
    own, theirs = (shard.own(logits, vocab_size).clone().requires_grad_() for _ in range(2))
    logprobs, _ = replay(own, SamplingParams(), tokens, torch.full((count,), KEEP_ALL), shard=shard)
    logprobs.mean().neg().backward()
    mesh = init_device_mesh("cpu", (len(sizes),))
    with loss_parallel():
        loss = F.cross_entropy(DTensor.from_local(theirs, mesh, [Shard(1)]), tokens)
        loss.backward()
    torch.testing.assert_close(logprobs.mean().neg().float(), loss.full_tensor(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-4, atol=1e-6)
