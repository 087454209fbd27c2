"""Saves checkpoints atomically, and verifies a checkpoint before it loads one."""
