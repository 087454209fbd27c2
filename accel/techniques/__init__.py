"""Accelerations of a training step: one technique per file, each with the interface of
accel/technique.py."""
