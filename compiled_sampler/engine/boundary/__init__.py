"""The boundary: checks of what a caller passes, each an error with the rule, the value and the way out.

Modules::

    arguments   checks of what a sampler is made with, and of a call's arguments that are no tensors
    edits       checks of the edits that a user wrote, and of what requests set for them
    tensors     checks of tensors: dtype, shape, device, layout, memory; layouts of results, checks of ``out``
"""
