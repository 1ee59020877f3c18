"""The sampler as a sampling backend of SGLang: ``COMPILED_SAMPLER_SGLANG=1``, or ``install()`` before an engine.

In the docstrings here B is the number of rows of a batch, one a request.
"""

from compiled_sampler.integrations.sglang.plugin import NAME, VARIABLE, install

__all__ = ["NAME", "VARIABLE", "install"]
