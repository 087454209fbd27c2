"""Reports a run: one HTML page that needs no network, and a model card."""
