"""Drafts that a sampler drew.

Modules::

    draft_handles  Draft and Proposals: drafts and the distributions they were drawn from
    draft_cache    DraftCache: their logits by slot, which steps write and read in place
"""
