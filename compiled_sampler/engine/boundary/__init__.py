"""The boundary: checks of what a caller passes, each an error with the rule, the value and the way out.

Modules::

    settings    checks of what a sampler is made with
    arguments   checks of other arguments that are no tensors
    tensors     checks of tensors: dtype, shape, device, layout
    outputs     layouts of results; checks of ``out``
    memory      whether tensors share memory
    capture     what must not happen inside a capture
"""
