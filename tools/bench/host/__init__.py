"""How long does a step keep the host busy? ``python -m tools.bench --host``."""
