"""Saves checkpoints atomically, verifies a checkpoint before it loads one, and writes
snapshots of averages."""
