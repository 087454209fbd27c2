"""Command-line tools, run as `python -m scripts.<name>`."""

import os

import common.require_python  # noqa: F401  # refuses a Python that is too old, before anything else fails on it

# Silence the profiler, whose messages in the warm-up help no user. torch reads this variable when
# it is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
