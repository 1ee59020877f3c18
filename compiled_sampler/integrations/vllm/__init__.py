"""The sampler inside vLLM's model runners: ``COMPILED_SAMPLER_VLLM=1``, or ``install()`` before an engine is made.

In the docstrings here N is the number of requests of a batch, K the most drafts of one of them.
"""

from compiled_sampler.integrations.vllm.parameters import VARIABLE
from compiled_sampler.integrations.vllm.plugin import install, statistics, uninstall

__all__ = ["VARIABLE", "install", "statistics", "uninstall"]
