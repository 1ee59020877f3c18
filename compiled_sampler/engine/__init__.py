"""The engine's side of the sampler: requests in slots, plans, and steps on one of the backends.

Modules and folders, from the entry point down::

    sampler        Sampler: every step, warm-up and captures
    request_holder RequestHolder, which Sampler extends: requests and plans
    verification   Verifier: checks and runs verifications, at the width of a prepared step
    calls          what was checked is not checked again; results that come back in turn
    statistics     what Sampler.statistics returns
    integers       integers of 32 bits become 64 before the first stage
    steps          what runs on a backend, and what it reads
    drafts         drafts that were drawn: handles, and the cache of their logits
    plans          batches of held requests, and which mode serves them
    requests       what is held by slot: parameters, edits, histories
    boundary       checks of all else that a caller passes: arguments, tensors, ``out``
"""
