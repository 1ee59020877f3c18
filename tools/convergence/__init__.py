"""How the law of emitted tokens converges to the target's, with drafts and without."""
