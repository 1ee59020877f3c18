"""Decoding loops for ``generate`` of transformers, with tokens of this library.

::

    model.generate(**inputs, custom_generate=sample, seeds=[1, 2], do_sample=True, top_k=50)
    model.generate(**inputs, custom_generate=seeded_assisted, seeds=[1, 2], do_sample=True, prompt_lookup_num_tokens=4)

In the docstrings here B is the number of sequences of a call, with those that ``num_return_sequences`` adds.
"""

from compiled_sampler.integrations.transformers import requests  # noqa: F401  # checks the version before the loops are imported
from compiled_sampler.integrations.transformers.assisted import seeded_assisted
from compiled_sampler.integrations.transformers.sampling import sample

__all__ = ["sample", "seeded_assisted"]
