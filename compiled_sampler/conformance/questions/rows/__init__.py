"""The rows, batches and drafts that questions are asked with."""
