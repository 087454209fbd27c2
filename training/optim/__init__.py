"""Turns gradients into updates: groups parameters, schedules the rate, holds Muon and optimizers
with a small state, averages weights, and guards against spikes."""
