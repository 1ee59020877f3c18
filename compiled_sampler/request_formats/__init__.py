"""Sampling parameters out of what other libraries hold: a GenerationConfig of transformers, a request body of OpenAI's.

Both functions return keyword arguments of ``SamplingParams``, which checks their values. A field that is set and that a
sampler cannot honour is an error that names it. Modules::

    generation_config  fields of a GenerationConfig
    openai_body        fields of a request body
    unhonoured         the check of fields that ask for what a sampler does not have
"""
