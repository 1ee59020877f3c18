"""The calls that are measured: cases, their batches, what else there is, floors, and the grid of runs."""
