"""The engine's side of the sampler: requests in slots, plans, and steps on one of the backends.

Modules, from the entry point down::

    sampler        Sampler: every step
    request_holder RequestHolder: requests and plans
    preparation    Preparation, which extends it: warm-up, captures, bound buffers, counts
    distributions  Distributions, which extends that, and Sampler it: probs and edited logits
    drawing        Drawer: checks and runs sampling, drafting and probabilities
    verification   Verifier: checks and runs verifications, at the width of a prepared step
    step_runner    StepRunner: eager, compiled or captured steps; warmup
    step           Step: one callable of the graph cache, and what it reads
    step_call      StepCall: a step on tensors; what it leaves in the history and the draft cache
    definition     a step by its definition, for the backend "reference"
    flat_results   results with logprobs as the flat named tuples of the graph cache
    logprob_tables LogprobTables: what steps with logprobs read
    integers       integers of 32 bits become 64 before the first stage
    planner        Planner: requests and kept plans; decides on the host alone
    slots          SlotState: the requests by slot, and which modes cover them
    mode_choice    the mode of a batch: the cheapest that covers it, or the one named
    edit_slots     EditSlots: the edits of requests by slot, and the tables that steps read
    edit_layout    where they stand in a slot's row; EditSizes
    history        TokenHistory: the tokens of requests by position
    uploads        StagedTable: their parameters on the device; what goes there goes together
    known_calls    KnownCalls: what was checked is not checked again
    plan           Plan: a batch, its mode and its device tensors
    draft_handles  Draft and Proposals: drafts and the distributions they were drawn from
    draft_cache    DraftCache: their logits by slot, which steps write and read in place
    plan_checks    checks of a caller's plan
    boundary       checks of all else that a caller passes: arguments, tensors, ``out``
"""
