"""Golden results of every mode, rule and top-p base, and a check that this machine reproduces them on every backend.

``python -m compiled_sampler.selfcheck`` draws the cases of ``cases.py`` and compares them with ``golden.json``: tokens,
counts, flags and checksums of probabilities, as they are under ``STREAM_VERSION`` 1. The inputs are made of integer
hashes and of floats that every format holds exactly, so that they are the same numbers on every machine and torch.
"""
