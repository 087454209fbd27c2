"""Weights of other trainings, and adapters on them."""
