"""Lets the ranks of a run communicate, catches signals that stop the run, and ends its process."""
