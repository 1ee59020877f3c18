"""The sampler under the names of other libraries, one file or folder for each of them.

::

    flashinfer     the signatures of flashinfer.sampling, on ``compiled_sampler.functional``
    sglang         a sampling backend of SGLang
    transformers   loops for ``generate``, and continuous batching
    vllm           a plugin that draws for vLLM's V1 and V2 model runners
    tokenspeed     says why it has no adapter

    engine_interface  whether an installed engine has what an adapter needs of it
    sampler_pool      samplers that are lent to one ``generate`` after the other
"""
