"""Filters that look at a whole row: top-n-sigma, min-k, p-less, typical-p, the exclusion of top choices."""
