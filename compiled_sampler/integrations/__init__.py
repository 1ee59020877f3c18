"""The sampler under the names of other libraries, one file or folder for each of them.

::

    flashinfer     the signatures of flashinfer.sampling, on ``compiled_sampler.functional``
    sglang         a sampling backend of SGLang
    transformers   loops for ``generate``, and continuous batching
    vllm           a plugin that draws for vLLM's V1 and V2 model runners
"""
