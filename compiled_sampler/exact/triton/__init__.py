"""The only hand-written kernels: the search and the race of single rows on CUDA, twins of definitions in plain torch.

Imported when the first CUDA tensor asks for them, but for ``lists``: CPU builds of torch have no Triton.
"""
