"""Helpers that every other package may import; they import no other package."""
