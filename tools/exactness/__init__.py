"""Are tokens the same bits on every path? ``python -m tools.exactness.determinism`` and ``.streams``."""
