"""Command-line tools, run as `python -m scripts.<name>`."""

import common.require_python  # noqa: F401  # refuses a Python that is too old, before anything else fails on it
