"""The law of a row in integers, of which tokens it consists, and the logprobs that follow from it."""
