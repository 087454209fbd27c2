"""Reads weights of earlier runs, and adapters that were trained on them."""
