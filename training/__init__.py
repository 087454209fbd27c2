"""Trains models: objective, optimizers, state, step, checkpoints and records. This package may
import data, models and accel."""
