"""An engine with continuous batching around the small model of ``tools.model``; ``python -m tools.demo`` shows it."""
