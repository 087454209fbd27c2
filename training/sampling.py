"""Raises an ImportError that says where `load_run`, formerly in this module, is now."""

raise ImportError("training.sampling is the package sampling now: from sampling import load_run")
