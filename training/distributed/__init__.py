"""The process around a run: ranks, signals, locks, loggers, progress, and the way it ends."""
