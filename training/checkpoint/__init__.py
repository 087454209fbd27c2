"""Checkpoints: what a file holds, how a save is made whole, how a good one is found again."""
