"""The engine's side of the sampler: requests in slots, plans, and steps on one of the backends.

Modules and folders, from the entry point down::

    sampler        Sampler: every step
    request_holder RequestHolder: requests and plans
    preparation    Preparation, which extends it: warm-up, captures, bound buffers, counts
    distributions  Distributions, which extends that, and Sampler it: probs and edited logits
    statistics     what Sampler.statistics returns
    drawing        Drawer: checks and runs sampling, drafting and probabilities
    verification   Verifier: checks and runs verifications, at the width of a prepared step
    integers       integers of 32 bits become 64 before the first stage
    steps          what runs on a backend, and what it reads
    drafts         drafts that were drawn: handles, and the cache of their logits
    plans          batches of held requests, and which mode serves them
    requests       what is held by slot: parameters, edits, histories
    boundary       checks of all else that a caller passes: arguments, tensors, ``out``
"""
