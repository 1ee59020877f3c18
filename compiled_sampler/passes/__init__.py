"""Stages over rows: how a row is read, its block maxima, races, candidates and laws. Plain torch on any device."""
