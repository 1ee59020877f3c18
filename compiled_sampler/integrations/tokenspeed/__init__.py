"""The sampler as a sampling backend of TokenSpeed: ``COMPILED_SAMPLER_TOKENSPEED=triton``, or ``install()``.

In the docstrings here B is the number of requests of a batch, N the tokens of each that a verification reads: the last
one and its drafts.
"""

from compiled_sampler.integrations.tokenspeed.plugin import NAME, install
from compiled_sampler.integrations.tokenspeed.settings import VARIABLE

__all__ = ["NAME", "VARIABLE", "install"]
