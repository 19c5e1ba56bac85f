"""Ranks and what passes between them: the only users of process groups."""
