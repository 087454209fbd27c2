"""Trains models: configuration, objective, state, step, checkpoints and metrics. This package may
import data, models and accel."""
