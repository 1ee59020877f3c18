"""Exactly rounded arithmetic: fixed-point masses, logarithms, roots, polynomials; the same bits everywhere."""
