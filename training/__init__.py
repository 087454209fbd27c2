"""Trains models: settles what a run needs before its first step, takes the steps, keeps their state
in checkpoints, draws samples and records metrics. This package may import data, models and
accel."""
