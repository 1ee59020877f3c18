"""The sampler under the names of other libraries, one file for each of them.

::

    flashinfer   the signatures of flashinfer.sampling, on ``compiled_sampler.functional``
"""
