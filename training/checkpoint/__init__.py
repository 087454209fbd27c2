"""Saves checkpoints atomically, and verifies them before they are loaded."""
