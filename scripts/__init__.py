"""Tools that are run as `python -m scripts.<name>`."""
