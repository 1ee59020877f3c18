"""Steps: what runs on a backend, what it reads, and which of them are prepared.

Modules, from the entry point down::

    step_runner    StepRunner: eager, compiled or captured steps; warmup
    step_call      StepCall: a step on tensors; what it leaves in the history and the draft cache
    step           Step: one callable of the graph cache, and what it reads
    definition     a step by its definition, for the backend "reference"
    flat_results   results with logprobs as the flat named tuples of the graph cache
"""
