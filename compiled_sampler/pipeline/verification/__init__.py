"""The verification of drafts as stages: its rows, what drafts were drawn from, its rules, its logprobs."""
