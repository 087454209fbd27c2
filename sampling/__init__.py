"""Draws samples of a run: its model with the averaged weights, and jobs that go on where they
stopped."""
