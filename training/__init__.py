"""Trains models: what is settled before the first step, objective, optimizers, state, step,
checkpoints, weights, samples and records. This package may import data, models and accel."""
