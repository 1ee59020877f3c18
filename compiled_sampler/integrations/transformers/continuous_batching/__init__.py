"""Continuous batching of transformers (``generate_batch``, ``ContinuousBatchingManager``) with tokens of this library.

::

    outputs = generate_batch(model, prompts, seeds=[1, 2, 3], max_new_tokens=20)

    with installed(), model.continuous_batching_context_manager() as manager:
        manager.add_request(prompt, seed=1)

The draw is ``compiled_sampler.functional.sample``: a request's seed travels with it as numbers of its row, so there are
no slots, and a CUDA graph of transformers that holds the forward pass holds the draw too. Modules::

    installing   puts the two classes below where transformers makes its own, for a while
    batches      generate_batch with seeds
    processors   what travels with each request: its seed, and its parameters where they may differ
    runner       draws the tokens of a forward pass
"""

from compiled_sampler.integrations.transformers.continuous_batching.batches import generate_batch
from compiled_sampler.integrations.transformers.continuous_batching.installing import install, installed, uninstall

__all__ = ["generate_batch", "install", "installed", "uninstall"]
