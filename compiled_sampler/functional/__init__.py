"""The sampler as functions of tensors: no slots, no requests, no plan, and the bits of ``Sampler``.

``sample``, ``probs``, ``verify`` and ``verify_from_probs`` take parameters as numbers for all rows, or as one tensor
``[R]`` on the device of the logits. They never wait for the device; ``warmup`` waits for the kernels of calls that
were made, which can then be captured in a CUDA graph that reads the tensors at each replay.

Edits of logits, filters of whole rows, stop tokens, logprobs and a draft cache are not here: a ``Sampler`` has them,
and these functions refuse their names with the way out. Modules, from the entry points down::

    functions      sample, probs, verify and verify_from_probs; what runs their stages, and its warmup
    arguments      what a caller passes: keywords, rows, a mode, parameters as tensors
    row_table      stages that make a slot table of these tensors, and mark the rows that draw nothing
"""

from compiled_sampler.functional.functions import probs, sample, verify, verify_from_probs, warmup

__all__ = ["probs", "sample", "verify", "verify_from_probs", "warmup"]
