"""Settles before the first step of a run how long the run is, which keys are the fastest, and
whether a step fits the memory."""
