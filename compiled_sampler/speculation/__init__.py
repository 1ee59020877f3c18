"""Verification of drafts: ragged rows, acceptance, the residual, what is emitted."""
