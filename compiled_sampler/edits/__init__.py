"""Edits of logits, elementwise and exactly rounded in float32: masks, biases, stops, penalties, DRY, bad words."""
