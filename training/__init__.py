"""Training: configuration, objective, state, step, checkpoints, metrics. May use data, models and
accel."""
