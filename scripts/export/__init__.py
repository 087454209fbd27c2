"""Exports trained models to formats that other tools open: `python -m scripts.export`."""
