"""From stages to kernels: the one place that calls ``torch.compile`` and names Inductor."""
