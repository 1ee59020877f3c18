"""Processes of a run: parts of a question, the tokens of a fresh one, and what is compiled beforehand."""
