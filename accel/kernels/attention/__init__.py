"""Attention by each backend, and the norm and rotation of queries and keys before it."""
