"""How much of the text on a machine without a download does a vocabulary of words cover?

python -m tools.toy_engine.coverage [--text FILE] [--vocab-size 32000] [--json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tools.toy_engine.corpus import UNK_ID, Vocabulary, documents, tokenize


def main() -> None:
    """Print how much text was found and how much of it the vocabulary covers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="learn from this file instead of the standard library")
    parser.add_argument("--vocab-size", type=int, default=32_000, help="entries of the vocabulary")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    texts = list(documents(args.text))
    tokens = [tokenize(text) for text in texts]
    vocabulary = Vocabulary.from_tokens(tokens, args.vocab_size)
    num_tokens = sum(map(len, tokens))
    num_unknown = sum(vocabulary.encode(document).count(UNK_ID) for document in tokens)
    facts = {
        "documents": len(texts),
        "characters": sum(map(len, texts)),
        "tokens": num_tokens,
        "different_tokens": len(set().union(*tokens)),
        "vocabulary": len(vocabulary),
        "covered_percent": round(100 * (1 - num_unknown / max(num_tokens, 1)), 2),
    }
    print(json.dumps(facts) if args.json else "\n".join(f"{name:>18} {value:>12,}" for name, value in facts.items()))


if __name__ == "__main__":
    main()
