"""Tries fused kernels in a process of its own before a run uses them: parity first, then time."""
