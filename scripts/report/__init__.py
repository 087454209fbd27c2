"""A report of a run: one HTML page that needs no network, and a model card beside it."""
