"""Train the two small models from text that Python ships, and store them as transformers reads them.

Command line::

    python -m tools.model.train --out FOLDER [--device cuda] [--threads 1]

Writes ``tokenizer.json``, ``target`` and ``draft`` (``config.json``, ``model.safetensors`` in bfloat16), and
``train.log`` into the folder. Needs the library tokenizers, which comes with transformers. The seed is fixed, and
one thread finds the same weights again; several add up gradients in no fixed order, and other machines and versions of
torch round otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tools.model import transformer
from tools.model.corpus import digest, documents
from tools.model.tokenizer import END_ID, PATTERN, SPECIAL_TOKENS, Tokenizer
from tools.model.weights import write_bfloat16

VOCAB_SIZE = 2048
CONFIGS = {
    "target": transformer.Config(VOCAB_SIZE, 128, 344, 2, 4, 2),
    "draft": transformer.Config(VOCAB_SIZE, 64, 176, 1, 2, 1),
}
STEPS = {"target": 1200, "draft": 4000}
"""Batches. More make the target know its text by heart, and its loss on held-out text grows from 3.3 to 3.6."""
LENGTH, ROWS = 128, 16
"""Tokens of a text in a batch, and texts."""
HELD_OUT = 20
"""One block of ``LENGTH`` tokens in so many is never trained on."""
PEAK_RATE, LAST_RATE, WARM_UP, DECAY = 4e-3, 0.05, 100, 0.1
"""Learning rate, its share at the end, steps until its peak, and weight decay of matrices."""
SEED = 0

Say = Callable[[str], None]


def main() -> None:
    """Train and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "train.log").open("w", encoding="utf-8") as log:

        def say(line: str) -> None:
            print(line, flush=True)
            print(line, file=log, flush=True)

        texts = documents()
        say(f"Python {platform.python_version()}, torch {torch.__version__}, {options.device}, seed {SEED}")
        say(f"{len(texts)} topics, {sum(map(len, texts)):,} characters, sha256 {digest(texts)[:16]}")
        train_tokenizer(texts, options.out / "tokenizer.json")
        trained, held_out = split(token_stream(texts, Tokenizer(options.out / "tokenizer.json")))
        say(f"{trained.numel():,} tokens to train on, {held_out.numel():,} held out")
        for name, config in CONFIGS.items():
            say(f"{name}:")
            weights = train(config, trained, held_out, STEPS[name], options.device, say)
            store(options.out / name, config, weights)


def train_tokenizer(texts: Sequence[str], path: Path) -> None:
    """Learn ``VOCAB_SIZE`` byte-level BPE tokens and store them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def token_stream(texts: Sequence[str], tokenizer: Tokenizer) -> Tensor:
    """All texts, ``<end>`` before each and behind the last: int64 ``[N]``."""
    return torch.tensor([token for text in texts for token in (END_ID, *tokenizer.encode(text))] + [END_ID])


def split(stream: Tensor) -> tuple[Tensor, Tensor]:
    """The stream ``[N]`` in texts of ``LENGTH + 1`` tokens: to train on, joined, and held out, ``[M, ...]``."""
    blocks = stream[: stream.numel() // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    is_held_out = torch.arange(len(blocks)) % HELD_OUT == HELD_OUT - 1
    return blocks[~is_held_out].flatten(), blocks[is_held_out]


def train(
    config: transformer.Config, stream: Tensor, held_out: Tensor, steps: int, device: str, say: Say
) -> dict[str, Tensor]:
    """Weights that predict a stream of tokens.

    Args:
        config: sizes of the model.
        stream: int64 ``[N]``; a batch is ``ROWS`` texts that begin anywhere in it.
        held_out: int64 ``[M, LENGTH + 1]``.
        steps: batches.
        device: to train on.
        say: takes a line now and then.
    """
    generator = torch.Generator().manual_seed(SEED)
    weights = initial_weights(config, generator, device)
    matrices, scales = ([w for w in weights.values() if (w.ndim > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": scales, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    say(f"has {sum(weight.numel() for weight in weights.values()):,} parameters")
    start = time.perf_counter()
    windows = stream.unfold(0, LENGTH + 1, 1)
    for step in range(1, steps + 1):
        texts = windows[torch.randint(len(windows), (ROWS,), generator=generator)].to(device)
        found = loss(config, weights, texts)
        optimizer.zero_grad()
        found.backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0 or step == steps:
            with torch.no_grad():
                other = loss(config, weights, held_out.to(device))
            seconds = time.perf_counter() - start
            say(f"step {step}: loss {found.item():.3f}, held out {other.item():.3f}, {seconds:.0f} s")
    return {name: weight.detach() for name, weight in weights.items()}


def initial_weights(config: transformer.Config, generator: torch.Generator, device: str) -> dict[str, Tensor]:
    """Float32 leaves that ask for gradients: norms of 1, matrices that keep the size of what they read."""
    found = {}
    for name, shape in transformer.shapes(config).items():
        values = torch.ones(shape)
        if len(shape) > 1:
            deviation = 0.02 if "embed" in name else shape[1] ** -0.5
            if "o_proj" in name or "down_proj" in name:  # what a layer adds to the sum of all layers
                deviation /= math.sqrt(2 * config.num_hidden_layers)
            values = torch.randn(shape, generator=generator) * deviation
        found[name] = values.to(device).requires_grad_()
    return found


def rate(step: int, steps: int) -> float:
    """The share of the peak learning rate: a line up, then half a cosine down."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    share = min(1.0, (step - WARM_UP) / max(1, steps - WARM_UP))
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * share))


def loss(config: transformer.Config, weights: dict[str, Tensor], texts: Tensor) -> Tensor:
    """Mean cross-entropy in nats of texts int64 ``[B, LENGTH + 1]``."""
    rotary = transformer.rotary_table(config, LENGTH, torch.float32).to(texts.device)[:, :, None]
    found = transformer.logits(config, weights, texts[:, :-1], rotary, _attend_within)
    return F.cross_entropy(found.flatten(0, 1), texts[:, 1:].flatten())


def _attend_within(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each token attends to those before it in its own text; ``[B, LENGTH, heads, D]``."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def store(folder: Path, config: transformer.Config, weights: dict[str, Tensor]) -> None:
    """Write ``config.json`` and ``model.safetensors``."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_json(), indent=1) + "\n", encoding="utf-8")
    write_bfloat16(folder / "model.safetensors", weights)


if __name__ == "__main__":
    main()
