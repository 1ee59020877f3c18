"""The boundary: checks of what a caller passes, each an error with the rule, the value and the way out.

Modules::

    settings    checks of what a sampler is made with
    edits       checks of the edits that a user wrote, and of what requests set for them
    arguments   checks of other arguments that are no tensors, and of calls inside a capture
    tensors     checks of tensors: dtype, shape, device, layout, memory
    outputs     layouts of results; checks of ``out``
"""
