"""Trained models in formats that other tools open: `python -m scripts.export`."""
