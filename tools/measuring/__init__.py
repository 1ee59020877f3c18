"""What measurements share: the clock, the logits, and what is stored beside a number."""
