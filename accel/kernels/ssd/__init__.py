"""Mamba-2's scan in both directions: definition, operator, steps and decays, long sequences, and
the scan with its convolution."""
