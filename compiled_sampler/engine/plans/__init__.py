"""Plans: batches of held requests, decided on the host alone.

Modules, from the entry point down::

    plan           Plan: a batch, its mode and its device tensors
    draft_places   where the drafts of a batch lie among padded ones, and the other way round
    mode_choice    the mode of a batch: the cheapest that covers it, or the one named
    plan_checks    checks of a caller's plan
"""
