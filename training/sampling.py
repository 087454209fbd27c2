"""Tells importers of this module's old name where `load_run` is now."""

raise ImportError("training.sampling is the package sampling now: from sampling import load_run")
