"""Two small Llama models of English about Python, a target and a drafter; ``tools.model.train`` made them.

``target`` and ``draft`` are folders as transformers reads them, ``tokenizer.json`` serves both, ``train.log`` is what
the training printed.
"""
