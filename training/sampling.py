"""The former home of `load_run`, which says where it is now."""

raise ImportError("training.sampling is the package sampling now: from sampling import load_run")
