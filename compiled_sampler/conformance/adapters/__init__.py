"""Adapters that are shipped; each imports its library only when it is used."""
