"""The sampler under the names of other libraries, one file or folder for each of them.

::

    flashinfer     the signatures of flashinfer.sampling, on ``compiled_sampler.functional``
    transformers   loops for ``generate``
    vllm           a plugin that draws for vLLM's V1 model runner
"""
