"""A stage before it is compiled: its tuning, the layouts of its tensors, its calls, and equal results."""
