"""Accelerations: one technique a file, on the contract of accel/technique.py."""
