"""Are the bits behind the noise random, and is its law right? ``python -m tools.noise.random_bits`` and ``.law``."""
