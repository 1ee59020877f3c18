"""Which kernels is a step made of? ``python -m tools.kernels``."""
