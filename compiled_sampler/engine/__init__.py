"""The engine's side of the sampler: requests in slots, plans, and steps on one of the backends.

Modules and folders, from the entry point down::

    sampler        Sampler: every step, warm-up and captures
    request_holder RequestHolder, which Sampler extends: requests and plans
    verifier       Verifier: checks and runs verifications, at the width of a prepared step
    calls          Calls: what was checked and chosen for calls like this one; the frames of a call that is known
    step_runner    StepRunner: eager, compiled or captured steps; warmup; what Sampler.statistics returns
    step_executor  StepExecutor: a step on tensors, also by the definition; what it leaves in history and draft cache
    step           Step: one callable of the graph cache, and what it reads
    drafts         drafts that were drawn: handles, and the cache of their logits
    plan           Plan: a batch and the mode that serves it; checks of its kind, its edits and its buffers
    requests       what is held by slot: parameters, edits, histories
    boundary       checks of all else that a caller passes: arguments, tensors, ``out``
"""
