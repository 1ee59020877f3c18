"""Looks for what breaks equal bits in an edit of logits that a user wrote: ``python -m tools.check_edit``."""
