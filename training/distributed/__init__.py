"""Ranks of a run, signals that stop it, and the end of its process."""
