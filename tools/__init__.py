"""Scripts around the two packages, one question each: ``python -m tools.<name>`` from the top of the repository."""
