"""Commands around the two packages, by purpose; each answers one question, from the top of the repository.

``demo`` shows a toy engine, ``check`` the state of the repository, ``readme`` what was stored. A folder holds one
purpose: its commands, and what they share. All folders share ``measuring``.
"""
