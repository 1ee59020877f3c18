"""Comparisons of all paths that a sampler names, of samples and of verifications."""
