"""How long does a call take? ``python -m tools.bench`` measures, ``python -m tools.bench.plot`` draws."""
