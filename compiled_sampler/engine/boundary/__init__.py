"""The boundary: checks of what a caller passes, each an error with the rule, the value and the way out.

Modules::

    arguments   checks of arguments that are no tensors
    tensors     checks of tensors: dtype, shape, device, layout
    outputs     layouts of results; checks of ``out``
    memory      whether tensors share memory
    capture     what must not happen inside a capture
"""
