"""The only hand-written kernels: the search and the race of single rows on CUDA, twins of definitions in plain torch.

Imported when the first CUDA tensor asks for them: CPU builds of torch have no Triton.
"""
