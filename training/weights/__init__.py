"""Reads model weights of earlier runs, and adapters that were trained on such models."""
