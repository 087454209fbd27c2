"""Mamba-1's selective scan."""
