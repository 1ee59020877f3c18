"""How long does a call take? ``python -m tools.bench``."""
