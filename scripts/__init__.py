"""Tools that are run as `python -m scripts.<name>`."""

import os

import common.require_python  # noqa: F401  # refuses a Python that is too old, before anything else fails on it

# set before torch is imported; the profiled warm-up is ours, and its messages help no user
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
