"""An engine with continuous batching around a trigram model of words; ``python -m tools.demo`` shows it."""
